"""What the source says of components is what importing them says, and files that can't be imported are named."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil

import pytest

from gradveil.catalogue import FOLDERS, _faults, catalogue, kebab
from gradveil.cli.options import fields_of
from gradveil.registry import components
from gradveil.source import ClassSource, Unclear, read_module


def imported(kind):
    """Import every file of a kind's folder and return its components: the truth."""
    package_name, base_name = FOLDERS[kind].split(":")
    package = importlib.import_module(package_name)
    base, found = getattr(package, base_name), {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package_name}.{info.name}")
        for item in vars(module).values():
            own = inspect.isclass(item) and issubclass(item, base) and item.__module__ == module.__name__
            if own and item is not base and not inspect.isabstract(item):
                found[item.name] = item
    return found


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_source_says_what_importing_says(kind):
    truth, read = imported(kind), catalogue(kind)
    assert not read.broken
    assert list(read.entries) == sorted(truth)
    assert components(kind) == truth
    for name, cls in truth.items():
        entry = read.entries[name]
        assert inspect.cleandoc(entry.doc) == inspect.getdoc(cls), name
        defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.init}
        assert list(entry.settings.items()) == list(defaults.items()), name
        assert entry.reports == getattr(cls, "reports", {}), name


@pytest.mark.parametrize(
    "settings",
    [
        "gradveil.config:TrainSettings",
        "gradveil.audits.settings:AuditSettings",
        "gradveil.generators.training:GeneratorSettings",
    ],
)
def test_options_are_the_fields_of_the_settings(settings):
    module, _, name = settings.partition(":")
    fields = dataclasses.fields(getattr(importlib.import_module(module), name))
    wanted = [(field.name, field.default, field.metadata["help"]) for field in fields]
    assert [tuple(field) for field in fields_of(settings)] == wanted
    assert [tuple(field) for field in ClassSource(module, name).fields()] == wanted  # without importing it


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("@dataclass\nclass A: pass", "NameError: name 'dataclass' is not defined, in line 1"),
        ("class A(Defence): pass", "NameError: name 'Defence' is not defined, in line 1"),
        ("class A:\n    x: Tensor = 1", "NameError: name 'Tensor' is not defined, in line 2"),
        ("def f(x: Tensor): pass", "NameError: name 'Tensor' is not defined, in line 1"),
        ("def f(x=y): pass", "NameError: name 'y' is not defined, in line 1"),
        (
            "from gradveil.nowhere import x",
            "ModuleNotFoundError: No module named 'gradveil.nowhere'",
        ),
        ("def f():\n    return unknown", ""),
        ("f = lambda: unknown", ""),
        ("import torch.nn\nx: 'Unknown' = torch", ""),
        ("import a.b as c\nfor i in c: print(i, [j for j in i])", ""),
        ("from gradveil.errors import *\nraise ConfigError", ""),
        ("try:\n    import x\nexcept ImportError as error:\n    x = error", ""),
        ("class A:\n    y = 1\n    z = y + len('a')\n    def f(self, a: 'B') -> int: return b", ""),
        ("with open('x') as file: text = (n := file)\nn, text", ""),
    ],
)
def test_faults_that_the_source_shows(code, fault):
    assert next(_faults(ast.parse(code)), "") == fault


def test_what_the_source_does_not_tell_is_unclear():
    module = read_module("gradveil.config")
    assert module.value(ast.parse("-LARGEST / 2 + 1e3 * 0", mode="eval").body) == -5e37
    assert module.value(ast.parse("(1, 'a', None, 2 ** 3)", mode="eval").body) == (1, "a", None, 8)
    with pytest.raises(Unclear, match="some_function"):
        module.value(ast.parse("some_function(1)", mode="eval").body)


def test_names_are_derived_from_classes_and_files():
    assert [kebab(text) for text in ("DpSgd", "top_k", "Resnet20", "CaFl")] == ["dp-sgd", "top-k", "resnet20", "ca-fl"]
