"""The picture of a recommendation: accuracy against what anybody can learn, one numbered point per candidate."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradveil.defences.parts.gaussian_dp import identification_bound

CHOSEN, TRIED, OPEN = "#1c6a66", "0.45", "#b23a1e"
NO_BOUND = 100.0
"""Where candidates without a guarantee stand, in per cent."""
SHOWN, LEAST = 5.0, 8.0
"""The axis of accuracy reaches down to this many times the largest loss, and to this many points at least."""


def draw(document: Mapping[str, Any]) -> Figure:
    """Return the figure of a recommendation; numbers are those of the table's lines."""
    figure = Figure(figsize=(8, 4.4))
    axes = figure.add_axes((0.09, 0.13, 0.88, 0.78))
    reference = 100 * document["reference"]
    axes.axhline(reference, color="black", lw=1, label="without protection")
    axes.axhline(reference - document["max_loss"], color="black", lw=1, ls=":", label="largest loss allowed")
    axes.axvline(100 * identification_bound(document["mu"]), color=CHOSEN, lw=1, ls=":", label="the wish")
    budgets = [(100 * identification_bound(one["mu"]), 100 * one["accuracy"]) for one in document["frontier"]]
    if len(budgets) > 1:
        axes.plot(*zip(*budgets, strict=True), "-s", color=CHOSEN, ms=4, lw=1, label="the best at other budgets")
    lowest = reference - max(SHOWN * document["max_loss"], LEAST)
    below = []
    for number, line in enumerate(document["lines"], 1):
        if line["accuracy"] is None:
            continue
        if 100 * line["accuracy"] < lowest:
            below.append(str(number))
        else:
            _point(axes, number, line, chosen=line["candidate"] == document["chosen"])
    if below:
        axes.text(0.99, 0.02, f"far below: {', '.join(below)}", transform=axes.transAxes, fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_xlim(0.09, 160)
    marks = (0.1, 1, 10, NO_BOUND)
    axes.set_xticks(marks, [f"{mark:g} %" for mark in marks[:-1]] + ["no bound"])
    axes.set(xlabel="largest chance to pick the true one among 1,000", ylabel="accuracy on held-out images (%)")
    axes.set_title("filled: full training; hollow: short training; red: no proof; numbers: lines of the table",
                   fontsize=8, loc="left")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="lower left")
    return figure


def _point(axes: Axes, number: int, line: Mapping[str, Any], *, chosen: bool) -> None:
    colour = CHOSEN if chosen else TRIED if line["proven"] else OPEN
    bound, height = line["identified_bound"], 100 * line["accuracy"]
    across = NO_BOUND if bound is None else max(100 * bound, 0.1)
    full = line["stage"] == "full"
    axes.plot(across, height, "o", ms=9 if chosen else 7, mec=colour, mfc=colour if full else "white", mew=1.3)
    side = 1 if full else -1  # full trainings are named on the right, short ones on the left
    axes.annotate(str(number), (across, height), (side * 9, -3), textcoords="offset points", fontsize=8,
                  ha="left" if full else "right", color=colour)  # fmt: skip
