"""Where a result comes from: digests of the source files and data files behind it, and what computed it."""

import ast
import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from gradveil.catalogue import FOLDERS, catalogue
from gradveil.data import NamedSet, data_root
from gradveil.registry import find
from gradveil.source import PACKAGE, module_path, read_module

SHORT = 6
"""Bytes of a digest; a collision of two versions of one file is as good as impossible."""
WRITTEN_ABOUT = ("base", "pages", "provenance", "results")
"""Files of this folder that write results down; no figure depends on them."""


def digest(content: bytes) -> str:
    """Return a short digest.

    Example:
        >>> digest(b"") == digest(b""), digest(b"") == digest(b"a"), len(digest(b""))
        (True, False, 12)
    """
    return hashlib.blake2b(content, digest_size=SHORT).hexdigest()


def as_one(files: Mapping[str, str]) -> str:
    """Return one digest of many files' digests by name."""
    return digest("\n".join(f"{name} {files[name]}" for name in sorted(files)).encode())


@cache
def source_digests(module: str) -> Mapping[str, str]:
    """Return the digest of each source file of the package that a module depends on, by its path in the package.

    These are the files that it imports, directly or not, and those of the components that it names in a text. Comments,
    documentation and layout don't count.
    """
    seen: set[str] = set()
    waiting = [module] if module_path(module).is_file() else []
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [*_imported(name), *(_named(name) if name.startswith("gradveil.reproduce.") else ())]
    ours = {f"gradveil.reproduce.{name}" for name in WRITTEN_ABOUT}
    paths = {name: module_path(name).relative_to(PACKAGE).as_posix() for name in seen - ours}
    return {paths[name]: digest(_meaning(read_module(name).tree).encode()) for name in sorted(paths, key=paths.get)}  # type: ignore[arg-type]


def _imported(module: str) -> Iterator[str]:
    """Yield the modules of the package that a module imports, at the top or inside a function."""
    for node in ast.walk(read_module(module).tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.startswith("gradveil.") and module_path(name).is_file())


def _named(module: str) -> Iterator[str]:
    """Yield the modules of the components whose names are words of a module's texts."""
    known = {name: entry.source.module for kind in FOLDERS for name, entry in catalogue(kind).entries.items()}
    yield from (known[word] for word in words_of(module) if word in known)


@cache
def words_of(module: str) -> frozenset[str]:
    """Return the words in all texts of a module, documentation included; ``by-class`` and ``faces.npz`` are words."""
    texts = (node.value for node in ast.walk(read_module(module).tree) if isinstance(node, ast.Constant))
    return frozenset(word for text in texts if isinstance(text, str) for word in re.findall(r"[\w.-]*\w", text))


def _meaning(node: ast.AST) -> str:
    """Return a syntax tree as a text that is the same in all versions of Python, without documentation."""
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = [one for one in value if not _is_text(one)]
        several = value if isinstance(value, list) else [value]
        said = [_meaning(one) if isinstance(one, ast.AST) else repr(one) for one in several if one is not None]
        if said and name not in ("type_comment", "kind"):
            parts.append(f"{name}=[{','.join(said)}]")
    return f"{type(node).__name__}({';'.join(parts)})"


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def data_digests(module: str, root: Path | None) -> dict[str, str]:
    """Return the digests of the data files that a paper's experiments can read, by their path below the data root.

    These are the files of the data sets that the modules of the paper name, as far as they exist, and the weights of
    metrics. The set mnist-5k comes with a package, whose version `versions` states.
    """
    place, paper = data_root(root), module.rpartition(".")[2]
    folder = module_path(module).parent
    words = {word for path in folder.glob(f"{paper}*.py") for word in words_of(f"gradveil.reproduce.{path.stem}")}
    chosen = {place / word for word in words if word.endswith(".npz")} | {*place.glob("weights/lpips*.safetensors")}
    for name in words & set(catalogue("datasets").entries):
        found = find("datasets", name)()
        if isinstance(found, NamedSet):
            chosen |= {place / (file.unpacks_to or file.path) for file in found.files}
            chosen |= {expected.path for expected in found.expected(place) if expected.path.is_relative_to(place)}
    each = {file for path in chosen for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()}
    return {file.relative_to(place).as_posix(): _file_digest(file, file.stat().st_mtime_ns) for file in sorted(each)}


@cache
def _file_digest(path: Path, changed: int) -> str:
    del changed  # part of the key of the cache only
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=SHORT)).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that figures depend on."""
    names = ("gradveil", "torch", "numpy", "mlxtend")
    return {"python": platform.python_version()} | {name: version(name) for name in names}
