"""The page on one's own model, and the example, are followed as they stand."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_guides import commands_of, files_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "audit-your-own-model.md").read_text()


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Return a function that runs a block of shell commands in a new folder, with this Python and this gradveil."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, start in (("python", ""), ("gradveil", "-m gradveil.cli")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(block):
        ended = subprocess.run(  # noqa: S602 - our own documentation
            f"set -e\n{block}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return ended.stdout

    return run


@pytest.mark.slow
def test_the_page_works_as_it_stands(shell, tmp_path):
    for name, content in files_of(PAGE).items():
        (tmp_path / name).write_text(content)
    record, attack, check, protected = commands_of(PAGE)
    spec = shell(record)
    for line in ("clip_norm = 1.0", "label_smoothing = 0.1", 'batch_norm = "average"', 'dropout = "on"'):
        assert line[:-1] in spec
    assert "nothing found" in shell(attack)
    assert (tmp_path / "attacked" / "images" / "target-0.png").exists()
    shell(check)
    shell(protected)
    cards = [json.loads((tmp_path / name / "privacy_card.json").read_text()) for name in ("checked", "protected")]
    assert [card["verdict"] for card in cards] == ["fails", "passes"]


@pytest.mark.slow
def test_the_example_ends_in_a_page_and_a_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["own_loop.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "own_loop.py"), run_name="__main__")
    assert "CheckResult(fails" in capsys.readouterr().out
    for name in ("report.html", "privacy_card.md", "privacy_card.json"):
        assert (tmp_path / "checked" / name).exists()


def test_the_table_of_facts_is_the_measured_one():
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "own_training.py"))
    assert benchmark["BEGIN"] + benchmark["table"]() + benchmark["END"] in PAGE
