"""The commands about data sets: which exist, where their files are, and whether the files are complete."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.catalogue import catalogue
from gradveil.cli.display import DataRoot, Json, print_json, say, show
from gradveil.cli.lists import warn_of_broken

data_app = typer.Typer(no_args_is_help=True, help="List data sets, find their folder, and check their files.")


@data_app.command("list")
def list_data(root: DataRoot = None, as_json: Json = False) -> None:
    """List the named data sets and whether their files are present."""
    from rich.table import Table

    from gradveil.data import NamedSet, data_root
    from gradveil.registry import build

    place = data_root(root)
    rows = []
    warn_of_broken(["datasets"])
    for name, entry in catalogue("datasets").entries.items():
        files = build(NamedSet, name).expected(place)
        there = sum(file.path.exists() for file in files)
        state = "there" if there == len(files) else "partly there" if there else "missing"
        rows.append({"name": name, "state": state, "what": entry.doc.split("\n")[0]})
    if as_json:
        print_json({"root": str(place), "datasets": rows})
        return
    table = Table("name", "state", "what it is", title=f"data root: {place}", title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    show(table)


@data_app.command("path")
def data_path(root: DataRoot = None) -> None:
    """Print the folder that holds the data sets."""
    from gradveil.data import data_root

    say(str(data_root(root)))


@data_app.command("verify")
def verify_data(
    name: Annotated[
        str, typer.Argument(help="A named set, a .npz file or a folder of pictures. By default all named sets.")
    ] = "",
    root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Check the files of a data set against published checksums, or their structure if there are none.

    Exit code 2 if a file is corrupt, or if all files of the named set are missing.
    """
    from rich.table import Table

    from gradveil.data import NamedSet, data_root, load_dataset, verify
    from gradveil.registry import build, names

    place = data_root(root)
    if name and name not in names("datasets") and ("." in name or "/" in name):
        dataset = load_dataset(name, place)
        rows = [{"dataset": name, "file": name, "status": "ok", "detail": f"{len(dataset.train)} training images"}]
    else:
        rows = [
            {"dataset": n, "file": _below(finding.file, place), "status": finding.status, "detail": finding.detail}
            for n in ([name] if name else names("datasets"))
            for finding in verify(build(NamedSet, n), place)
        ]
    if as_json:
        print_json({"root": str(place), "files": rows})
    else:
        table = Table("data set", "file", "status", "detail", title=f"data root: {place}", title_justify="left")
        for row in rows:
            table.add_row(*row.values())
        show(table)
    states = {row["status"] for row in rows}
    if "corrupt" in states or (name and states == {"missing"}):
        raise typer.Exit(2)


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
