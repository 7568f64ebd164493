"""The audit's figures for papers and slides: the plane, and the gallery in one picture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradveil.metrics.columns import build_metric, metric_column
from gradveil.registry import parse_spec
from gradveil.report.blind import blind_level
from gradveil.report.files import save_figure
from gradveil.report.labels import spread
from gradveil.report.plane import Point, corners, front, points, shortened, ticks
from gradveil.report.sheets import Gallery, Line, visible
from gradveil.report.summary import strongest

TARGETS = 8
"""Pictures in a row of the gallery's figure."""
PSNR = metric_column(build_metric("psnr"))
"""The leak that the plane's figure shows."""
_LEAK, _KEEP = "#b23a1e", "#1c6a66"


def draw_figures(
    gallery: Gallery, summary: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]], out: Path
) -> list[Path]:
    """Write ``plane.png``, ``plane.svg`` and ``gallery.png`` to ``out``, each if there is something to draw."""
    written = []
    if points(summary, costs, PSNR):
        written += [save_figure(plane(summary, costs), out / f"plane.{kind}") for kind in ("png", "svg")]
    if gallery.lines:
        written.append(save_figure(pictures(gallery, summary), out / "gallery.png"))
    return written


def plane(summary: Iterable[Mapping[str, Any]], costs: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw accuracy to the right and the strongest attack's mean PSNR upwards; hollow is plain, filled adaptive."""
    summary = list(summary)
    some, blind = points(summary, costs, PSNR), blind_level(summary, PSNR)
    figure = Figure(figsize=(7.6, 4.6))
    axes = figure.add_axes((0.085, 0.12, 0.89, 0.8))
    best = front(some, PSNR)
    axes.step([100 * p.accuracy for p in best], [p.worst(PSNR) for p in best], "--", color=_KEEP, lw=1.2, where="pre")
    leaks = [[leak for leak in (point.plain, point.adaptive) if leak is not None] for point in some]
    for point, both in zip(some, leaks, strict=True):
        colour = "black" if point.defence == "none" else _LEAK
        axes.plot([100 * point.accuracy] * len(both), both, color=colour, lw=1.2)
        for leak, face in ((point.plain, "white"), (point.adaptive, colour)):
            if leak is not None:
                axes.plot(100 * point.accuracy, leak, "o", ms=7, mec=colour, mfc=face, mew=1.5)
    accuracies, heights = [100 * point.accuracy for point in some], [leak for both in leaks for leak in both]
    if blind is not None:
        heights.append(blind)
        axes.axhline(blind, color="0.45", lw=1, ls=":")
    across, up = (ticks(min(values), max(values)) for values in (accuracies, heights))
    axes.set(xlim=(across[0], across[-1]), ylim=(up[0], up[-1]), xticks=across, yticks=up)
    axes.set(xlabel="test accuracy (%)", ylabel=f"leak: {PSNR.head}, strongest attack")
    marks = "hollow: plain; filled: attacker knows the defence; dashed: Pareto front"
    axes.set_title(marks + "; dotted: blind guess" * (blind is not None), fontsize=8, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _names(axes, some, leaks)
    return figure


def _names(axes: Axes, some: Sequence[Point], leaks: Sequence[Sequence[float]]) -> None:
    """Write the names beside their points, on a drawing of 118 dots per inch with letters of 8 points."""
    across, up = axes.get_xlim(), axes.get_ylim()

    def place(accuracy: float, leak: float) -> tuple[float, float]:
        return 798 * (100 * accuracy - across[0]) / (across[1] - across[0]), 434 * (up[1] - leak) / (up[1] - up[0])

    names = [shortened(point.defence, 40) for point in some]
    marks = [[place(point.accuracy, leak) for leak in both] for point, both in zip(some, leaks, strict=True)]
    places = [place(point.accuracy, point.worst(PSNR)) for point in some]
    stairs = corners([place(point.accuracy, point.worst(PSNR)) for point in front(some, PSNR)])
    for name, (x, y) in zip(names, spread(names, places, [*marks, stairs], (2, 2, 812, 432)), strict=True):
        axes.text(x / 798, 1 - y / 434, _plain(name), transform=axes.transAxes, fontsize=8)


def pictures(gallery: Gallery, summary: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the truth, and below it what the strongest attack gets, undefended and under each defence.

    A defence that draws images of its own has another row with these.
    """
    found = [line for line in (_strongest(gallery, summary, name) for name in _defences(gallery)) if line]
    lines = [each for line in found for each in ([_own_truth(line), line] if line.truth is not None else [line])]
    count = min(TARGETS, len(gallery.columns))
    height, width = visible(gallery.truth).shape[2:4]
    inch = 0.95
    size = (2.2 + inch * count * width / height, 0.2 + (inch + 0.18) * (len(lines) + 1))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(lines) + 1, count, squeeze=False)
    for column in range(count):
        _show(grid[0][column], visible(gallery.truth)[0, column], "")
        for row, line in enumerate(lines, 1):
            psnr = line.psnr[-1][column]
            caption = f"{psnr:.1f} dB" if psnr is not None else "no guess" if line.there[column] else "no image"
            is_truth = line.attack == TRUTH and line.there[column]
            shown = psnr is not None or is_truth
            _show(grid[row][column], visible(line.frames)[-1, column] if shown else None, "" if is_truth else caption)
    names = ["truth", *(_title(line) for line in lines)]
    for row, name in enumerate(names):
        grid[row][0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8, labelpad=8)
    return figure


TRUTH = "truth"
"""Stands for the attack in the row of a defence's own images."""


def _own_truth(line: Line) -> Line:
    """Return the images that a defence drew, as a line of pictures without figures."""
    frames = line.frames[-1:] if line.truth is None else line.truth
    return replace(line, attack=TRUTH, adaptive=False, frames=frames, psnr=[[None] * len(line.there)])


def _defences(gallery: Gallery) -> list[str]:
    return sorted(dict.fromkeys(line.defence for line in gallery.lines), key=lambda name: name != "none")


def _strongest(gallery: Gallery, summary: Sequence[Mapping[str, Any]], name: str) -> Line | None:
    """Return the line of the attack that recovers most under a defence, of the first seed that has it."""
    best = strongest(line for line in summary if line["defence"] == name)
    wanted = (best["attack"], best["adaptive"]) if best else None
    own = [line for line in gallery.lines if line.defence == name]
    return next((line for line in own if (line.attack, line.adaptive) == wanted), None)


def _title(line: Line) -> str:
    name = "undefended" if line.defence == "none" else _plain(shortened(line.defence, 30))
    return f"{name}\n{_plain(shortened(parse_spec(line.attack)[0], 30))}{', adaptive' if line.adaptive else ''}"


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def _show(axes: Any, image: Any, caption: str) -> None:  # noqa: ANN401 - matplotlib's and numpy's own
    if image is not None:
        axes.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(caption, fontsize=7, y=-0.2, color="#555")
