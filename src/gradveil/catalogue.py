"""The components of the package, read from its source: names, documentation and settings, without importing torch.

A component exists because its file exists. `catalogue` reads the files of a kind's folder with `ast`, so that
``gradveil list`` and ``describe`` answer at once, one component can be imported without the others, and a file that
can't be imported is named while all others work.
"""

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gradveil.source import ClassSource, ModuleSource, module_path, read_module

FOLDERS: Mapping[str, str] = {
    "datasets": "gradveil.data:NamedSet",
    "partitions": "gradveil.data:Partition",
    "models": "gradveil.models:Model",
    "generators": "gradveil.generators:Generator",
    "defences": "gradveil.defences:Defence",
    "attacks": "gradveil.attacks:AnyAttack",
    "metrics": "gradveil.metrics:Metric",
}
"""Where each kind of component lives: the package, and the base class exported by it."""


class Entry(NamedTuple):
    """One component as its source describes it.

    Attributes:
        name: what users type.
        kind: the plural, as in `FOLDERS`.
        source: the class in the source.
    """

    name: str
    kind: str
    source: ClassSource

    @property
    def doc(self) -> str:
        """The class's documentation."""
        return self.source.doc

    @property
    def settings(self) -> dict[str, object]:
        """The settings with their defaults; raise `Unclear` if a default can't be read from the source."""
        return {field.name: field.default for field in self.source.fields()}

    @property
    def reports(self) -> dict[str, str]:
        """The numbers that a defence reports, with help; raise `Unclear` if the source alone does not tell them."""
        return dict(self.source.inherited("reports", {}))


class Broken(NamedTuple):
    """A file that can't be imported.

    Attributes:
        path: the file.
        error: the error that importing it would raise.
        names: names that its components might have.
    """

    path: Path
    error: str
    names: frozenset[str]


@dataclass(frozen=True)
class Catalogue:
    """All components of a kind by name, and the files of its folder that can't be imported."""

    entries: Mapping[str, Entry]
    broken: tuple[Broken, ...]


@cache
def catalogue(kind: str) -> Catalogue:
    """Read the source of all components of a kind: every concrete subclass of its base in a file of its folder."""
    package, base_name = FOLDERS[kind].split(":")
    base = read_module(package).resolve(base_name)
    entries: dict[str, Entry] = {}
    broken = []
    for path in sorted(module_path(package).parent.glob("*.py")):
        try:
            module = read_module(package if path.stem == "__init__" else f"{package}.{path.stem}")
            fault = next(_faults(module.tree), "")
            names = {kebab(name) for name in module.classes}
            if not fault:
                entries |= {entry.name: entry for entry in _entries(kind, module, base)}
        except (SyntaxError, ValueError) as error:
            fault, names = f"{type(error).__name__}: {error}", set()
        if fault:
            broken.append(Broken(path, fault, frozenset({*names, kebab(path.stem)})))
    return Catalogue(dict(sorted(entries.items())), tuple(broken))


def _entries(kind: str, module: ModuleSource, base: ClassSource | str) -> Iterator[Entry]:
    """Yield the components that a module defines."""
    for class_name in module.classes:
        cls = ClassSource(module.module, class_name)
        if cls != base and base in cls.mro() and not cls.is_abstract():
            yield Entry(cls.constant("name", kebab(class_name)), kind, cls)


def kebab(name: str) -> str:
    """Return a class's or file's name as users type it.

    Example:
        >>> kebab("DpSgd"), kebab("top_k")
        ('dp-sgd', 'top-k')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()


def _faults(tree: ast.Module) -> Iterator[str]:
    """Yield errors that importing a module would raise, as far as its source shows them: unknown names and modules."""
    bound = {*dir(builtins), "__file__"}
    for node in ast.walk(tree):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
        if module.startswith("gradveil.") and not module_path(module).exists():
            yield f"ModuleNotFoundError: No module named {module!r}"
        bound |= _bound(node)
    unknown = [node for node in _run_on_import(tree.body) if isinstance(node, ast.Name) and node.id not in bound]
    if unknown and "*" not in bound:
        first = min(unknown, key=lambda node: (node.lineno, node.col_offset))
        yield f"NameError: name {first.id!r} is not defined, in line {first.lineno}"


def _bound(node: ast.AST) -> set[str]:
    """Return the names that a node gives a value, in whatever scope."""
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).partition(".")[0]}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler)):
        return {node.name or ""}
    return {node.arg} if isinstance(node, ast.arg) else set()


def _run_on_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes that importing a module evaluates: everything but the bodies of functions."""
    left: list[ast.AST] = [*body]
    while left:
        node = left.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            left += [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.Lambda):
            left.append(node.args)
        else:
            left += ast.iter_child_nodes(node)
