"""The plane of privacy and accuracy: one point per defence, the Pareto front, and its drawing as SVG."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

from gradveil.report.labels import spread
from gradveil.report.summary import price_unknown
from gradveil.rows import Column, Schema


def leak_columns(schema: Schema) -> list[Column]:
    """Return the metrics that the plane can show, PSNR first."""
    return sorted((column for column in schema.metrics if column.shown), key=lambda column: column.key != "psnr")


@dataclass(frozen=True)
class Point:
    """A defence: its accuracy, and its leak to the strongest attacker who does not know it and who knows it."""

    defence: str
    accuracy: float
    plain: float | None
    adaptive: float | None
    attack: str
    """The strongest attack of all."""

    def worst(self, metric: Column) -> float:
        """Return the larger leak of the two."""
        known = [leak for leak in (self.plain, self.adaptive) if leak is not None]
        return max(known) if metric.leakier else min(known)


def points(summary: Iterable[Mapping[str, Any]], utilities: Iterable[Mapping[str, Any]], metric: Column) -> list[Point]:
    """Return the points of all defences that have both an accuracy and a leak; none if the price is not known."""
    key, sign = metric.key, 1 if metric.leakier else -1
    utilities = list(utilities)
    lines = [line for line in summary if line[key] is not None and not price_unknown(utilities)]
    found = []
    for cost in utilities:
        own = sorted((line for line in lines if line["defence"] == cost["defence"]), key=lambda x: -sign * x[key])
        if own and cost["accuracy"] is not None:
            plain, adaptive = (next((x[key] for x in own if x["adaptive"] is which), None) for which in (False, True))
            attack = own[0]["attack"] + (" (knows the defence)" if own[0]["adaptive"] else "")
            found.append(Point(cost["defence"], cost["accuracy"], plain, adaptive, attack))
    return found


def front(some: Sequence[Point], metric: Column) -> list[Point]:
    """Return the Pareto front of accuracy and leak to the strongest attacker, by rising accuracy.

    Example:
        >>> psnr = Column("psnr", "number", "PSNR, dB", leakier=True)
        >>> best = Point("a", 0.9, 10.0, None, ""), Point("b", 0.95, 12.0, 20.0, "")
        >>> [point.defence for point in front([*best, Point("c", 0.8, 15.0, None, "")], psnr)]
        ['a', 'b']
    """
    sign = 1 if metric.leakier else -1
    best: list[Point] = []
    for point in sorted(some, key=lambda p: (-p.accuracy, sign * p.worst(metric))):
        if not best or sign * point.worst(metric) < sign * best[-1].worst(metric):
            best.append(point)
    return best[::-1]


def corners(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a staircase through places of rising accuracy: up first, then to the right.

    Example:
        >>> corners([(0, 9), (5, 4)])
        [(0, 9), (0, 4), (5, 4)]
    """
    stairs = list(places[:1])
    for x, y in places[1:]:
        stairs += [(stairs[-1][0], y), (x, y)]
    return stairs


def plane_svg(
    some: Sequence[Point], metric: Column, width: int = 860, height: int = 460, blind: float | None = None
) -> str:
    """Return the plane as an SVG element whose colours come from the page's style.

    ``blind`` is the leak of a blind guess, drawn as a line.
    """
    frame = _Frame.around(some, metric, width, height, blind)
    parts = [frame.axes(metric), frame.level(blind), _front(frame, front(some, metric), metric)]
    parts += [_point(frame, point, metric) for point in some]
    names = [shortened(point.defence, 34 if width > 500 else 24) for point in some]
    places = [frame.place(point.accuracy, point.worst(metric)) for point in some]
    stairs = corners([frame.place(point.accuracy, point.worst(metric)) for point in front(some, metric)])
    ends = [[frame.place(p.accuracy, leak) for leak in (p.plain, p.adaptive) if leak is not None] for p in some]
    for name, (x, y) in zip(
        names, spread(names, places, [*ends, stairs], (4, 22, width - 4, height - 56)), strict=True
    ):
        parts.append(f'<text class="name" x="{x:.1f}" y="{y:.1f}">{escape(name)}</text>')
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Accuracy and leak of each defence; '
        f'the table below says the same">{"".join(parts)}</svg>'
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that span a range.

    Example:
        >>> ticks(0.91, 0.97)
        [0.9, 0.92, 0.94, 0.96, 0.98]
    """
    if high - low < 1e-6:  # a single point needs room too
        room = max(0.05 * abs(low), 0.01)
        low, high = low - room, high + room
    raw = (high - low) / count
    unit: float = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw * 0.999)
    return [round(n * step, 10) for n in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """The axes of the drawing: accuracy to the right, leak upwards."""

    across: list[float]
    up: list[float]
    width: int
    height: int
    flipped: bool

    @staticmethod
    def around(some: Sequence[Point], metric: Column, width: int, height: int, blind: float | None) -> "_Frame":
        accuracies = [point.accuracy for point in some]
        leaks = [leak for point in some for leak in (point.plain, point.adaptive) if leak is not None]
        leaks += [] if blind is None else [blind]
        across = ticks(min(accuracies), max(accuracies), 6 if width > 500 else 3)
        return _Frame(across, ticks(min(leaks), max(leaks)), width, height, not metric.leakier)

    def place(self, accuracy: float, leak: float) -> tuple[float, float]:
        x = (accuracy - self.across[0]) / (self.across[-1] - self.across[0])
        y = (leak - self.up[0]) / (self.up[-1] - self.up[0])
        return 56 + x * (self.width - 84), 34 + (y if self.flipped else 1 - y) * (self.height - 88)

    def level(self, blind: float | None) -> str:
        """Return the line of the blind guess, or "" if it was not measured."""
        if blind is None:
            return ""
        right, y = self.width - 28, self.place(self.across[0], blind)[1]
        line = f'<line class="blind" x1="56" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"><title>{blind:.3g}</title></line>'
        return f'{line}<text class="blind" x="{right}" y="{y - 5:.1f}" text-anchor="end">blind guess</text>'

    def axes(self, metric: Column) -> str:
        right, bottom = self.width - 28, self.height - 54
        parts = []
        for leak in self.up:
            y = self.place(self.across[0], leak)[1]
            parts.append(f'<line class="grid" x1="56" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="48" y="{y + 4:.1f}" text-anchor="end">{leak:g}</text>')
        for accuracy in self.across:
            x = self.place(accuracy, self.up[0])[0]
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="34" y2="{bottom}"/>')
            text = f"{round(100 * accuracy, 6):g} %"
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
        parts.append(f'<text class="axis" x="56" y="16">↑ leak: {escape(metric.head)}, strongest attack</text>')
        parts.append(f'<text class="axis" x="{right}" y="{self.height - 8}" text-anchor="end">test accuracy →</text>')
        return "".join(parts)


def _front(frame: _Frame, best: Sequence[Point], metric: Column) -> str:
    """Return the Pareto front as a staircase: every point above or left of it is beaten by a defence on it."""
    if not best:
        return ""
    places = [frame.place(point.accuracy, point.worst(metric)) for point in best]
    path = f"M56,{places[0][1]:.1f}" + "".join(f"L{x:.1f},{y:.1f}" for x, y in corners(places)) + "V34"
    return f'<path class="front" d="{path}"><title>Pareto front: {len(best)} defences</title></path>'


def _point(frame: _Frame, point: Point, metric: Column) -> str:
    both = [(kind, leak) for kind, leak in (("plain", point.plain), ("adaptive", point.adaptive)) if leak is not None]
    places = [(kind, *frame.place(point.accuracy, leak)) for kind, leak in both]
    title = f"{point.defence}\naccuracy {100 * point.accuracy:.1f} %"
    title += "".join(f"\n{metric.head}, {kind}: {leak:.3g}" for kind, leak in both)
    title += f"\nstrongest attack: {point.attack}"
    joined = ""
    if len(places) == 2:
        (_, x1, y1), (_, x2, y2) = places
        joined = f'<line class="joined" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    circles = "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>' for kind, x, y in places)
    undefended = " undefended" if point.defence == "none" else ""
    return f'<g class="point{undefended}"><title>{escape(title)}</title>{joined}{circles}</g>'


def shortened(text: str, most: int) -> str:
    """Return a text, with its middle left out if it is too long.

    Example:
        >>> shortened("prune:fraction=0.7+gaussian:std=0.1", 20)
        'prune:fra…an:std=0.1'
    """
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most - 1 - (most - 1) // 2) :]}"
