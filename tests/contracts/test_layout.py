"""Imports point one way: the folder is the data's path, and a file knows only what lies before it."""

import ast
import pkgutil
from pathlib import Path

import gradveil

ORDER = [
    "errors", "validate", "randomness", "types", "transforms", "progress", "registry", "config", "storage", "data",
    "metrics", "models", "generators", "convolution", "layers", "grads", "calls", "leak", "accounting", "flat",
    "defences", "client", "server", "threat", "received", "observe", "attacks", "tripwire", "run_folder", "engines",
    "membership", "report", "train", "audit", "score", "reproduce", "update_spec", "attack_files", "cli",
]  # fmt: skip
SOURCE = Path(gradveil.__file__).parent


def imported(path):
    """The gradveil modules (first level) that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gradveil":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


def test_every_part_has_its_place():
    assert {info.name for info in pkgutil.iter_modules(gradveil.__path__)} == set(ORDER)


def test_imports_point_one_way():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part != "__init__":
            later = [name for name in imported(path) if ORDER.index(name) > ORDER.index(part)]
            wrong += [f"{path.relative_to(SOURCE)} imports {name}" for name in later]
    assert not wrong


def test_folders_are_two_levels_deep_at_most():
    assert all(len(path.relative_to(SOURCE).parent.parts) <= 2 for path in SOURCE.rglob("*.py"))


def test_exports_exist_and_are_sorted():
    assert list(gradveil.__all__) == sorted(gradveil.__all__)
    assert all(hasattr(gradveil, name) for name in gradveil.__all__)
