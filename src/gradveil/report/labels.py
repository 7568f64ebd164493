"""Place the names of points so that they hide as little as possible."""

from collections.abc import Sequence
from itertools import pairwise

Place = tuple[float, float]
Box = tuple[float, float, float, float]

LETTER, TALL = 7.2, 14.0
"""Width and height of a letter in pixels, rounded up."""


def spread(
    names: Sequence[str], points: Sequence[Place], strokes: Sequence[Sequence[Place]], inside: Box
) -> list[Place]:
    """Return the left end of each name's base line, chosen greedily from places around its point.

    Args:
        names: one per point.
        points: positions in pixels, y downwards.
        strokes: marks and the corners of lines that names should not cover.
        inside: left, top, right and bottom of the drawing area.

    Example:
        >>> spread(["a", "b"], [(50, 50), (50, 52)], [[(50, 50)], [(50, 52)]], (0, 0, 100, 100))
        [(62.0, 54), (30.8, 56)]
    """
    dots = [dot for stroke in strokes for dot in _dotted(stroke)]
    taken: list[Box] = []
    for name, (x, y) in zip(names, points, strict=True):
        wide = LETTER * len(name)
        offsets = [(dx, dy) for dy in (4, -13, 21, -30, 38, -47, 55) for dx in (12.0, -12.0 - wide, -wide / 2)]
        boxes = [(x + dx, y + dy - TALL + 3, x + dx + wide, y + dy + 3) for dx, dy in offsets]
        taken.append(min(boxes, key=lambda box, y=y: _cost(box, y, dots, taken, inside)))  # type: ignore[misc]
    return [(box[0], box[3] - 3) for box in taken]


def _dotted(stroke: Sequence[Place]) -> list[Place]:
    """Return the corners of a line, and dots between them, so close that no name fits between two."""
    dots = list(stroke[:1])
    for (x1, y1), (x2, y2) in pairwise(stroke):
        count = max(1, round(max(abs(x2 - x1), abs(y2 - y1)) / 8))
        dots += [(x1 + (x2 - x1) * n / count, y1 + (y2 - y1) * n / count) for n in range(1, count + 1)]
    return dots


def _cost(box: Box, y: float, dots: Sequence[Place], taken: Sequence[Box], inside: Box) -> float:
    """Return how bad a place is: outside, over marks and lines, over other names, or far away."""
    outside = sum(max(0.0, inside[k] - box[k]) + max(0.0, box[k + 2] - inside[k + 2]) for k in (0, 1))
    hit = sum(box[0] - 5 < dx < box[2] + 5 and box[1] - 4 < dy < box[3] + 4 for dx, dy in dots)
    return 3 * outside + 20 * hit + sum(_overlap(box, other) for other in taken) + 0.5 * abs(box[3] - 7 - y)


def _overlap(one: Box, other: Box) -> float:
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across * down if across > 0 and down > 0 else 0.0
