"""The commands that look things up: list, describe, and data."""

import dataclasses
import inspect
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gradveil.cli.display import DataRoot, Json, print_json, show
from gradveil.data import NamedSet, data_root, load_dataset, verify
from gradveil.errors import UnknownNameError
from gradveil.registry import FOLDERS, build, components

data_app = typer.Typer(no_args_is_help=True, help="Data sets: what there is, where it lies, whether it is whole.")


def list_components(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(FOLDERS)}; all if left out.")] = "",
    as_json: Json = False,
) -> None:
    """List components by kind, each with what it does."""
    if kind and kind not in FOLDERS:
        raise UnknownNameError("kind", kind, FOLDERS)
    found = {k: {name: _first_line(cls) for name, cls in components(k).items()} for k in ([kind] if kind else FOLDERS)}
    if as_json:
        print_json(found)
        return
    for k, entries in found.items():
        table = Table("name", "what it does", title=k, title_justify="left")
        for name, text in entries.items():
            table.add_row(name, text)
        show(table)


def describe(name: Annotated[str, typer.Argument(help="Name of any component.")], as_json: Json = False) -> None:
    """Show a component's documentation and its settings with their defaults."""
    every = {n: (kind, cls) for kind in FOLDERS for n, cls in components(kind).items()}
    if name not in every:
        raise UnknownNameError("component", name, every)
    kind, cls = every[name]
    settings = {field.name: field.default for field in dataclasses.fields(cls) if field.init}
    if as_json:
        print_json({"name": name, "kind": kind, "doc": inspect.getdoc(cls), "settings": settings})
        return
    typer.echo(f"{name} ({kind.removesuffix('s')})\n\n{inspect.getdoc(cls)}\n")
    if settings:
        pairs = ", ".join(f"{key}={value}" for key, value in settings.items())
        typer.echo(f"Settings and defaults: {pairs}")


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


@data_app.command("list")
def list_data(root: DataRoot = None, as_json: Json = False) -> None:
    """List the named data sets and whether their files are there."""
    place = data_root(root)
    rows = []
    for name, cls in components("datasets").items():
        files = build(NamedSet, name).expected(place)
        there = sum(file.path.exists() for file in files)
        state = "there" if there == len(files) else "partly there" if there else "missing"
        rows.append({"name": name, "state": state, "what": _first_line(cls)})
    if as_json:
        print_json({"root": str(place), "datasets": rows})
        return
    table = Table("name", "state", "what it is", title=f"data root: {place}", title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    show(table)


@data_app.command("path")
def data_path(root: DataRoot = None) -> None:
    """Print the folder where data sets are looked for."""
    typer.echo(data_root(root))


@data_app.command("verify")
def verify_data(
    name: Annotated[str, typer.Argument(help="A named set, a .npz file or a folder; all named sets if left out.")] = "",
    root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Check the files of a data set: checksums where the authors publish them, structure elsewhere.

    Exit code 2 where a file is corrupt, or where nothing of the named set is there.
    """
    place = data_root(root)
    if name and name not in components("datasets") and ("." in name or "/" in name):
        dataset = load_dataset(name, place)
        rows = [{"dataset": name, "file": name, "status": "ok", "detail": f"{len(dataset.train)} training images"}]
    else:
        names = [name] if name else list(components("datasets"))
        rows = [
            {"dataset": n, "file": _below(finding.file, place), "status": finding.status, "detail": finding.detail}
            for n in names
            for finding in verify(build(NamedSet, n), place)
        ]
    if as_json:
        print_json({"root": str(place), "files": rows})
    else:
        table = Table("data set", "file", "status", "detail", title=f"data root: {place}", title_justify="left")
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row.values())
        show(table)
    states = {row["status"] for row in rows}
    if "corrupt" in states or (name and states == {"missing"}):
        raise typer.Exit(2)


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
