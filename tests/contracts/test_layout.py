"""Every folder is a station on the data's way, and imports point back along it only."""

import ast
from pathlib import Path

import pytest

import gradveil

FOUNDATION = {
    "catalogue", "config", "errors", "own", "progress", "randomness", "registry", "rows", "source", "storage", "types",
    "validate",
}  # fmt: skip
"""Files beside the folders: what everything stands on. They import each other and nothing else."""
ROOMS = [
    "data", "models", "networks", "defences", "federated", "threat", "generators", "metrics", "attacks", "engines",
    "report", "audits", "runs", "reproduce", "cli",
]  # fmt: skip
"""Each folder imports the foundation and folders to its left."""
DOORS = {"__init__", "tripwire"}
"""What users import: it leads into the rooms and holds nothing itself."""
SOURCE = Path(gradveil.__file__).parent


def places_of(path):
    """Yield the file or folder below gradveil that each import of a file names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradveil":
            inside = node.module.split(".")[1:2]
            yield from inside or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gradveil.")]


def complaint(place, imported):
    """Say what is wrong with an import, or return "" if it is right."""
    if imported not in {*FOUNDATION, *ROOMS, *DOORS}:
        return f"imports the public name {imported!r}; inside the package, import it from the folder where it lives"
    if imported in FOUNDATION or imported == place:
        return ""
    if imported in DOORS:
        return f"imports the door {imported}, which is for users"
    if place in FOUNDATION:
        return f"is foundation and imports the folder {imported}"
    return "" if ROOMS.index(imported) < ROOMS.index(place) else f"imports {imported}, which lies behind it"


def test_every_file_and_folder_has_its_place():
    files = {path.stem for path in SOURCE.glob("*.py")}
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert files == FOUNDATION | DOORS
    assert folders == set(ROOMS)


def test_imports_point_back_along_the_way():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if place not in DOORS:
            found = [complaint(place, imported) for imported in places_of(path)]
            wrong += [f"{path.relative_to(SOURCE)} {text}" for text in found if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "place", "wanted"),
    [
        ("from gradveil.attacks.gs import Gs", "data", "imports attacks, which lies behind it"),
        ("from gradveil.data import Dataset", "storage", "is foundation and imports the folder data"),
        ("from gradveil import Client", "attacks", "imports the public name 'Client'; inside the package, import it"),
        ("import gradveil.tripwire", "cli", "imports the door tripwire"),
        ("from gradveil import errors", "data", ""),
        ("from gradveil.data import Dataset", "cli", ""),
    ],
)
def test_a_wrong_import_is_named(tmp_path, code, place, wanted):
    (tmp_path / "some.py").write_text(code)
    (text,) = [complaint(place, imported) for imported in places_of(tmp_path / "some.py")]
    assert text.startswith(wanted)
    assert bool(text) == bool(wanted)


def test_folders_are_two_levels_deep_at_most():
    assert all(len(path.relative_to(SOURCE).parent.parts) <= 2 for path in SOURCE.rglob("*.py"))


def test_exports_exist_and_are_sorted():
    assert list(gradveil.__all__) == sorted(gradveil.__all__)
    assert all(hasattr(gradveil, name) for name in gradveil.__all__)


def test_every_public_class_has_a_name_of_its_own():
    places = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
