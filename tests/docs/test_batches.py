"""docs/batches.md is what the measured data say, and the data hold what the issue asked for."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "learned-and-exact.json").read_text())


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "learned_and_exact.py"))


def test_page_and_data_agree(script):
    assert (ROOT / "docs" / "batches.md").read_text() == script["page"](RESULTS)


def test_every_case_was_measured_with_every_seed(script):
    facts = [{key: value for key, value in row.items() if key != "seeds"} for row in RESULTS["rows"]]
    assert facts == [script["asdict"](case) for case in script["CASES"]]
    assert all([one["seed"] for one in row["seeds"]] == RESULTS["seeds"] for row in RESULTS["rows"])


def test_no_attack_says_that_it_recovered_images_that_it_did_not():
    for row in RESULTS["rows"]:
        if not row["attack"].startswith("lti"):  # learned inversion never claims to be exact
            assert all(one["above_60_db"] == 1 for one in row["seeds"] if one["converged"] == 1)


def test_figures_worked_by_hand(script):
    import torch

    truth = torch.rand(1, 2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    guess = torch.stack([truth[0, 1], torch.full((1, 12, 12), torch.nan)])[None]
    found = script["figures"](truth, guess)
    assert found == {
        "images": 2, "guesses": 1, "psnr": 100.0, "ssim": 1.0, "above_60_db": 0.5, "recognisable": 0.5,
    }  # fmt: skip
