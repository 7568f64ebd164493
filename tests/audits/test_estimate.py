"""The estimate counts what the audit then does. Its clock counts the work itself, so no test measures a time."""

import sys

import pytest

from gradveil.audits import audit
from gradveil.audits.estimate import LONG, Estimate, Piece, estimate, makespan
from gradveil.audits.pilot import Pilot
from gradveil.audits.plan import Cell, plan
from gradveil.data import load_dataset
from gradveil.registry import load_own

OWN = """
from dataclasses import dataclass, field

import torch

from gradveil.attacks import Attack
from gradveil.defences import Defence
from gradveil.progress import tell
from gradveil.threat import Reconstruction

COUNTED = {"gradients": 0, "steps": 0}


@dataclass(frozen=True)
class Counting(Defence):
    steps: int = 1

    def on_gradient(self, gradient, batch, client):
        COUNTED["gradients"] += self.steps
        return gradient


@dataclass(frozen=True)
class Steps(Attack):
    iterations: int = 1000

    def run(self, seen, rng):
        for number in range(self.iterations):
            COUNTED["steps"] += 1
            tell(number / self.iterations)
        count, images = seen.num_targets, seen.num_images
        blank = torch.zeros(count, images, *seen.shape)
        return Reconstruction(blank, torch.zeros(count, images).long(), torch.zeros(count), torch.zeros(count) == 0)
"""


@pytest.fixture
def own(tmp_path):
    """Return the path of a file with a defence and an attack that count their work, and its counters."""
    path = tmp_path / "counting.py"
    path.write_text(OWN)
    module = sys.modules[load_own(f"{path}:Counting").__module__]
    module.COUNTED.update(gradients=0, steps=0)
    return path, module.COUNTED


def found_by(settings, clock):
    dataset = load_dataset(settings.dataset)
    found = estimate(settings, dataset, plan(settings), clock=clock)
    return {piece.kind[:3]: piece for piece in found.pieces}, found


@pytest.mark.parametrize("protocol", ["lab", "fedavg"])
@pytest.mark.parametrize("steps", [1, 100])
def test_the_time_of_a_training_is_that_of_its_gradients(own, small, tmp_path, protocol, steps):
    path, counted = own
    spec = f"{path}:Counting:steps={steps}"
    settings = small(
        defences=spec, attacks="labels", rounds=12, protocol=protocol, epochs=2, knows="num-examples,local-steps"
    )
    found, _ = found_by(settings, lambda: float(counted["gradients"]))
    tried, counted["gradients"] = counted["gradients"], 0
    audit(settings, tmp_path / "run", workers=0)
    assert counted["gradients"] == 12 * 3 * (1 if protocol == "lab" else 2 * 3) * steps  # rounds, clients, local steps
    assert found["utility", settings.defences[1], ""].seconds == pytest.approx(counted["gradients"])
    assert tried < counted["gradients"]


def test_the_time_of_an_attack_is_that_of_its_steps_and_few_of_them_are_tried(own, small):
    path, counted = own
    settings = small(attacks=f"{path}:Steps", targets=2)
    found, whole = found_by(settings, lambda: float(counted["steps"]))
    piece = found["privacy", "none", settings.attacks[0]]
    assert piece.seconds == pytest.approx(1000, rel=0.01)
    assert piece.cells == 2  # both rounds are tapped
    assert whole.seconds == pytest.approx(2000, rel=0.01)
    assert counted["steps"] < 20
    assert any("counting.py:Steps:iterations (now 1000)" in text for text in whole.advice)
    assert "--tap (now 1/2)" in whole.advice


def test_the_estimate_changes_no_row(small, tmp_path):
    settings = small(
        defences="gaussian:std=0.1", attacks="gs:iterations=5,labels,boundary:queries=64", adaptive=True, canaries=8
    )
    without = audit(settings, tmp_path / "without", workers=0)
    found = estimate(settings, load_dataset(settings.dataset), plan(settings))
    assert all(piece.seconds is not None for piece in found.pieces)
    after = audit(settings, tmp_path / "after", workers=0)
    timed = ("seconds", "round_seconds", "round_seconds_undefended", "overhead")
    one, two = ([{k: v for k, v in row.items() if k not in timed} for row in r.rows] for r in (without, after))
    assert one == two


def test_a_piece_that_cannot_be_tried_is_not_estimated(small, monkeypatch):
    monkeypatch.setattr(Pilot, "attack", lambda *_: 1 / 0)
    found, whole = found_by(small(), iter(range(10**6)).__next__)
    piece = next(piece for kind, piece in found.items() if kind[0] == "privacy")
    assert piece.seconds is None
    assert piece.text().endswith("not estimated, since a trial failed: ZeroDivisionError: division by zero")
    assert whole.lines()[0].startswith("Estimate: at least about")
    assert whole.lines(every=False)[1:] == [f"  {piece.text()}"]  # also of a short audit
    assert "division by zero" in str(whole.document())


def test_a_broken_defence_of_ones_own_is_named_with_its_line_before_any_work_and_in_its_rows(small, tmp_path):
    path = tmp_path / "mine.py"
    lines = [
        "from dataclasses import dataclass", "from gradveil.defences import Defence", "@dataclass(frozen=True)",
        "class Mine(Defence):", "    def on_update(self, update, client):", "        return update.nothing", "",
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    settings = small(defences=f"{path}:Mine", attacks="labels")
    told = "AttributeError: 'Update' object has no attribute 'nothing' (mine.py, line 6)"
    _, whole = found_by(settings, iter(range(10**6)).__next__)
    assert any(told in line for line in whole.lines(every=False))
    rows = audit(settings, tmp_path / "run", workers=0).rows
    assert {row["why"] for row in rows if row["defence"] != "none" and row["kind"] == "utility"} == {told}


def test_workers_share_the_cells_in_the_order_of_the_pool():
    cells = [Cell(name, "utility", "none", 0) for name in "ab"]
    cells += [Cell(name, "privacy", "none", 0, needs="a") for name in "cd"]
    seconds = {"a": 1.0, "b": 5.0, "c": 2.0, "d": 2.0}
    assert makespan(cells, seconds, 0) == 10.0
    assert makespan(cells, seconds, 2) == 5.0  # a, c and d on one, b on the other
    assert makespan(cells, seconds, 9) == 5.0
    assert makespan([], {}, 2) == 0.0


def test_a_long_audit_says_its_pieces_and_what_to_lower():
    piece = Piece("gs on none", 2, LONG, ("privacy", "none", "gs", False))
    long, short = (Estimate((piece,), seconds, 2, ("--tap (now 1/2)",)) for seconds in (2 * LONG, LONG / 2))
    assert long.is_long
    assert long.lines(every=False) == [
        "Estimate: about 20 min on 2 workers.", "  gs on none: 2 x 10 min", "To lower it: --tap (now 1/2).",
    ]  # fmt: skip
    assert short.lines(every=False) == ["Estimate: about 5.0 min on 2 workers."]
    assert len(short.lines()) == 2
