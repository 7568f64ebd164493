"""The command reproduce prints tables, counts verdicts, and leaves a page and a result."""

import json

import pytest

from gradveil.reproduce.base import Experiment, Paper, Result
from gradveil.reproduce.claims import Claim


@pytest.fixture
def short(monkeypatch):
    """Put a paper with one claim in the place of all papers."""
    paper = Paper("short", "nobody", {"1": Experiment("a table", lambda lab: Result([{"x": 2.0}]))})
    claim = Claim("id", "Table 1", "x is 2", "2", "1", lambda rows: rows[0]["x"], "x", at_least=2, scale="smoke")
    for place in ("gradveil.reproduce", "gradveil.reproduce.pages"):
        monkeypatch.setattr(f"{place}.papers", lambda: {"short": paper})
    monkeypatch.setattr("gradveil.reproduce.pages.claims_of", lambda name: [claim])


def test_it_prints_rows_and_verdicts_and_leaves_a_page_and_a_result(gradveil, tmp_path, short):
    ended = gradveil(
        "reproduce", "short", "--scale", "smoke", "--out", tmp_path / "out", "--results", tmp_path / "kept"
    )
    assert ended.code == 0, ended.err
    assert "| x |" in ended.out
    assert "1 claim: 1 holds." in ended.out
    assert "<td>holds</td>" in (tmp_path / "out" / "short.html").read_text()
    (run,) = json.loads((tmp_path / "kept" / "short" / "1.json").read_text())["runs"]
    assert run["rows"] == [{"x": 2.0}]
    assert {"command", "date", "versions", "sources", "data", "seed", "scale"} <= set(run)


def test_verdicts_in_json(gradveil, tmp_path, short):
    ended = gradveil("reproduce", "short", "--scale", "smoke", "--out", tmp_path, "--json")
    assert json.loads(ended.out)["verdicts"] == [{"claim": "id", "verdict": "holds", "why": "holds if at least 2"}]
