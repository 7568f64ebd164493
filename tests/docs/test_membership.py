"""docs/membership.md is what the measured data say, and the data are complete."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from gradveil.data import load_dataset
from gradveil.data.auxiliary import image_keys

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "membership.json").read_text())


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "membership.py"))


def test_page_and_data_agree(script):
    assert (ROOT / "docs" / "membership.md").read_text() == script["page"](RESULTS)


def test_everything_was_measured_once(script):
    found = [tuple(row[key] for key in ("case", "attack", "adaptive", "seed")) for row in RESULTS["rows"]]
    assert sorted(found) == sorted(script["wanted"](RESULTS["seeds"]))
    assert RESULTS["cases"] == script["CASES"]


def test_all_attacks_of_a_case_and_seed_judged_the_same_candidates():
    for case in RESULTS["cases"]:
        for seed in range(RESULTS["seeds"]):
            own = [row for row in RESULTS["rows"] if (row["case"], row["seed"]) == (case, seed)]
            assert len({(row["members"], row["auc_loss"], row["gap"]) for row in own}) == bool(own)


def test_a_set_is_divided_anew_without_loss(script):
    before = load_dataset("mnist-5k")
    after = script["divided"](before)
    assert (len(after.train), len(after.test)) == (len(before.train), len(before.test))
    keys = [sorted(np.concatenate([image_keys(s.train.images), image_keys(s.test.images)])) for s in (before, after)]
    assert keys[0] == keys[1]
    assert not np.array_equal(before.test.images, after.test.images)
