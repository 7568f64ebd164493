"""docs/strongest-attackers.md is what the measured data say, and names every defence."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "strongest-attackers.json").read_text())


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "strongest_attackers.py"))


def test_page_and_data_agree(script):
    assert (ROOT / "docs" / "strongest-attackers.md").read_text() == script["page"](RESULTS)


def test_every_defence_has_a_line(script):
    assert [line["defence"] for line in RESULTS["lines"]] == script["defences"]()


def test_more_attackers_never_get_less():
    for line in RESULTS["lines"]:
        for who in ("plain", "adaptive"):
            before, after = (line.get(f"{when} {who}") for when in ("before", "after"))
            assert before is None or after["psnr"] >= before["psnr"], line["defence"]
