"""docs/strongest-attackers.md is what the measured data say, and it has every defence of the folder."""

import json
import runpy
from pathlib import Path

import pytest

from gradveil.registry import components

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "strongest-attackers.json").read_text())


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "strongest_attackers.py"))


def test_page_and_data_agree(script):
    assert (ROOT / "docs" / "strongest-attackers.md").read_text() == script["page"](RESULTS)


def test_every_defence_has_a_line():
    measured = {line["defence"].partition(":")[0] for line in RESULTS["lines"]}
    assert measured == set(components("defences")) - {"none", "chain"}


def test_the_strongest_attacker_of_a_cell_is_the_one_with_the_largest_mean(script):
    rows = [
        {"attack": attack, "psnr": psnr, "identified": share}
        for attack, psnr, share in (
            ("gs:lr=1", 10.0, 0.0),
            ("gs:lr=1", 20.0, 1.0),
            ("lti", 18.0, 1.0),
            ("lti", None, None),
        )
    ]
    found = script["_strongest"](rows)
    assert (found["attack"], found["psnr"], found["identified"]) == ("lti", 18.0, 1.0)
    assert found["all"] == {"gs": 15.0, "lti": 18.0}
    assert script["_strongest"]([{"attack": "gs", "psnr": None}]) is None


def test_more_attackers_are_never_weaker():
    for line in RESULTS["lines"]:
        for who in ("plain", "adaptive"):
            before, after = line[f"before {who}"], line[f"after {who}"]
            if before is not None:
                assert after["psnr"] >= before["psnr"]
