"""docs/architecture.md, and other pages, name what exists: functions, folders and hooks."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

import gradveil
from gradveil.defences.base import HOOKS

ROOT = Path(__file__).parents[2]
SOURCE = Path(gradveil.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
DRAWING = re.search(r"```\nsrc/gradveil/\n(.*?)```", PAGE, re.DOTALL)[1]


def resolve(name):
    """Return the object that a dotted name leads to, or raise."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def missing(text):
    """Return the dotted names below gradveil that do not exist."""
    wrong = []
    for name in sorted(set(re.findall(r"\bgradveil(?:\.\w+)+", text))):
        try:
            resolve(name)
        except (ModuleNotFoundError, AttributeError):
            wrong.append(name)
    return wrong


def test_the_walk_names_its_functions():
    assert len(set(re.findall(r"\bgradveil(?:\.\w+)+", PAGE))) > 30


GUIDES = "adding-"
"""Pages that name files which the reader is about to write."""
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if not page.name.startswith(GUIDES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_exists(page):
    assert missing(page.read_text()) == []


def test_a_wrong_name_is_found():
    assert missing("`gradveil.types.Batch`, `gradveil.types.Bath`, `gradveil.nowhere`") == [
        "gradveil.nowhere",
        "gradveil.types.Bath",
    ]


def test_the_drawing_has_every_file_and_folder():
    files = set(re.findall(r"^  (\w+\.py) ", DRAWING, re.MULTILINE))
    folders = set(re.findall(r"^  (\w+/) ", DRAWING, re.MULTILINE))
    assert files == {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    assert folders == {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}


def test_the_drawing_has_every_inner_folder_below_its_own():
    drawn, outer = set(), ""
    for indent, name in re.findall(r"^( +)(\w+)/ ", DRAWING, re.MULTILINE):
        if len(indent) == 2:
            outer = name
        else:
            drawn.add(f"{outer}/{name}")
    inner = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.glob("*/*/__init__.py")}
    assert drawn == inner


def test_the_folders_are_drawn_in_the_order_of_the_layout_test():
    layout = runpy.run_path(str(ROOT / "tests" / "contracts" / "test_layout.py"))
    assert re.findall(r"^  (\w+)/ ", DRAWING, re.MULTILINE) == layout["ROOMS"]


def test_the_hooks_are_listed_in_their_order():
    table = PAGE.split("## The hooks of a defence")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == HOOKS
