"""The package's own source as data: its classes with bases, documentation and fields, read with `ast`."""

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parent
NO_DEFAULT = object()
"""The default of a field that has none."""
OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


class Unclear(Exception):  # noqa: N818 - a state that callers answer by importing
    """The source alone does not tell a value; import the module to know it."""


class Field(NamedTuple):
    """A field of a dataclass: its name, its default (`NO_DEFAULT` if it has none) and its help text."""

    name: str
    default: Any
    help: str


def module_path(module: str) -> Path:
    """Return the file of a module of the package, which need not exist.

    Example:
        >>> module_path("gradveil.errors").name, module_path("gradveil.data").name
        ('errors.py', '__init__.py')
    """
    place = PACKAGE.joinpath(*module.split(".")[1:])
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def read_module(module: str) -> "ModuleSource":
    """Read the source of a module of the package; raise SyntaxError or ValueError if it is no Python."""
    return ModuleSource(module, ast.parse(module_path(module).read_bytes()))


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """One module: its classes, its constants and what it imports, by name.

    Attributes:
        module: its dotted name.
        tree: its syntax tree.
        classes: its classes.
        constants: the expressions that are assigned to names.
        imports: for each imported name the module and the name there; the name is "" for a module.
    """

    module: str
    tree: ast.Module
    classes: dict[str, ast.ClassDef] = field(init=False, default_factory=dict)
    constants: dict[str, ast.expr] = field(init=False, default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                self.imports.update(
                    {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
                )
            elif isinstance(node, ast.Import):
                self.imports.update({alias.asname or alias.name: (alias.name, "") for alias in node.names})
            else:
                self.constants.update(_assigned(node))

    def resolve(self, name: str) -> "ClassSource | str":
        """Return the class that a name stands for, or the dotted name of one outside of the package."""
        if name in self.classes:
            return ClassSource(self.module, name)
        head, _, rest = name.partition(".")
        module, inside = self.imports.get(head, ("", ""))
        full = ".".join(filter(None, (inside, rest)))
        if module.split(".")[0] != "gradveil":
            return f"{module}.{full}"
        if not inside or not module_path(module).exists() or module_path(f"{module}.{inside}").exists():
            module, full = (f"{module}.{inside}" if inside else module), rest
        return read_module(module).resolve(full) if full else module

    def value(self, node: ast.expr) -> Any:  # noqa: ANN401 - whatever the source says
        """Evaluate a literal, a constant of this or another module, or arithmetic with them; else raise `Unclear`."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Tuple):
            return tuple(map(self.value, node.elts))
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise Unclear(f"{self.module}: {ast.unparse(node)}")
            return {self.value(key): self.value(v) for key, v in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](self.value(node.left), self.value(node.right))
        text = ast.unparse(node)
        if text in self.constants:
            return self.value(self.constants[text])
        module, name = self.imports.get(text, ("", ""))
        if module.startswith("gradveil.") and name in (there := read_module(module)).constants:
            return there.value(there.constants[name])
        if text in ("math.inf", "math.nan", "math.pi", "math.e"):
            return getattr(math, text.removeprefix("math."))
        raise Unclear(f"{self.module}: {text}")


@dataclass(frozen=True)
class ClassSource:
    """A class of the package as its source describes it: the module and the name."""

    module: str
    name: str

    @property
    def node(self) -> ast.ClassDef:
        """The class's syntax tree."""
        return read_module(self.module).classes[self.name]

    def mro(self) -> "list[ClassSource | str]":
        """Return the class, its bases and theirs, each before its own bases."""
        found: list[ClassSource | str] = []
        for base in self.node.bases:
            cls = read_module(self.module).resolve(ast.unparse(base).partition("[")[0])
            found += cls.mro() if isinstance(cls, ClassSource) else [cls]
        return [self, *(cls for place, cls in enumerate(found) if cls not in found[place + 1 :])]

    def known(self) -> "list[ClassSource]":
        """Return those of `mro` that are classes of the package."""
        return [cls for cls in self.mro() if isinstance(cls, ClassSource)]

    @property
    def doc(self) -> str:
        """The documentation, inherited if the class has none of its own."""
        return next((text for cls in self.known() if (text := ast.get_docstring(cls.node, clean=False))), "")

    def is_abstract(self) -> bool:
        """Return whether an abstract method is left."""
        left: set[str] = set()
        for cls in reversed(self.known()):
            for node in cls.node.body:
                if isinstance(node, ast.FunctionDef):
                    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
                    left = left | {node.name} if "abstractmethod" in marks else left - {node.name}
                elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                    left -= {name for name, _ in _assigned(node)}
        return bool(left) and "abc.ABC" in self.mro()

    def constant(self, name: str, default: Any) -> Any:  # noqa: ANN401 - whatever the source says
        """Return the value that the class body itself assigns to a name, or ``default``."""
        for node in self.node.body:
            for key, value in _assigned(node):
                if key == name:
                    return read_module(self.module).value(value)
        return default

    def inherited(self, name: str, default: Any) -> Any:  # noqa: ANN401 - whatever the source says
        """Return the value that the class or the nearest of its bases assigns to a name, or ``default``."""
        values = (cls.constant(name, NO_DEFAULT) for cls in self.known())
        return next((value for value in values if value is not NO_DEFAULT), default)

    def fields(self) -> list[Field]:
        """Return the fields that the constructor takes, as `dataclasses.fields` orders them."""
        found: dict[str, Field | None] = {}
        for cls in reversed(self.known()):
            if any("dataclass" in ast.unparse(mark) for mark in cls.node.decorator_list):
                found |= {name: made for node in cls.node.body for name, made in _fields(node, read_module(cls.module))}
        return [made for made in found.values() if made is not None]


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement assigns, with the expression."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    for target in targets:
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, value


def _fields(node: ast.stmt, module: ModuleSource) -> Iterator[tuple[str, Field | None]]:
    """Yield the field that a statement of a class body declares; None if the constructor does not take it."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
        return
    if "ClassVar" in ast.unparse(node.annotation):
        return
    name, value = node.target.id, node.value
    if value is None:
        yield name, Field(name, NO_DEFAULT, "")
    elif isinstance(value, ast.Call):
        yield name, _called(name, value, module)
    else:
        yield name, Field(name, module.value(value), "")


def _called(name: str, call: ast.Call, module: ModuleSource) -> Field | None:
    """Return the field behind ``field(default=..)`` or ``setting(default, help)``; None for ``init=False``."""
    function, given = ast.unparse(call.func).rpartition(".")[2], {word.arg: word.value for word in call.keywords}
    if function == "setting" and len(call.args) == 2 and not given:
        return Field(name, *map(module.value, call.args))
    if function != "field" or call.args or "default_factory" in given:
        raise Unclear(f"{module.module}: {ast.unparse(call)}")
    if "init" in given and not module.value(given["init"]):
        return None
    return Field(name, module.value(given["default"]) if "default" in given else NO_DEFAULT, "")
