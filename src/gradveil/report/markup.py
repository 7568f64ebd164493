"""Pieces of HTML in which texts of the user are safe."""

import json
import re
from collections.abc import Sequence
from html import escape


def as_json(value: object) -> str:
    """JSON that can stand inside a script element whatever texts are in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def solid(text: str) -> str:
    """Escaped, with figures and their units kept on one line."""
    return escape(text).replace(" %", "&nbsp;%").replace(" of ", " of&nbsp;").replace(" dB", "&nbsp;dB")


def spec(text: str) -> str:
    """A component's spec, escaped, that may break into lines between its settings only.

    Example:
        >>> spec("a:x=1,y=<2>+b")
        'a:<wbr>x=1,<wbr>y=&lt;2&gt;+<wbr>b'
    """
    return "<wbr>".join(escape(piece) for piece in re.split(r"(?<=[:,+/])", text) if piece)


def bullets(items: Sequence[str], most: int = 20) -> str:
    """A list of texts, the first of them if there are many."""
    shown = "".join(f"<li>{escape(item)}</li>" for item in items[:most])
    rest = f"<li>and {len(items) - most} more</li>" if len(items) > most else ""
    return f"<ul>{shown}{rest}</ul>"


def section(name: str, title: str, content: str) -> str:
    """A landmark with a heading."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
