"""Membership inference in an audit: one cell per defence and seed, its rows, and where they are shown."""

import json

import pytest

from gradveil.audits import audit
from gradveil.audits.cells import failed_rows, run_cell
from gradveil.audits.plan import num_rows, plan
from gradveil.data import load_dataset
from gradveil.errors import ConfigError
from gradveil.report.glossary import glossary_list
from tests.audits.conftest import QUICK
from tests.audits.test_run import BROKEN, csv_rows, timeless

INFER = "boundary:queries=64,every=2,images=8"


def test_one_cell_for_each_defence_and_seed(small):
    settings = small(attacks=f"{QUICK},{INFER}", defences="prune", adaptive=True, seeds=2, rounds=5)
    cells = [cell for cell in plan(settings) if cell.kind == "membership"]
    assert [(cell.defence, cell.seed, cell.adaptive) for cell in cells] == [
        (defence, seed, False) for seed in (0, 1) for defence in ("none", "prune")
    ]
    assert {num_rows(cell, settings) for cell in cells} == {2}
    assert len({cell.name for cell in plan(settings)}) == len(plan(settings))


def test_it_needs_rounds(small):
    with pytest.raises(ConfigError, match=r"rounds must be at least 1 for attack 'boundary.*got 0. Raise --rounds"):
        small(attacks=INFER, rounds=0)


def test_rows_are_complete_and_resumed_ones_are_the_same(small, tmp_path):
    settings = small(attacks=f"{QUICK},{INFER}", defences="prune", rounds=4)
    result = audit(settings, tmp_path / "run", workers=0)
    assert result.failed == {}
    rows = [row for row in result.rows if row["kind"] == "membership"]
    assert [(row["defence"], row["round"]) for row in rows] == [("none", 2), ("none", 4), ("prune", 2), ("prune", 4)]
    for row in rows:
        assert list(row) == settings.schema.keys("membership")
        assert (row["attack"], row["queries"], row["knows"], row["failed"]) == (INFER, 64, ["labels"], False)
        assert 0 < row["members"] == row["non_members"] <= 8
    assert json.loads((tmp_path / "run" / "rows.jsonl").read_text().splitlines()[-1]) == rows[-1]
    before = csv_rows(tmp_path / "run" / "rows.csv")
    assert [row["auc"] for row in before if row["kind"] == "membership"] == [str(row["auc"]) for row in rows]
    cell = tmp_path / "run" / "cells" / f"{rows[0]['cell']}.json"
    cell.write_text(json.dumps(rows[:1]))  # one of two rows: incomplete
    again = audit(settings, tmp_path / "run", workers=0, resume=True)
    assert timeless(again.rows) == timeless(result.rows)
    assert csv_rows(tmp_path / "run" / "rows.csv") == before


def test_the_report_has_a_section_a_sentence_a_table_and_a_figure(small, tmp_path):
    audit(small(attacks=INFER, defences="prune"), tmp_path / "run", workers=0)
    page = (tmp_path / "run" / "report.html").read_text()
    assert '<section id="membership"' in page
    assert "Members are told from others with an AUC of" in page
    assert "No attack has finished yet" not in page
    assert 'id="gallery"' not in page
    assert '<img class="plot"' in page
    assert (tmp_path / "run" / "figures" / "membership.svg").is_file()
    lines = csv_rows(tmp_path / "run" / "membership.csv")
    assert [line["defence"] for line in lines] == ["none", "prune"]


def test_an_audit_without_membership_does_not_mention_it(small, tmp_path):
    audit(small(rounds=1, attacks="gs:iterations=2"), tmp_path / "run", workers=0)
    page, table = ((tmp_path / "run" / name).read_text() for name in ("report.html", "rows.csv"))
    assert 'id="membership"' not in page
    assert "AUC" not in page.replace(glossary_list(), "")
    assert "auc" not in table
    assert not (tmp_path / "run" / "membership.csv").exists()


def test_a_cell_that_fails_has_one_row_with_the_reason(small, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = small(attacks=INFER, defences=f"{tmp_path}/broken.py:Broken")
    cell = plan(settings)[-1]
    rows, pictures = run_cell(cell, settings, load_dataset(settings.dataset))
    assert pictures == {}
    assert rows == failed_rows(cell, rows[0]["why"], settings)
    assert (len(rows), rows[0]["failed"], rows[0]["auc"]) == (1, True, None)
    assert "The update must be mended" in rows[0]["why"]
    assert list(rows[0]) == settings.schema.keys("membership")


def test_the_command_shows_a_separate_table_and_json(gradveil, pictures, tmp_path):
    command = ["audit", "--dataset", pictures, "--attacks", INFER, "--rounds", 2, "--clients", 3, "--workers", 0]
    ended = gradveil(*command, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert "membership" in ended.out
    assert "PSNR" not in ended.out
    ended = gradveil(*command, "--out", tmp_path / "other", "--json")
    (line,) = json.loads(ended.out)["membership"]
    assert (line["defence"], line["n"]) == ("none", 1)


def test_gradveil_attack_refuses_it(gradveil, tmp_path):
    (tmp_path / "spec.toml").write_text('model = "logistic"\nshape = [1, 8, 8]\nnum_classes = 3\nkind = "gradient"\n')
    (tmp_path / "file.safetensors").write_bytes(b"")
    ended = gradveil(
        "attack", "--model-file", tmp_path / "file.safetensors", "--update", tmp_path / "file.safetensors",
        "--spec", tmp_path / "spec.toml", "--attack", "boundary", "--out", tmp_path / "out",
    )  # fmt: skip
    assert ended.code == 2
    assert "must be one that rebuilds images here, got 'boundary'" in ended.last
