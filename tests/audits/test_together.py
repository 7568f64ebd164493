"""Several rounds of the same images are attacked together: noise averages out, and error feedback adds up."""

import dataclasses

import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.audits import audit
from gradveil.audits.plan import plan
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.federated.protocol import Protocol
from gradveil.randomness import stream
from gradveil.report.audit_folder import read_audit
from gradveil.threat import ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch
from tests.audits.test_one_world import privacy

QUICK = "iterations=150,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
FEW = {"partition": "iid:images=1", "model": "lenet-dlg", "clients": 4, "targets": 2, "rounds": 3, "tap": "1/2/3"}


def test_the_rows_are_of_the_same_clients_and_images_as_those_of_single_rounds(small, tmp_path):
    settings = small(**FEW, attacks="gs:iterations=2,gs:iterations=2,together=true", defences="prune:feedback=true")
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    single = [row for row in privacy(result) if "together" not in row["attack"]]
    joint = [row for row in privacy(result) if "together" in row["attack"]]
    assert {row["round"] for row in single} == {1, 2, 3}
    assert all(row["later_rounds"] is None for row in single)
    assert {(row["round"], tuple(row["later_rounds"])) for row in joint} == {(1, (2, 3))}
    assert {row["client"] for row in single} == {row["client"] for row in joint}
    first = {(row["defence"], row["client"]): row["update_sha256"] for row in single if row["round"] == 1}
    assert all(row["update_sha256"] == first[row["defence"], row["client"]] for row in joint)
    every = {(row["defence"], row["client"], row["round"]): row["update_sha256"] for row in single}
    for row in joint:
        assert row["later_sha256"] == [every[row["defence"], row["client"], number] for number in (2, 3)]
    assert {line["attack"] for line in result.summary} == set(settings.attacks)
    assert read_audit(result.out).notes == ()


def looked_at(defence, rounds):
    """Return what a server has of a client's rounds, each from other weights, and the private image."""
    rng = torch.Generator().manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    images = Batch(torch.rand(1, 1, 5, 5, generator=rng), torch.tensor([2]), torch.tensor([False]))
    views = []
    for number in range(1, rounds + 1):
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.5, generator=rng)
        threat = ThreatModel.of("labels", "num-examples", *(["defence"] if defence.name != "none" else []))
        views.append(
            observe(
                network, [images], threat=threat, num_classes=4, defence=defence,
                protocol=Protocol(first_round=number), federation=Federation(seed=3),
            )
        )  # fmt: skip
    return dataclasses.replace(views[0], later=tuple(views[1:])), images.images[0]


def error(seen, truth, spec):
    found = build_attack(spec)(seen, stream(0, "attack"))
    return float((found.images[0, 0] - truth).square().mean())


@pytest.mark.parametrize("defence", ["gaussian:std=0.1", "laplace:scale=0.1"])
def test_noise_that_is_drawn_anew_averages_out(defence):
    seen, truth = looked_at(build_defence(defence), 12)
    alone = error(dataclasses.replace(seen, later=()), truth, f"gs:{QUICK}")
    assert error(seen, truth, f"gs:{QUICK}") < 0.5 * alone


def test_one_guess_must_match_every_round():
    seen, truth = looked_at(build_defence("none"), 3)
    assert error(seen, truth, f"gs:{QUICK}") < 1e-3
    strange = dataclasses.replace(seen.later[0], updates={n: -t for n, t in seen.updates.items()})
    assert error(dataclasses.replace(seen, later=(strange,)), truth, f"gs:{QUICK}") > 1e-2


@pytest.mark.slow
def test_error_feedback_adds_up_over_the_rounds_of_a_training(small, tmp_path):
    settings = small(
        **FEW | {"rounds": 12, "tap": "/".join(map(str, range(1, 13)))}, adaptive=True,
        attacks=f"gs:{QUICK},together=true", defences="quantise:feedback=true,quantise",
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    lines = {(line["defence"], line["adaptive"]): line["psnr"] for line in result.summary}
    assert lines["quantise:feedback=true", True] > lines["quantise", True] + 1
    moves = {row["countermove"] for row in privacy(result) if row["adaptive"] and "feedback" in row["defence"]}
    assert moves == {"sum"}


def test_the_plan_has_one_cell_for_all_rounds(small):
    cells = [cell for cell in plan(small(**FEW, attacks="gs:together=true")) if cell.kind == "privacy"]
    assert [(cell.round, cell.later) for cell in cells] == [(1, (2, 3))]
    assert "in rounds 1/2/3" in cells[0].title


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"tap": "2"}, "together needs two tapped rounds or more"),
        ({"partition": "iid:images=5"}, "got clients with 5 images that send the gradient of 1.*iid:images=1"),
        ({"looks": 2}, "looks must be 1 with together"),
        ({"sampled": 2, "targets": 2}, "targets must be at most the clients of a round"),
    ],
)
def test_rounds_that_cannot_be_attacked_together_are_refused(small, tmp_path, bad, match):
    settings = small(**FEW | bad, attacks="gs:iterations=2,together=true")
    with pytest.raises(ConfigError, match=match):
        audit(settings, tmp_path / "run", workers=0)


def test_rounds_with_gaps_are_not_added_up(small, tmp_path):
    settings = small(
        **FEW | {"tap": "1/3"}, adaptive=True, attacks="gs:iterations=2,together=true",
        defences="quantise:feedback=true",
    )  # fmt: skip
    rows = [row for row in privacy(audit(settings, tmp_path / "run", workers=0)) if row["adaptive"]]
    assert {row["countermove"] for row in rows} == {"sign"}
