"""Small drawings in the pages, as SVG inside the page: they need no file, and take the reader's colours."""

from collections.abc import Sequence
from html import escape


def bars(lines: Sequence[tuple[str, float]], title: str) -> str:
    """Return horizontal bars, one per line, as one line of SVG that is labelled for people who can't see it.

    Example:
        >>> bars([("blind", 13.0), ("gs", 26.0)], "dB").count("<rect")
        2
    """
    most = max(value for _, value in lines)
    told = "; ".join(f"{name} {value:.1f}" for name, value in lines)
    parts = [
        f'<svg class="bars" viewBox="0 0 560 {30 * len(lines)}" role="img" '
        f'aria-label="{escape(title)}: {escape(told)}"><title>{escape(title)}</title>'
    ]
    for place, (name, value) in enumerate(lines):
        top, width = 30 * place, 330 * value / most
        parts.append(
            f'<text x="0" y="{top + 19}">{escape(name)}</text>'
            f'<rect x="170" y="{top + 5}" width="{width:.0f}" height="19" rx="2"/>'
            f'<text x="{178 + width:.0f}" y="{top + 19}">{value:.1f}</text>'
        )
    return "".join([*parts, "</svg>"])
