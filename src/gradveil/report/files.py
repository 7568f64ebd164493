"""Figures and tables as files for papers and other programs; the same content gives the same bytes."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gradveil.storage import write_atomic


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's ending, png or svg, without a date; returns the path."""
    buffer, kind = io.BytesIO(), path.suffix[1:]
    with matplotlib.rc_context({"svg.hashsalt": "gradveil"}):  # else the names inside an svg are random
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    write_atomic(path, buffer.getvalue())
    return path


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """Rows as a table with these columns; lists are joined by +, and what is not there is empty.

    Example:
        >>> print(to_csv([{"a": 1, "b": ["x", "y"]}, {"b": None, "c": 3}], ["a", "b"]).decode(), end="")
        a,b
        1,x+y
        ,
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "+".join(value) if isinstance(value, list) else value for key, value in row.items()})
    return text.getvalue().encode("utf-8", "replace")
