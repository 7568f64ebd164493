"""Figures and tables as files for papers and other programs. The same content gives the same bytes."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gradveil.errors import printable
from gradveil.rows import Schema
from gradveil.storage import write_atomic

FORMULAS = ("=", "+", "-", "@", "\t")
"""How cells begin that spreadsheets run as formulas."""


def drawn(figure: Figure, kind: str) -> bytes:
    """Return a figure as png or svg, without a date."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "gradveil"}):  # else the names inside an svg are random
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's ending, png or svg; return the path."""
    write_atomic(path, drawn(figure, path.suffix[1:]))
    return path


def table_csv(lines: Sequence[Mapping[str, Any]], schema: Schema, *tables: str) -> bytes:
    """Return rows or lines as CSV with the columns of tables, without those of metrics that were not asked for."""
    keys = [column.key for column in schema.used(lines, *tables)]
    left_out = set(schema.keys(*tables)) - {*keys}
    return to_csv([{key: line[key] for key in line if key not in left_out} for line in lines], keys)


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """Return rows as CSV with these columns. Lists are joined by +, missing values are empty.

    A text that a spreadsheet would take for a formula (it begins with = + - @ or a tab) gets an apostrophe in front,
    unless it is a number. Control characters, returns included, are escaped.

    Raises:
        ValueError: a row has a key that is no column.

    Example:
        >>> print(to_csv([{"a": 1, "b": ["x", "y"]}, {"b": {"x": 0.5, "y": 2}}], ["a", "b"]).decode(), end="")
        a,b
        1,x+y
        ,x=0.5+y=2
        >>> print(to_csv([{"a": "=1+1", "b": -1}, {"a": "@x", "b": "-1"}], ["a", "b"]).decode(), end="")
        a,b
        '=1+1,-1
        '@x,-1
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_harmless(column) for column in columns])
    for row in rows:
        unknown = [key for key in row if key not in columns]
        if unknown:
            raise ValueError(f"A row must have columns of the table only, got {', '.join(map(repr, unknown))}.")
        writer.writerow([_harmless(_cell(row.get(column, ""))) for column in columns])
    return text.getvalue().encode("utf-8", "replace")


def _harmless(value: Any) -> Any:  # noqa: ANN401 - any value of a row
    """Return a value that no spreadsheet takes for a formula."""
    if not isinstance(value, str):
        return value
    value = printable(value)  # a return would begin a new row
    if not value.startswith(FORMULAS):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _cell(value: Any) -> Any:  # noqa: ANN401 - any value of a row
    if isinstance(value, Mapping):
        return "+".join(f"{name}={item}" for name, item in value.items() if item is not None)
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else value
