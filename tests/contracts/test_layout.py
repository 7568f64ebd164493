"""Every folder is a station on the data's way, and imports point back along it only."""

import ast
from pathlib import Path

import pytest

import gradveil

FOUNDATION = {
    "catalogue", "config", "errors", "heap", "interrupts", "limits", "own", "progress", "randomness", "registry",
    "rows", "scratch", "seal", "secret_stream", "source", "storage", "types", "validate",
}  # fmt: skip
"""Files beside the folders: what everything stands on. They import each other and nothing else."""
ROOMS = [
    "data", "models", "networks", "defences", "federated", "threat", "generators", "metrics", "attacks", "engines",
    "report", "audits", "runs", "reproduce", "cli",
]  # fmt: skip
"""Each folder imports the foundation and folders to its left."""
DOORS = {"__init__", "__main__", "flower", "nvflare", "tripwire"}
"""What users import: it leads into the rooms and holds nothing itself."""
SOURCE = Path(gradveil.__file__).parent


def places_of(path, folder=""):
    """Yield the file or folder below gradveil that each import of a file names; "" is gradveil itself.

    ``folder`` is where the file lies below gradveil, for imports with dots.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level:
                package = ["gradveil", *filter(None, folder.split("/"))]
                module = [*package[: len(package) + 1 - node.level], *filter(None, module)]
            if module[0] == "gradveil":
                yield from module[1:2] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from ["".join(name[1:2]) for name in names if name[0] == "gradveil"]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("gradveil"):
                    yield "".join(str(argument.value).split(".")[1:2])


def complaint(place, imported):
    """Say what is wrong with an import, or return "" if it is right."""
    if not imported:
        return "imports gradveil as a whole; inside the package, import from the folder where a name lives"
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
    folders = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert files == FOUNDATION | DOORS
    assert folders == set(ROOMS)


def test_imports_point_back_along_the_way():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if place not in DOORS:
            folder = path.relative_to(SOURCE).parent.as_posix().strip(".")
            found = [complaint(place, imported) for imported in places_of(path, folder)]
            wrong += [f"{path.relative_to(SOURCE)} {text}" for text in found if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "place", "wanted"),
    [
        ("from gradveil.attacks.gs import Gs", "data", "imports attacks, which lies behind it"),
        ("from gradveil.data import Dataset", "storage", "is foundation and imports the folder data"),
        ("from gradveil import Client", "attacks", "imports the public name 'Client'; inside the package, import it"),
        ("import gradveil.tripwire", "cli", "imports the door tripwire"),
        ("import gradveil", "data", "imports gradveil as a whole"),
        ("from ..attacks import gs", "data", "imports attacks, which lies behind it"),
        ("from . import pixels", "data", ""),
        ("importlib.import_module('gradveil.cli')", "data", "imports cli, which lies behind it"),
        ("from gradveil import errors", "data", ""),
        ("from gradveil.data import Dataset", "cli", ""),
    ],
)
def test_a_wrong_import_is_named(tmp_path, code, place, wanted):
    (tmp_path / "some.py").write_text(code)
    folder = place if place in ROOMS else ""
    (text,) = [complaint(place, imported) for imported in places_of(tmp_path / "some.py", folder)]
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
