"""How the command line shows results and progress."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from gradveil.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

DataRoot = Annotated[
    Path | None,
    typer.Option("--data-root", help="Folder of the data sets (default: GRADVEIL_DATA or the cache)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


EVERY = 30.0
"""Seconds between two lines about the progress if stderr is no terminal."""


def say(text: str, *, err: bool = False) -> None:
    """Print a line, without control characters that file names, labels or errors may hold."""
    typer.echo(printable(text), err=err)


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def show(table: "Table", width: int = 1000) -> None:
    """Print a table on stdout, as wide as the terminal, or at most ``width`` characters if stdout is not a terminal."""
    from rich.console import Console

    table.title = printable(str(table.title)) if table.title else table.title
    for column in table.columns:
        column.overflow = "fold"
        column._cells = [printable(cell) if isinstance(cell, str) else cell for cell in column._cells]
    Console(width=None if sys.stdout.isatty() else width, markup=False).print(table)


def figure(value: float | None, form: str = ".4g") -> str:
    """Return a number as text for a table, or a dash for None."""
    return "-" if value is None else format(value, form)


class Bar(Protocol):
    """Function that moves a progress bar."""

    def __call__(self, done: float, total: float, doing: str, figures: str = "") -> None:
        """Show the share done, what is being done, and figures so far; figures of "" keep those shown last."""


@contextmanager
def bar(unit: str) -> Iterator[Bar]:
    """Show a live progress bar on stderr, with the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    console, said = Console(stderr=True), time.monotonic()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("setting up", total=None, count="", figures="")

        def move(done: float, total: float, doing: str, figures: str = "") -> None:
            doing = printable(doing)
            fields: dict[str, Any] = {"figures": figures} if figures else {}
            count = f"{int(done)}/{int(total)} {unit}" if unit else f"{done / max(total, 1e-9):.0%}"
            progress.update(task, completed=done, total=total, description=doing, count=count, **fields)
            nonlocal said
            if not console.is_terminal and time.monotonic() - said > EVERY:  # a file gets lines, not a bar
                said = time.monotonic()
                typer.echo(f"{count} {doing} {figures}".rstrip(), err=True)

        yield move
