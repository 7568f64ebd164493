"""Figures and tables as files for papers and other programs; the same content gives the same bytes."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gradveil.storage import write_atomic


def drawn(figure: Figure, kind: str) -> bytes:
    """A figure as png or svg, without a date."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "gradveil"}):  # else the names inside an svg are random
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's ending, png or svg; returns the path."""
    write_atomic(path, drawn(figure, path.suffix[1:]))
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
        writer.writerow(
            {key: "+".join(map(str, value)) if isinstance(value, list) else value for key, value in row.items()}
        )
    return text.getvalue().encode("utf-8", "replace")
