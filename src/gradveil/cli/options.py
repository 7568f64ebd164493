"""Options of a command, one for each field of a settings class, read from its source so that nothing is imported."""

import dataclasses
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli.completion import completion_of
from gradveil.cli.display import DataRoot, Json
from gradveil.cli.gate import FailOn
from gradveil.source import ClassSource, Field, Unclear

NEW = " By default a new folder below runs, named by the time."
Workers = Annotated[
    int | None, typer.Option(help="Worker processes; 0 uses this process only. The number never changes results.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Run Python files that files or folders name, not only those you name.")
]
Seed = Annotated[int, typer.Option(help="Every random draw comes from this seed.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]


def with_options(
    command: Callable[..., None], settings: str, out: str = "Folder for the results of the run."
) -> Callable[..., None]:
    """Return the command with an option for each field of a settings class, in addition to its own options.

    Args:
        command: takes the fields as keyword arguments, None if an option is not given.
        settings: the class, as ``module:Class``.
        out: the help text of --out.
    """
    optional = inspect.signature(command).parameters["out"].default is None
    own = {
        "out": Annotated[Path | None if optional else Path, typer.Option(help=out + NEW if optional else out)],
        "config": Annotated[Path | None, typer.Option(help="TOML file with the same settings; options override it.")],
        "resume": Annotated[bool, typer.Option("--resume", help="Continue the run in OUT, with its settings.")],
        "trust_code": TrustCode,
        "workers": Workers,
        "data_root": DataRoot,
        "as_json": Json,
        "fail_on": FailOn,
        "yes": Annotated[bool, typer.Option("--yes", "-y", help="Begin without asking, however long it takes.")],
        "only_estimate": Annotated[
            bool, typer.Option("--estimate", help="Only estimate how long it takes on this machine, and run nothing.")
        ],
    }
    parameters = [
        parameter.replace(annotation=own[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name in own
    ]
    parameters += map(_option, fields_of(settings))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def fields_of(settings: str) -> list[Field]:
    """Return the fields of a settings class ``module:Class``; its module is imported only if its source is unclear."""
    module, _, name = settings.partition(":")
    try:
        return ClassSource(module, name).fields()
    except Unclear:
        fields = dataclasses.fields(getattr(import_module(module), name))
        return [Field(field.name, field.default, field.metadata["help"]) for field in fields]


def _option(field: Field) -> inspect.Parameter:
    """Return the option of one field."""
    option, flag = f"--{field.name.replace('_', '-')}", isinstance(field.default, bool)
    kind: Any = bool if flag else str
    declared = typer.Option(
        f"{option}/--no-{option[2:]}" if flag else option,
        help=f"{field.help} (default: {_default(field.default)})",
        metavar=None if flag else _metavar(field.default),
        autocompletion=completion_of(field.name),
    )
    annotation = Annotated[kind | None, declared]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(value: object) -> str:
    """Return the kind of value that an option takes, by its default."""
    return {int: "INTEGER", float: "NUMBER", tuple: "LIST"}.get(type(value), "TEXT")


def _default(value: object) -> object:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value == "" else value
