"""A row's privacy and its price are of one training: what is attacked was sent in it, bit for bit."""

import json

import pytest
import torch
from typer.testing import CliRunner

from gradveil.attacks import build_attack
from gradveil.audits import audit
from gradveil.audits.plan import plan
from gradveil.audits.stage import views
from gradveil.audits.tapping import load_tap, world_of
from gradveil.audits.utility import price_cell
from gradveil.cli import app
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.metrics.recognition import OTHER_IMAGES
from gradveil.report.audit_folder import read_audit
from tests.audits.conftest import QUICK
from tests.audits.test_run import timeless


def sent(settings, defence, seed=0):
    """Return the digests of all updates of tapped rounds in the training, played once more."""
    training = world_of(settings, defence, seed, load_dataset(settings.dataset)).training
    found = {}
    with Simulation(training, workers=0) as simulation:
        for number in range(1, training.rounds + 1):
            for client, update in simulation.step(number)[1].recovered.items():
                found[number, client] = update.sha256()
    return found


def privacy(result):
    return [row for row in result.rows if row["kind"] == "privacy"]


@pytest.mark.parametrize("protocol", ["lab", "fedavg"])
def test_attacked_updates_are_those_that_the_training_sent(small, tmp_path, protocol):
    settings = small(
        defences="gaussian:std=0.01,entangle", rounds=4, tap="1/4", protocol=protocol, attacks="gs:iterations=3",
        partition="iid:images=6", batch_size=4, knows="labels,num-examples,local-steps", seeds=2,
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    for defence in settings.defences:
        for seed in (0, 1):
            replayed = sent(settings, defence, seed)
            rows = [row for row in privacy(result) if (row["defence"], row["seed"]) == (defence, seed)]
            assert {row["round"] for row in rows} == {1, 4}
            assert all(row["update_sha256"] == replayed[row["round"], row["client"]] for row in rows)
    steps = {"lab": 1, "fedavg": 2}[protocol]
    assert {(row["local_steps"], row["images"]) for row in privacy(result)} == {(steps, 1 if steps == 1 else 6)}
    assert {row["batch_norm"] for row in privacy(result)} == {"average"}
    assert not any(row["branched"] for row in privacy(result))
    noisy = {row["defence"] for row in privacy(result) if row["signal_to_noise"] is not None}
    assert noisy == {"gaussian:std=0.01"}
    assert read_audit(result.out).notes == ()


def test_every_defence_has_the_same_clients_and_images(small, tmp_path):
    settings = small(defences="prune,entangle,fedkl:length=8", model="lenet-dlg", attacks="gs:iterations=2")
    result = audit(settings, tmp_path / "run", workers=0)
    who = {}
    for row in privacy(result):
        who.setdefault(row["defence"], []).append((row["round"], row["target"], row["client"]))
    assert len({tuple(each) for each in who.values()}) == 1
    assert not any("other images" in note for note in read_audit(result.out).notes)


def test_images_of_attacked_lab_batches_are_marked_under_every_defence(small):
    settings = small(defences="prune", sensitive="none")
    dataset = load_dataset(settings.dataset)
    worlds = [world_of(settings, defence, 0, dataset) for defence in settings.defences]
    for world in worlds:
        with Simulation(world.training, workers=0) as simulation:
            for number, clients in world.chosen.items():
                for client in clients:
                    batch = simulation.data.client(client)[world.positions(number, client)]
                    assert batch.sensitive.all()
                    assert torch.equal(batch.images, world.private(number, client).images)
            assert simulation.data.sensitive.sum() <= 4


def test_a_row_whose_update_was_not_sent_is_reported(small, tmp_path):
    result = audit(small(attacks="gs:iterations=2"), tmp_path / "run", workers=0)
    listed = next((result.out / "trainings").glob("*/updates.json"))
    listed.write_text(json.dumps({"1": {"0": "0" * 64}}))
    (note,) = read_audit(result.out).notes
    assert note.startswith("4 attacked updates are not among those that their trainings list as sent")
    said = CliRunner().invoke(app, ["report", str(result.out)])
    assert f"Note: {note}" in said.stderr
    document = json.loads(CliRunner().invoke(app, ["report", str(result.out), "--json"]).stdout)
    assert document["notes"] == [note]


def test_a_malicious_server_branches_off_at_the_tapped_round(small, tmp_path):
    settings = small(
        attacks=f"{QUICK},imprint:bins=8", defences="prune", knows="labels,num-examples,alters-model", model="mlp",
        rounds=3, tap="3",
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    assert {(row["attack"].partition(":")[0], row["branched"]) for row in privacy(result)} == {
        ("gs", False),
        ("imprint", True),
    }
    assert read_audit(result.out).notes == ()


def test_several_looks_branch_off_too(small, tmp_path):
    settings = small(attacks="gs:iterations=2", looks=2, tap="2")
    rows = privacy(audit(settings, tmp_path / "run", workers=0))
    assert [row["branched"] for row in rows] == [True, True]


def test_clients_of_different_sizes_are_attacked_each_with_its_own_number_of_images(small, tmp_path):
    settings = small(
        protocol="fedavg", partition="dirichlet:alpha=1.0", tap="1", attacks="gs:iterations=2", targets=3,
        knows="labels,num-examples,local-steps",
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    sizes = world_of(settings, "none", 0, load_dataset(settings.dataset)).data.sizes
    assert [row["images"] for row in privacy(result)] == [sizes[row["client"]] for row in privacy(result)]
    assert len({row["images"] for row in privacy(result)}) > 1


def test_taps_are_deleted_after_the_last_attack_and_made_again_if_one_is_repeated(small, tmp_path):
    settings, out = small(defences="prune", attacks="gs:iterations=2"), tmp_path / "run"
    first = audit(settings, out, workers=0)
    assert not list(out.glob("trainings/*/private"))
    assert len(list(out.glob("trainings/*/updates.json"))) == 2
    last = plan(settings)[-1]
    (out / "cells" / f"{last.name}.json").unlink()
    again = audit(settings, out, workers=0, resume=True)
    assert timeless(again.rows) == timeless(first.rows)


def test_an_audit_from_before_protocols_is_named_and_not_resumed(small, tmp_path):
    settings, out = small(attacks="gs:iterations=2", rounds=1), tmp_path / "run"
    audit(settings, out, workers=0)
    text = (out / "settings.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("protocol", "tap", "aggregation"))]
    (out / "settings.toml").write_text("\n".join([*lines, 'update = "gradient"', 'algorithm = "fedavg"', ""]))
    assert "This audit is of an old form" in read_audit(out).notes[0]
    with pytest.raises(ConfigError, match="update is a setting of audits before --protocol"):
        audit(settings, out, workers=0, resume=True)


@pytest.mark.parametrize("aggregation", ["none", "secure"])
def test_images_that_a_defence_draws_by_itself_are_those_that_are_scored(small, tmp_path, aggregation):
    settings = small(
        defences="dp-sgd,dp-sgd:sampling=shuffle,dp-sgd+prune", rounds=2, tap="1/2", attacks="gs:iterations=3",
        partition="iid:images=6", clients=8, targets=8, aggregation=aggregation,
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    assert not any(OTHER_IMAGES in row["flags"] for row in privacy(result))
    counts = {}
    for row in privacy(result):
        counts.setdefault(row["defence"], []).append(row["images"])
        assert (row["psnr"] is None) == (row["images"] == 0)
        assert ("drew no image" in row["why"]) == (row["images"] == 0)
    if aggregation == "none":
        assert {*counts["none"]} == {*counts["dp-sgd:sampling=shuffle"]} == {1}
        assert {0, 1} < {*counts["dp-sgd"]} == {*counts["dp-sgd+prune"]}  # Poisson samples vary in size
    assert read_audit(result.out).notes == ()


def test_a_mixture_of_drawn_images_is_flagged(small, tmp_path):
    settings = small(
        defences="mixup:k=2+dp-sgd", rounds=1, tap="1", attacks="gs:iterations=3", partition="iid:images=6", images=2
    )
    result = audit(settings, tmp_path / "run", workers=0)
    flagged = {row["defence"] for row in privacy(result) if OTHER_IMAGES in row["flags"]}
    assert flagged == {line["defence"] for line in result.summary if OTHER_IMAGES in line["flags"]} != set()


def test_a_page_that_shows_all_tapped_rounds_does_not_say_that_some_are_missing(small, tmp_path):
    result = audit(small(rounds=2, tap="1/2", attacks="gs:iterations=3"), tmp_path / "run", workers=0)
    assert "targets are shown" not in result.report.read_text()


@pytest.mark.parametrize("defence", ["precode", "fedkl:length=8", "none"])
def test_a_branch_begins_with_the_tapped_model_also_in_layers_that_the_defence_made(small, tmp_path, defence):
    settings = small(
        defences=defence, attacks="gs:iterations=2", looks=2, tap="2", model="lenet-dlg", dataset="mnist-5k", lr=0.5,
    )  # fmt: skip
    dataset, out = load_dataset(settings.dataset), tmp_path / "run"
    training, cell = plan(settings)[-2:]
    price_cell(training, settings, dataset, None, out)
    (view,), _ = views(cell, settings, dataset, build_defence(defence), build_attack(settings.attacks[0]), None, out)
    tapped = load_tap(out / "trainings" / training.name, 2, out / "cells")
    state = view.seen.network.state_dict()
    assert state.keys() == tapped.model.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in tapped.model.items())


def test_the_noise_beside_dropout_is_that_of_the_defence_alone(small, tmp_path):
    settings = small(
        defences="gaussian:std=1e-7", attacks="gs:iterations=2", tap="1", rounds=1, dataset="mnist-5k",
        model="vgg16:head=full,width=4,hidden=16,dropout=0.5", images=2, batch_norm="freeze",
    )  # fmt: skip
    rows = [row for row in privacy(audit(settings, tmp_path / "run", workers=0)) if row["defence"] != "none"]
    assert all(row["signal_to_noise"] > 100 for row in rows)
