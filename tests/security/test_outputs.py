"""What leaves a run: tables without formulas, terminals without escapes, folders that others can't write to."""

import csv
import io
import os
import stat
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from gradveil.cli.display import say, show
from gradveil.engines.run_folder import RunFolder, _read_rows
from gradveil.errors import printable
from gradveil.report.files import to_csv
from gradveil.storage import PrivateFolder, write_atomic

FORMULA = '=HYPERLINK("http://x","y")'


@pytest.mark.parametrize("text", [FORMULA, "+1+1", "-2+3", "@SUM(A1)", "\t=1"])
def test_a_text_is_never_a_formula(text):
    content = to_csv([{"why": text, text: [text, "b"]}], ["why", text]).decode()
    cells = [cell for row in csv.reader(io.StringIO(content, newline="")) for cell in row]
    assert cells == [f"'{text}" if cell is None else cell for cell in ("why", None, None, f"'{text}+b")]


def test_a_return_begins_no_new_row():
    content = to_csv([{"why": "\r=1", "other": "a\r=1"}], ["why", "other"]).decode()
    assert content == "why,other\n\\r=1,a\\r=1\n"


def test_numbers_stay_numbers():
    assert (
        to_csv([{"a": -1.5, "b": "-2", "c": "+1e-3", "d": None}], list("abcd")).decode() == "a,b,c,d\n-1.5,-2,+1e-3,\n"
    )


@given(st.text())
def test_a_printed_text_has_no_control_characters(text):
    shown = printable(text)
    assert not [c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")]
    assert printable(shown) == shown


ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"


def test_labels_and_names_can_not_steer_the_terminal(gradveil, capsys, tmp_path):
    table = Table("what", title=f"a{ESCAPES}")
    table.add_row(f"b{ESCAPES}")
    show(table)
    say(f"c{ESCAPES}")
    out = capsys.readouterr().out
    ended = gradveil("train", "--out", tmp_path / "x", "--dataset", f"none{ESCAPES}")
    other = gradveil("report", tmp_path / f"folder{ESCAPES}")
    for text in (out, ended.err, other.err):
        assert not set(ESCAPES) & set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
        assert "\\x1b]0;title" in text


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    return {path.relative_to(folder): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.usefixtures("open_umask")
def test_nobody_else_can_write_to_any_folder_of_a_run(tmp_path):
    """With write access to a parent, others could replace a private folder by one of their own."""
    out = tmp_path / "a" / "b"
    with RunFolder(out):
        write_atomic(out / "cells" / "one" / "x.json", b"{}")
        PrivateFolder(out / "clients" / "3" / "private").save_state(1, {"key": torch.ones(1)})
        found = modes(tmp_path)
    assert not {path: oct(mode) for path, mode in found.items() if mode & 0o022}
    assert {mode for path, mode in found.items() if "private" in path.parts} == {0o700, 0o600}


def test_a_file_that_others_left_does_not_get_what_is_private(tmp_path):
    """Whoever can write to a folder could put an open file, or a link, at the place of the temporary one."""
    known = tmp_path / "known"
    known.write_bytes(b"old")
    for make in (lambda part: part.symlink_to(known), lambda part: part.write_bytes(b"open to all")):
        make(tmp_path / f".key.{os.getpid()}.part")
        write_atomic(tmp_path / "key", b"secret", mode=0o600)
        assert (tmp_path / "key").read_bytes() == b"secret"
        assert stat.S_IMODE((tmp_path / "key").lstat().st_mode) == 0o600
        assert known.read_bytes() == b"old"


def test_the_name_of_a_damaged_folder_can_not_steer_the_terminal(tmp_path):
    path = tmp_path / f"run{ESCAPES}" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(UserWarning, match=r"run\\x1b\]0;title") as said:
        _read_rows(path, 1, "")
    assert not set(ESCAPES) & set(str(said[0].message)) & {"\x1b", "\x07", "\x9b", "\u202e"}
