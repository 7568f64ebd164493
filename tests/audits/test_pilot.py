"""Trials are timed by a clock that counts the work itself."""

import sys

import pytest

from gradveil.audits import audit
from gradveil.audits.pilot import FEW, Pilot, _inner, extrapolated
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.progress import tell
from gradveil.registry import load_own


def test_work_that_tells_no_progress_is_run_to_its_end():
    now = [0.0]

    def work():
        now[0] += 7.0

    assert extrapolated(work, 1.0, lambda: now[0]) == 7.0


def test_the_slow_first_steps_of_a_search_are_counted_once():
    now, done = [0.0], []

    def work():
        for number in range(100):
            now[0] += 5.0 if number < 2 else 1.0
            done.append(number)
            tell(number / 100)

    assert extrapolated(work, 1.0, lambda: now[0]) == pytest.approx(2 * 5 + 98, abs=2)
    assert len(done) < 10


def test_a_first_round_that_imports_modules_does_not_stand_for_the_others(small, monkeypatch):
    now, played = [0.0], []

    class Warming:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            played.clear()
            return self

        def __exit__(self, *_):
            pass

        def step(self, number):
            played.append(number)
            now[0] += 1.2 if len(played) == 1 else 0.01

    monkeypatch.setattr("gradveil.audits.pilot.Simulation", Warming)
    settings = small()
    pilot = Pilot(settings, load_dataset(settings.dataset), None, 0.1, lambda: now[0])
    assert pilot.step("none") == pytest.approx(0.01)
    assert len(played) > 1


def test_progress_that_stands_still_is_waited_for():
    now, done = [0.0], []

    def work():
        for number in range(100):
            now[0] += 1.0
            done.append(number)
            tell(max(0, number - 50) / 50)

    assert extrapolated(work, 1.0, lambda: now[0]) >= 100  # too much rather than too little
    assert 50 < len(done) < 60


def test_inner_steps_of_each_member_of_a_chain_are_cut_and_the_original_is_kept():
    whole = build_defence(f"prune:fraction=0.5+dcs2:steps={4 * FEW}")
    shorter, factor = _inner(whole)
    assert factor == 4.0
    assert [getattr(member, "steps", None) for member in shorter.defences] == [None, FEW]
    assert [getattr(member, "steps", None) for member in whole.defences] == [None, 4 * FEW]
    assert _inner(build_defence(f"dcs2:steps={FEW}"))[1] == 1.0


MARKED = """
from dataclasses import dataclass
from typing import ClassVar

from gradveil.defences import Defence

COUNTED = {"marked": 0}


@dataclass(frozen=True)
class Marked(Defence):
    marked_only: ClassVar[bool] = True

    def on_gradient(self, gradient, batch, client):
        COUNTED["marked"] += 10 * int(batch.sensitive.sum())
        return gradient
"""


def test_a_defence_of_marked_images_takes_its_time_for_these_alone(small, tmp_path):
    (tmp_path / "marked.py").write_text(MARKED)
    spec = f"{tmp_path}/marked.py:Marked"
    counted = sys.modules[load_own(spec).__module__].COUNTED
    settings = small(defences=spec, attacks="labels", rounds=60, tap="1/60", sensitive="0.2", targets=2)
    pilot = Pilot(settings, load_dataset(settings.dataset), None, 1.0, lambda: float(counted["marked"]))
    found = pilot.training(settings.defences[1])
    assert found == 10 * (0.2 * 60 * 3 + 2 * 2)  # a fifth of all steps, and the attacked ones
    counted["marked"] = 0
    audit(settings, tmp_path / "run", workers=0)
    assert found == pytest.approx(counted["marked"], rel=0.5)  # which images are drawn is chance
