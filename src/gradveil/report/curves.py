"""Accuracy and loss by round, as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from gradveil.report.files import save_figure

_SERIES = {"accuracy": "test", "accuracy_sensitive": "sensitive (training images)", "accuracy_server": "server's own"}


def draw_curves(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write ``curves.png`` and ``curves.svg`` to ``out``; return the path of the first."""
    figure = curves(rows)
    for kind in ("svg", "png"):
        save_figure(figure, out / f"curves.{kind}")
    return out / "curves.png"


def curves(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the figure: accuracies in per cent on the left, the test loss on the right."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    marker = "o" if len(rows) < 30 else ""
    for key, label in _SERIES.items():
        points = [(row["round"], 100 * row[key]) for row in rows if row.get(key) is not None]
        if points:
            left.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=label)
    majority = next((row["accuracy_majority"] for row in rows if row.get("accuracy_majority") is not None), None)
    if majority is not None and left.lines:
        left.axhline(100 * majority, color="black", lw=0.8, ls=":", label="most frequent class alone")
    points = [(row["round"], row["loss"]) for row in rows if row.get("loss") is not None]
    if points:
        right.plot(*zip(*points, strict=True), marker=marker, markersize=3, color="tab:red")
    left.set(title="Accuracy (%)", xlabel="round", ylim=(0, 100))
    right.set(title="Test loss", xlabel="round")
    right.set_ylim(bottom=0)
    if left.lines:
        left.legend(loc="lower right", frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure
