"""A recommendation keeps the wish by proof, is chosen without test images, costs least, and is verified."""

import json
import math
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradveil.config import make_train_settings, read_settings
from gradveil.data import load_dataset
from gradveil.defences import planned_defence
from gradveil.defences.parts.gaussian_dp import epsilon_of, identification_bound
from gradveil.engines.site_policy import agree, read_policy
from gradveil.errors import ConfigError, DataError, RefusedError
from gradveil.federated.budgets import weakest_budget
from gradveil.federated.protocol import Protocol
from gradveil.report.recommendation import headline
from gradveil.runs import recommend as module
from gradveil.runs import trials
from gradveil.runs.advice import advise, run_config, site_policy, unprotected
from gradveil.runs.candidates import ClientSizes, Protection, candidates, undominated
from gradveil.runs.judged import check_of, judged, line_of, picked_of
from gradveil.runs.recommend import recommend
from gradveil.runs.train import train
from gradveil.runs.wish import DELTA, Wish
from gradveil.runs.worst_case import breaks, scene, strongest

SMALL = Wish(model="logistic", clients=2, partition="iid:images=40", rounds=4, max_loss=6, seeds=2)
SIZES = ClientSizes([40, 40], 7850)
BEST = "veil on patches, noise shared in secure sums, 120 rounds"


@pytest.fixture
def played(monkeypatch):
    """Let trainings and attacks end at once; return the folder's name, settings and data of each training."""
    calls = []

    def end(training, folder, *, dataset, progress, **_):
        calls.append((folder.name, training, dataset))
        rounds = 0.0001 * training.rounds
        accuracy = {"logistic": 0.9, "patches": 0.85}[training.model] + rounds
        accuracy += 0.02 * ("at=sum" in training.defence) - 0.3 * ("dp-sgd" in training.defence)
        mu = float(training.defence.split("mu=")[1].split(",")[0]) if "veil" in training.defence else None
        progress(training.rounds, None, "")
        row = {"accuracy": accuracy, "mu": mu, "epsilon": epsilon_of(mu, DELTA) if mu else None}
        if "dp-sgd" in training.defence:
            row["epsilon"] = 2.0
        return type("Result", (), {"rows": [row | {"seconds": len(calls)}]})

    def attack(settings, out, data_root, progress):
        rows = [
            {"kind": "privacy", "defence": defence, "adaptive": knowing, "psnr": 40.0 if defence == "none" else 9.0,
             "blind_psnr": 12.0, "identified": float(defence == "none"), "images": 1, "candidates": 1000}
            for defence in settings.defences for knowing in (False, True) if (defence, knowing) != ("none", True)
        ]  # fmt: skip
        return type("Result", (), {"rows": rows, "failed": {}})

    monkeypatch.setattr(trials, "train", end)
    monkeypatch.setattr(module, "run_audit", attack)
    return calls


@pytest.mark.parametrize("bound", [0.05, 0.3])
def test_mu_is_the_largest_that_keeps_the_wish_for_images(bound):
    mu = replace(SMALL, identified=bound).mu
    assert identification_bound(mu) <= bound < identification_bound(mu + 0.002)


def test_mu_is_the_largest_that_keeps_the_wish_for_membership():
    mu = replace(SMALL, protect="membership", epsilon=5).mu
    assert epsilon_of(mu, DELTA) <= 5 < epsilon_of(mu + 0.002, DELTA)


def test_without_mu_the_chance_to_be_picked_follows_from_epsilon():
    """By the definition: P(pick with the image) <= e^epsilon P(pick without it) + delta, and 1 / 1,000 without it."""
    epsilon = replace(SMALL, identified=0.05).whole_epsilon
    assert math.exp(epsilon) / 1000 + DELTA == pytest.approx(0.05)
    assert picked_of(epsilon, None) == pytest.approx(0.05)
    assert picked_of(3.0, 1.0) == identification_bound(1.0)


def test_every_proven_candidate_keeps_the_wish_in_short_and_in_full():
    for wish in (SMALL, replace(SMALL, protect="membership", epsilon=3.0), replace(SMALL, protect="client")):
        for share in (1.0, 0.25):
            for one in candidates(wish, SIZES, share):
                if one.proven and one.training:
                    asked = planned_defence(one.training).training(one.training)
                    how = Protocol.of(asked).local
                    budget = weakest_budget(planned_defence(asked), how, SIZES.images, one.training.rounds)
                    assert (budget.mu or 0) <= wish.mu * 1.001
                    if budget.mu is None:
                        assert budget.epsilon <= wish.whole_epsilon


def test_a_malicious_server_gets_no_shared_noise():
    for server, there in (("honest", True), ("malicious", False)):
        shared = [c for c in candidates(replace(SMALL, server=server), SIZES) if "shared" in c.name]
        assert shared
        assert all((one.training is not None) == there and bool(one.why_not) != there for one in shared)


def test_whole_clients_are_hidden_by_veil_alone():
    some = candidates(replace(SMALL, protect="client"), SIZES)
    assert all("unit=client" in c.training.defence for c in some if c.training)
    assert any("not clients" in c.why_not for c in some)


def test_larger_batches_are_tried_unless_others_have_more_steps_and_more_signal():
    some = [c for c in candidates(replace(SMALL, batch_size=4), SIZES) if c.name.startswith("dp-sgd")]
    assert [c.steps for c in some] == [40, 12, 4]
    assert [c.training.batch_size for c in some] == [4, 16, 0]
    assert [c.signal for c in some] == sorted(c.signal for c in some)
    plain = Protection("many", SMALL.reference(), signal=2.0, steps=9)
    left = undominated([plain, replace(plain, name="few", steps=3), replace(plain, name="weak", steps=3, signal=1.0)])
    assert [one.training is not None for one in left] == [True, True, False]
    assert "fewer steps and more noise" in left[2].why_not


def test_what_has_no_proof_is_listed_and_tried_only_if_asked():
    for proof, tried in (("required", False), ("measured", True)):
        some = [c for c in candidates(replace(SMALL, proof=proof), SIZES) if not c.proven]
        assert some
        assert all((c.training is not None) == tried for c in some)
        assert all("no proof" in c.name for c in some)


def test_the_least_loss_on_held_out_images_is_recommended_and_verified_on_test_images(played, tmp_path):
    found = recommend(SMALL, tmp_path / "r")
    assert found.chosen == BEST
    assert found.confirmed
    assert {line["why"] for line in found.lines if line["holds"]} == {"", "it keeps the wish too, and loses more"}
    digits = load_dataset("mnist-5k")
    for name, _, dataset in played:
        size = len(digits.test) if name.startswith("verify") else round(0.2 * len(digits.train))
        assert len(dataset.test) == size
    assert {training.seed for name, training, _ in played if name.startswith("verify")} == {0, 1}
    check = found.document["check"]
    assert check["losses"] == pytest.approx([100 * (0.9004 - 0.882)] * 2)
    chosen = make_train_settings(read_settings(tmp_path / "r" / "recommended.toml"))
    assert chosen == next(training for name, training, _ in played if name == "verify-0")
    page = (tmp_path / "r" / "report.html").read_text()
    assert headline(json.loads((tmp_path / "r" / "recommendation.json").read_text())) in page
    assert "sees single updates" in page


def test_only_finalists_are_trained_in_full_and_attacked(played, tmp_path):
    found = recommend(SMALL, tmp_path / "r")
    full = [name for name, _, _ in played if name.startswith("full")]
    short = [name for name, _, _ in played if name.startswith("short")]
    assert len(full) == module.FINALISTS < len(short)
    assert all((line["psnr"] == 9.0) == (line["stage"] == "full") for line in found.lines)
    dear = recommend(replace(SMALL, max_loss=2.0), tmp_path / "dear").lines
    assert all((line["psnr"] == 9.0) == (line["stage"] == "full" and line["loss"] <= 2) for line in dear)
    assert any(line["stage"] == "full" and line["loss"] > 2 for line in dear)
    ruled_out = [line for line in found.lines if line["stage"] == "arithmetic"]
    assert ruled_out
    assert all(line["why"] and line["accuracy"] is None for line in ruled_out)


def test_other_budgets_are_drawn_beside_the_wish(played, tmp_path):
    frontier = recommend(SMALL, tmp_path / "r").document["frontier"]
    assert [point["mu"] / SMALL.mu for point in frontier] == pytest.approx([0.5, 1, 2], abs=0.01)


def test_if_nothing_keeps_the_wish_the_nearest_two_are_shown(played, tmp_path):
    found = recommend(replace(SMALL, max_loss=0.5), tmp_path / "r")
    assert (found.chosen, found.confirmed, found.document["check"]) == ("", False, None)
    assert found.document["nearest"][0]["candidate"] == BEST
    assert len(found.document["nearest"]) == 2
    page = (tmp_path / "r" / "report.html").read_text()
    assert "Nothing" in page
    assert f"Nearest: {BEST}" in page
    assert not (tmp_path / "r" / "recommended.toml").exists()


def test_what_no_attacker_broke_is_recommended_only_as_unproven(played, tmp_path):
    found = recommend(replace(SMALL, proof="measured", max_loss=0.5), tmp_path / "r")
    assert "(no proof)" in found.chosen
    alone = next(line for line in found.lines if line["candidate"] == "secure sums alone (no proof)")
    assert alone["why"] == "attackers picked images"
    assert found.document["advice"]["unprotected"][0].startswith("anything, by proof")


def test_a_search_that_went_on_ends_with_the_same_document(played, tmp_path, monkeypatch):
    whole = recommend(SMALL, tmp_path / "whole").document
    kept, ends = trials.train, iter([False] * 5 + [True])

    def killed(*args, **options):
        if next(ends, False):
            raise KeyboardInterrupt
        return kept(*args, **options)

    monkeypatch.setattr(trials, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        recommend(SMALL, tmp_path / "r")
    again = recommend(SMALL, tmp_path / "r").document
    assert json.dumps(again).replace(str(tmp_path / "r"), "") == json.dumps(whole).replace(str(tmp_path / "whole"), "")


def test_another_wish_needs_another_folder(played, tmp_path):
    recommend(SMALL, tmp_path / "r")
    recommend(SMALL, tmp_path / "r")
    with pytest.raises(ConfigError, match="another one"):
        recommend(replace(SMALL, max_loss=3), tmp_path / "r")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="new or empty"):
        recommend(SMALL, tmp_path / "other")


def test_a_wish_that_can_not_be_tried_leaves_the_folder_free(played, tmp_path):
    with pytest.raises(DataError, match="must exist"):
        recommend(replace(SMALL, dataset="none.npz"), tmp_path / "r")
    with pytest.raises(ConfigError, match=r"^Weights .* must be a readable"):
        recommend(replace(SMALL, weights="none.safetensors"), tmp_path / "r")
    assert recommend(SMALL, tmp_path / "r").confirmed


def test_finalists_that_no_attack_fits_say_so(played, tmp_path, monkeypatch):
    def refuse(*_):
        raise ConfigError("Attack 'standard' needs smaller images.")

    monkeypatch.setattr(module, "run_audit", refuse)
    found = recommend(SMALL, tmp_path / "r")
    assert found.confirmed
    assert found.document["advice"]["attack"] == ""
    assert "needs smaller images" in (tmp_path / "r" / "report.html").read_text()
    measured = recommend(replace(SMALL, proof="measured", max_loss=0.5), tmp_path / "measured")
    assert not measured.confirmed
    assert any("which shows nothing" in line["why"] for line in measured.lines)


def test_images_that_are_missing_after_holding_out_are_named(tmp_path):
    with pytest.raises(ConfigError, match="without the 20% of its images that are held out"):
        recommend(replace(SMALL, clients=10, partition="iid:images=400"), tmp_path / "r")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_loss": -1}, "max_loss must be"),
        ({"identified": 0.0005}, "identified must be"),
        ({"protect": "client", "clients": 1}, "clients must be at least 2"),
        ({"server": "nice"}, "Unknown server"),
        ({"protect": "membership", "epsilon": 0}, "epsilon must be"),
        ({"epsilon": 3.0}, "epsilon is no measure of --protect image"),
        ({"protect": "membership", "identified": 0.1}, "identified is no measure of --protect membership"),
        ({"proof": "measured", "protect": "membership"}, "proof must be required"),
        ({"proof": "measured", "server": "malicious"}, "proof must be required"),
        ({"held_out": 0.0}, "held_out must be"),
        ({"seeds": 0}, "seeds must be"),
    ],
)
def test_wishes_that_contradict_themselves_are_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        Wish(**wrong)


def test_a_guarantee_that_attackers_break_is_not_kept():
    one = next(c for c in candidates(SMALL, SIZES) if c.training)
    full = {one.name: {"accuracy": 0.9, "mu": SMALL.mu, "epsilon": 4.5}}
    good = {"psnr": 9.0, "identified": 0.0, "attacked": 4, "candidates": 1000}
    assert judged(line_of(one, {}, full, {one.name: good}), 0.9, SMALL)["holds"]
    bad = judged(line_of(one, {}, full, {one.name: good | {"identified": 0.75}}), 0.9, SMALL)
    assert not bad["holds"]
    assert "more images than its guarantee allows" in bad["why"]
    weak = judged(line_of(one, {}, {one.name: full[one.name] | {"mu": 2 * SMALL.mu}}, {}), 0.9, SMALL)
    assert "weaker than the wish" in weak["why"]


def test_a_verification_that_loses_more_is_not_confirmed():
    one = next(c for c in candidates(SMALL, SIZES) if c.training)
    row = {"accuracy": 0.80, "mu": SMALL.mu, "epsilon": 4.5}
    check = check_of(one, [(row, {"accuracy": 0.9}), (row | {"accuracy": 0.7}, {"accuracy": 0.9})], {}, SMALL)
    assert (check["loss"], check["lowest"], check["highest"]) == (15.0, 10.0, 20.0)
    assert not check["holds"]
    assert "loses 15.0 points on test images" in check["why"]


def test_the_strongest_attacker_counts_knowing_or_not():
    common = {"kind": "privacy", "defence": "d", "blind_psnr": 12.0, "images": 1, "candidates": 9}
    rows = [
        common | {"adaptive": False, "psnr": 20.0, "identified": 1.0},
        common | {"adaptive": True, "psnr": 14.0, "identified": 0.0},
        common | {"adaptive": True, "psnr": None, "identified": None},
    ]
    assert strongest(rows, "d")["psnr"] == 20.0
    assert strongest(rows, "other")["psnr"] is None
    assert not breaks(strongest(rows, "other"), 0.02)


def test_the_scene_spends_the_whole_budget_in_one_update_of_one_image():
    one = next(c for c in candidates(SMALL, SIZES) if c.training and "each client" in c.name)
    settings = scene(one.training, [one.worst])
    assert (settings.images, settings.partition, settings.rounds) == (1, "iid:images=1", 1)
    training = settings.training(one.worst, 0)
    budget = weakest_budget(planned_defence(training), Protocol.of(training).local, [1], 1)
    assert budget.mu == pytest.approx(SMALL.mu)


def test_flower_gets_what_differs_from_its_defaults_with_dashes():
    one = next(c for c in candidates(SMALL, SIZES) if c.name == BEST)
    config = run_config(one.training)
    assert (config["defence"], config["rounds"], config["aggregation"]) == (one.training.defence, 120, "secure")
    assert config["sum-bits"] == 22  # secure sums over Flower are of whole numbers
    assert "device" not in config
    assert "batch-size" in config
    assert all(isinstance(value, (str, int, float)) for value in config.values())
    app = Path(__file__).parents[2] / "examples" / "flower" / "pyproject.toml"
    known = tomllib.loads(app.read_text())["tool"]["flwr"]["app"]["config"]
    wish = replace(SMALL, weights="w.safetensors", aux="cifar10", proof="measured", partition="dirichlet")
    for one in candidates(wish, SIZES):
        if one.training:  # Flower takes no keys that the app does not state
            assert not run_config(one.training).keys() - known.keys()


def test_a_site_agrees_to_the_recommended_training_and_to_no_weaker_one():
    for name in (BEST, "veil on patches, noise at each client, 120 rounds"):
        training = next(c for c in candidates(SMALL, SIZES) if c.name == name).training
        policy = read_policy({"partition-id": 0, "private-folder": "/srv", **site_policy(training)})
        assert agree(policy, training).defence == training.defence
        for weaker in ({"defence": "none"}, {"model": "lenet5"}, {"rounds": 121}, {"lr": 0.1}):
            with pytest.raises(RefusedError):
                agree(policy, replace(training, **weaker))
        if training.aggregation == "secure":
            with pytest.raises(RefusedError, match="secure sums only"):
                agree(policy, replace(training, aggregation="none", sum_bits=0))


def test_commands_can_be_pasted_if_folders_have_spaces(tmp_path):
    one = next(c for c in candidates(SMALL, SIZES) if c.name == BEST)
    out, root = tmp_path / "my runs", tmp_path / "my data"
    out.mkdir()
    found = advise(one, SMALL, out, "attack-0.toml", root)
    assert shlex.split(found.train)[2:6] == ["--config", str(out / "recommended.toml"), "--data-root", str(root)]
    assert str(out / "attack-0.toml") in shlex.split(found.attack)
    assert shlex.split(found.flower)[-1] == str(out / "flower.toml")


def test_public_images_make_the_features_of_every_frozen_part():
    wish = replace(SMALL, weights="w.safetensors", aux="cifar10")
    heads = [one.training for one in candidates(wish, SIZES) if one.training and "veil" in one.training.defence]
    assert {one.model.partition(":")[0] for one in heads} == {"patches", "frozen"}
    assert {one.aux for one in heads} == {"cifar10"}


def test_what_is_not_protected_says_what_single_updates_would_leak():
    shared = Protection("shared", replace(SMALL.reference(), defence="veil:mu=1,at=sum", aggregation="secure"))
    (text,) = [line for line in unprotected(shared, replace(SMALL, clients=4)) if "single updates" in line]
    assert f"{2 * SMALL.mu:.3g}" in text


@pytest.mark.slow
def test_it_runs_as_it_is_on_ones_own_data_and_model_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("gradveil.runs.candidates.HEAD_ROUNDS", (4,))
    monkeypatch.setattr("gradveil.runs.worst_case.ATTACK", "gs:iterations=5")
    digits = load_dataset("mnist-5k")
    np.savez(
        tmp_path / "mine.npz",
        x_train=digits.train.images[::40], y_train=digits.train.labels[::40],
        x_test=digits.test.images[::40], y_test=digits.test.labels[::40],
    )  # fmt: skip
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    own = {"dataset": str(tmp_path / "mine.npz"), "model": f"{tmp_path / 'mine.py'}:net", "partition": "iid"}
    wish = replace(SMALL, rounds=1, max_loss=100, seeds=1, **own)
    found = recommend(wish, tmp_path / "r", workers=0)
    assert found.confirmed
    assert recommend(wish, tmp_path / "r", workers=0).document == found.document
    settings = make_train_settings(read_settings(tmp_path / "r" / "recommended.toml"))
    again = train(settings, tmp_path / "again", workers=0)
    assert again.accuracy == found.document["check"]["accuracies"][0]
