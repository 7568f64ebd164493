"""The commands audit and report, as users call them."""

import json
import shutil
from pathlib import Path

import pytest

from tests.audits.conftest import QUICK
from tests.audits.test_run import BROKEN


@pytest.fixture
def arguments(pictures, tmp_path):
    return ["audit", "--dataset", pictures, "--attacks", QUICK, "--targets", 2, "--rounds", 0, "--workers", 0, "--out",
            tmp_path / "run"]  # fmt: skip


def test_json_is_one_document_with_rows_and_summary(gradveil, arguments, tmp_path):
    ended = gradveil(*arguments, "--defences", "prune:fraction=0.9", "--adaptive", "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["report"] == str(tmp_path / "run" / "report.html")
    assert [(row["defence"], row["adaptive"], row["n"]) for row in document["summary"]] == [
        ("none", False, 2),
        ("prune:fraction=0.9", False, 2),
        ("prune:fraction=0.9", True, 2),
    ]
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert document["rows"] == [json.loads(line) for line in lines]
    assert "cells" in ended.err


def test_a_run_without_a_folder_gets_one_below_runs(gradveil, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = gradveil(*arguments[:-2], "--json")
    assert ended.code == 0, ended.err
    out = Path(json.loads(ended.out)["out"])
    assert out.parent == Path("runs")
    assert (out / "rows.jsonl").exists()
    again = gradveil(*arguments[:-2], "--resume")
    assert again.code == 2
    assert "Add --out" in again.err


def test_the_table_has_a_line_for_each_defence_and_attack_and_ends_with_the_page(gradveil, arguments, tmp_path):
    ended = gradveil(*arguments, "--defences", "prune", "--rounds", 1)
    assert ended.code == 0, ended.err
    assert [line.split("│")[1].strip() for line in ended.out.splitlines() if line.startswith("│")] == [
        "blind guess", "none", "prune",
    ]  # fmt: skip
    assert ended.out.splitlines()[-1] == f"Look at it: {tmp_path / 'run' / 'report.html'}"


def test_the_table_shows_the_share_of_images_with_a_guess_if_some_have_none(gradveil, arguments, tmp_path):
    def heads(*more):
        ended = gradveil(*arguments, *more)
        assert ended.code == 0, ended.err
        *heads, _, line = (line for line in ended.out.splitlines() if line.startswith(("┃", "│")))
        words = zip(*([cell.strip() for cell in head.split("┃")] for head in heads), strict=True)
        return dict(zip((" ".join(filter(None, each)) for each in words), map(str.strip, line.split("│")), strict=True))

    assert "Guessed" not in heads()
    imprint = ("--attacks", "imprint:bins=2", "--knows", "num-examples,alters-model", "--images", 8)
    few = heads(*imprint, "--out", tmp_path / "other")
    assert float(few["Guessed"].removesuffix(" %")) <= 25


def test_a_failed_cell_exits_with_1_and_its_reason_and_other_rows_are_kept(gradveil, arguments, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    ended = gradveil(*arguments, "--defences", f"{tmp_path}/broken.py:Broken", "--json")
    assert ended.code == 1
    assert ended.last.startswith("Failed: ")
    assert "The update must be mended" in ended.last
    assert [row["failed"] for row in json.loads(ended.out)["rows"]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--defences", ""], "ConfigError: defences must name at least one, got an empty list."),
        (["--defences", "prun"], "ConfigError: Unknown defence 'prun'. Did you mean 'prune'?"),
        (["--attacks", ""], "ConfigError: attacks must name at least one, got an empty list."),
        (["--targets", "x"], "ConfigError: Setting targets of an audit must be of type int, got 'x'."),
        (["--workers", "-1"], "ConfigError: workers must be at least 0, got -1."),
        (["--device", "gpu"], "ConfigError: device must be one that torch can use here"),
    ],
)
def test_bad_input_gives_one_line_exit_code_2_and_no_folder(gradveil, arguments, tmp_path, more, text):
    ended = gradveil(*arguments, *more)
    assert (ended.code, ended.out) == (2, "")
    assert ended.last.startswith(text)
    assert not (tmp_path / "run").exists()


def test_a_report_of_an_unfinished_audit_says_so(gradveil, arguments, tmp_path):
    assert gradveil(*arguments).code == 0
    out = tmp_path / "run"
    next((out / "cells").glob("*.json")).unlink()
    (out / "rows.jsonl").write_text("")
    (out / "report.html").unlink()
    ended = gradveil("report", out)
    assert ended.code == 0, ended.err
    assert ended.out == f"Look at it: {out / 'report.html'}\n"
    assert "0 of 1 cells" in (out / "report.html").read_text()


def test_a_report_of_a_foreign_folder_is_refused(gradveil, tmp_path):
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").write_text("text")
        ended = gradveil("report", folder)
        assert (ended.code, ended.out) == (2, "")
        assert ended.last.startswith("RunFolderError: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_page_of_a_training_is_written_again(gradveil, tmp_path):
    out = tmp_path / "train"
    command = ["train", "--model", "logistic", "--clients", 2, "--rounds", 1, "--partition", "iid:images=20"]
    assert gradveil(*command, "--workers", 0, "--out", out).code == 0
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    ended = gradveil("report", out, "--json")
    assert json.loads(ended.out) == {"report": str(out / "report.html"), "pdf": None, "notes": []}
    assert (out / "report.html").read_text() == before
    shutil.copy(out / "settings.toml", tmp_path)
    unfinished = gradveil("report", tmp_path)
    assert (unfinished.code, "at least one finished round" in unfinished.last) == (2, True)
