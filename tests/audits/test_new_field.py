"""A new field of rows: its `Column` brings it everywhere, and without one it is an error."""

import csv
import json

import pytest

from gradveil import rows
from gradveil.audits import privacy
from gradveil.rows import COLUMNS, Column
from tests.audits.conftest import QUICK

NEW = Column("novelty", "number", "Novelty", "How new it is", "3", True, ("privacy", "summary"), mean=True)


@pytest.fixture
def novel(monkeypatch):
    """Let every attacked target have a novelty."""
    found = privacy._found
    monkeypatch.setattr(privacy, "_found", lambda *args: found(*args) | {"novelty": 0.125})


def audited(gradveil, pictures, out):
    ended = gradveil("audit", "--dataset", pictures, "--attacks", QUICK, "--targets", 2, "--rounds", 0, "--workers", 0,
                     "--out", out, "--json")  # fmt: skip
    return ended, json.loads(ended.out)


def test_a_column_is_all_that_a_new_field_needs(gradveil, pictures, tmp_path, monkeypatch, novel):
    monkeypatch.setattr(rows, "COLUMNS", (*COLUMNS, NEW))
    ended, document = audited(gradveil, pictures, tmp_path / "run")
    assert ended.code == 0, ended.err
    assert [row["novelty"] for row in document["rows"]] == [0.125, 0.125]
    assert document["summary"][0]["novelty"] == 0.125
    for name, values in (
        ("rows.csv", ["0.125", "0.125"]),
        ("summary.csv", ["", "0.125"]),
    ):  # there first the blind guess
        with (tmp_path / "run" / name).open() as file:
            assert [line["novelty"] for line in csv.DictReader(file)] == values
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'title="How new it is">Novelty</button>' in page
    assert 'data-v="0.125" data-head="Novelty">0.125</td>' in page
    assert '"key":"novelty","head":"Novelty","kind":"3"' in page


def test_a_field_without_a_column_is_an_error_and_not_dropped(gradveil, pictures, tmp_path, novel):
    ended, document = audited(gradveil, pictures, tmp_path / "run")
    assert ended.code == 1
    assert all(row["failed"] for row in document["rows"])
    assert "must hold columns of the schema only, got 'novelty'" in document["rows"][0]["why"]
