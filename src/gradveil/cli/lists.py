"""The commands that look up components: list and describe. They read the source and import no component."""

import dataclasses
import inspect
from typing import Annotated, Any

import typer

from gradveil.catalogue import FOLDERS, catalogue
from gradveil.cli.completion import complete_kind, complete_name
from gradveil.cli.display import Json, print_json, say, show
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.registry import find, load_own, parse_spec
from gradveil.source import NO_DEFAULT, Unclear


def list_components(
    kind: Annotated[
        str, typer.Argument(help=f"One of: {', '.join(FOLDERS)}. By default all kinds.", autocompletion=complete_kind)
    ] = "",
    as_json: Json = False,
) -> None:
    """List the components of a kind with one line about each."""
    from rich.table import Table

    if kind and kind not in FOLDERS:
        raise UnknownNameError("kind", kind, FOLDERS)
    kinds = [kind] if kind else list(FOLDERS)
    found = {k: {name: entry.doc.split("\n")[0] for name, entry in catalogue(k).entries.items()} for k in kinds}
    warn_of_broken(kinds)
    if as_json:
        print_json(found)
        return
    for k, entries in found.items():
        table = Table("name", "what it does", title=k, title_justify="left")
        for name, text in entries.items():
            table.add_row(name, text)
        show(table)


def describe(
    name: Annotated[
        str,
        typer.Argument(help="A component: its name, or your own as file.py:Class.", autocompletion=complete_name),
    ],
    as_json: Json = False,
) -> None:
    """Show a component's documentation, its settings with their defaults, and the numbers that a defence reports."""
    name = parse_spec(name)[0]
    kind, doc, settings, reports = _own(name) if ".py:" in name else _ours(name)
    if as_json:
        print_json({"name": name, "kind": kind, "doc": doc, "settings": settings, "reports": reports})
        return
    say(f"{name} ({kind.removesuffix('s')})\n\n{doc}\n")
    if settings:
        pairs = ", ".join(f"{key}={value}" for key, value in settings.items())
        say(f"Settings and defaults: {pairs}")
    if reports:
        lines = "".join(f"\n  {key}: {text}" for key, text in reports.items())
        say(f"\nReports: numbers under `reports` in each round's row, means over clients{lines}")


def warn_of_broken(kinds: list[str]) -> None:
    """Name on stderr each file that can't be imported."""
    broken = {file.path: file.error for kind in kinds for file in catalogue(kind).broken}
    for path, error in broken.items():
        say(f"Warning: {path} is left out, because it can't be imported: {error}.", err=True)


def _ours(name: str) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """Return kind, documentation, settings and reports of a component of the package, from its source."""
    every = {n: entry for kind in FOLDERS for n, entry in catalogue(kind).entries.items()}
    if name not in every:
        for kind in FOLDERS:
            if any(name in file.names for file in catalogue(kind).broken):
                find(kind, name)  # raises an error that names the file
        warn_of_broken(list(FOLDERS))
        raise UnknownNameError("component", name, every)
    entry = every[name]
    try:
        settings, reports = entry.settings, entry.reports
    except Unclear:
        cls = find(entry.kind, name)
        settings, reports = _settings(cls), _reports(cls)
    return entry.kind, inspect.cleandoc(entry.doc), _told(settings), reports


def _own(reference: str) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """Return kind, documentation, settings and reports of the user's own component or model factory."""
    found = load_own(reference)
    if not callable(found):
        raise ConfigError(f"{reference!r} must be a component or a function that returns a model, got {found!r}.")
    doc = inspect.getdoc(found) or "It has no documentation."
    if dataclasses.is_dataclass(found) and getattr(found, "kind", "") in FOLDERS:
        return str(found.kind), doc, _told(_settings(found)), _reports(found)  # type: ignore[union-attr]
    offered = {"shape", "num_classes"}  # by `create_model`
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name not in offered]
    defaults = {p.name: NO_DEFAULT if p.default is p.empty else p.default for p in parameters}
    return "models", doc, _told(defaults), {}


def _settings(cls: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return {field.name: NO_DEFAULT if field.default is dataclasses.MISSING else field.default for field in fields}


def _reports(cls: object) -> dict[str, str]:
    return dict(getattr(cls, "reports", {}))


def _told(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as JSON can hold them."""
    return {
        key: value if isinstance(value, (bool, int, float, str, tuple, type(None))) else _word(value)
        for key, value in settings.items()
    }


def _word(value: object) -> str:
    return "needed" if value is NO_DEFAULT else str(value)
