"""docs/reliability.md is what the measured data say, and the data hold what the page promises."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "reliability.json").read_text())


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / "reliability.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_page_and_data_agree(script):
    assert (ROOT / "docs" / "reliability.md").read_text() == script["page"](RESULTS)


def test_every_count_adds_up():
    for line in RESULTS["fuzzing"].values():
        assert line["inputs"] == line["read"] + line["refused"] + len(line["findings"])
    for line in (*RESULTS["kills"].values(), *RESULTS["disk"].values()):
        assert line["identical"] <= line["runs"]


def test_every_target_was_measured(script):
    assert set(script["fuzzing"].TARGETS) <= set(RESULTS["fuzzing"])


def test_the_fuzzer_finds_a_foreign_error_and_a_lost_process(script, monkeypatch):
    """A reader that raises something else, or ends its process, must not pass."""
    import os

    target = script["fuzzing"].Target
    broken = {
        "foreign": target(lambda: [b"abc"], lambda path: 1 // 0),
        "ends": target(lambda: [b"abc"], lambda p: os._exit(7)),
    }
    monkeypatch.setattr(script["fuzzing"], "TARGETS", broken)
    found = {name: script["_batch"](name, 0, 3) for name in broken}
    assert [finding["what"][:17] for finding in found["foreign"]["findings"]] == ["ZeroDivisionError"] * 3
    assert found["ends"]["findings"] == [{"what": "ended by 7", "input": 0, "target": "ends"}]


def test_mutations_come_from_the_number_of_the_input(script):
    import random

    mutated = script["fuzzing"].mutated
    made = [mutated(b"some content to change", random.Random(f"x:{n}")) for n in range(200)]
    assert made == [mutated(b"some content to change", random.Random(f"x:{n}")) for n in range(200)]
    assert len(set(made)) > 100
