"""The league table is made from results, and entries from outside are accepted or told what is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradveil.registry import names
from gradveil.reproduce import leaderboard

ROOT = Path(__file__).parents[2]
ENTRIES = leaderboard.entries(ROOT / "results")
GOOD = {
    "defence": "none", "dataset": "cifar10", "model": "resnet20", "protocol": "fedavg", "round": "first",
    "attack": "gs", "knows_the_defence": False, "targets": 8, "seeds": [0], "psnr": 20.0, "blind_psnr": 12,
    "identified": 0.5, "candidates": 1001, "command": "c", "date": "2026-11-18", "version": "0.1.0",
}  # fmt: skip


def test_the_page_and_the_schema_are_those_of_the_results():
    assert (ROOT / "docs" / "leaderboard.md").read_text() == leaderboard.page(ENTRIES), "Run: make results"
    assert json.loads((ROOT / "docs" / "leaderboard.schema.json").read_text()) == leaderboard.schema()


def test_our_own_entries_are_accepted():
    assert ENTRIES
    assert [fault for entry in ENTRIES for fault in leaderboard.faults(entry)] == []


def test_the_attacks_on_veil_are_pooled_over_their_seeds():
    row = {"view": "client", "partition": "iid", "mu": 3, "bound": 0.5, "images": 40}
    psnr = ({"lti": 10.0, "linear": 13.0, "blind": 9}, {"lti": 11.0, "linear": 7.0, "blind": 9})
    rows = [{**row, "seed": seed, "picked": seed + 1, "psnr": psnr[seed]}
            for seed in (0, 1)]  # fmt: skip
    others = [{**rows[0], "view": "sum"}, {**rows[0], "bound": 1.0}, {**rows[0], "partition": "dirichlet"}]
    document = {"attacked": [*rows, *others], "command": "c", "date": "2026-11-18", "versions": {"gradveil": "1"}}
    (entry,) = leaderboard.from_veil_attacked(document)
    assert leaderboard.faults(entry) == []
    assert (entry["identified"], entry["psnr"], entry["seeds"]) == (3 / 80, 10.5, [0, 1])


def test_every_defence_has_a_line_and_missing_cells_say_so():
    table = leaderboard.page(ENTRIES).split("## MNIST digits, one gradient")[1].split("\n## ")[0]
    assert all(f"| `{name}" in table for name in names("defences"))
    assert "|  |" not in table
    assert "## CIFAR-10, local trainings\n\nNot measured.\n" in leaderboard.page(ENTRIES)
    assert "| `none` | resnet20, first |" in leaderboard.page([*ENTRIES, GOOD])


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"psnr": None}, "psnr must be of type number, got None."),
        ({"psnr": True}, "psnr must be of type number, got True."),
        ({"identified": 1.5}, "identified must be at most 1, got 1.5."),
        ({"identified": float("nan")}, "identified must be at least 0, got nan."),
        ({"protocol": "own"}, "protocol must be lab or fedavg, got 'own'."),
        ({"date": "18.11.2026"}, "date must be a date such as 2026-11-18, got '18.11.2026'."),
        ({"seeds": []}, "seeds must be a list of at least one seed, got []."),
        ({"seeds": ["0"]}, "seeds must be a list of at least one seed, got ['0']."),
        ({"targets": 0}, "targets must be at least 1, got 0."),
        ({"score": 1}, "score is no field of an entry."),
    ],
)
def test_a_wrong_field_is_named(change, wanted):
    assert wanted in leaderboard.faults({**GOOD, **change})


@pytest.mark.parametrize("name", leaderboard.schema()["required"])
def test_a_missing_field_is_named(name):
    (fault,) = leaderboard.faults({key: value for key, value in GOOD.items() if key != name})
    assert fault.startswith(f"{name} is missing: ")


def test_the_strongest_attacker_identifies_most_and_then_gains_most():
    weak, strong = {**GOOD, "psnr": 30.0, "identified": 0.1}, {**GOOD, "attack": "lti", "identified": 0.9}
    farther = {**strong, "attack": "standard", "psnr": 21.0}
    assert leaderboard.strongest([weak, strong, farther, weak]) == [farther]
    other = {**weak, "defence": "veil"}
    assert leaderboard.strongest([other, farther]) == [farther, other]


def test_the_command_accepts_entries_or_names_what_is_missing(tmp_path):
    (tmp_path / "good.json").write_text(json.dumps([GOOD]))
    (tmp_path / "bad.json").write_text(json.dumps([GOOD, {**GOOD, "targets": "8"}]))
    (tmp_path / "torn.json").write_text("[")

    def ended(name):
        command = [sys.executable, "-m", "gradveil.reproduce.leaderboard", str(tmp_path / name)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert ended("good.json").returncode == 0
    bad = ended("bad.json")
    assert bad.returncode == 1
    assert "entry 2: targets must be of type integer, got '8'." in bad.stderr
    assert leaderboard.check([tmp_path / "torn.json"])[0].startswith(str(tmp_path / "torn.json"))
    assert leaderboard.faults([]) == ["An entry must be an object with fields, got list."]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"identified": 0.5}, "Does not hide whose image it is."),
        ({"identified": 0.25}, "Hides some images, not all."),
        ({"identified": 0.125, "psnr": 12.0}, "Nothing is gained"),
        ({"identified": 0.0, "psnr": 16.0}, "Hides some images, not all."),
    ],
)
def test_a_sentence_says_what_an_entry_means(change, wanted):
    assert leaderboard.sentence({**GOOD, **change}).startswith(wanted)
