"""Pieces of HTML in which the user's texts are escaped."""

import json
import re
from collections.abc import Sequence
from html import escape


def as_json(value: object) -> str:
    """Return JSON that is safe inside a script element, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def solid(text: str) -> str:
    """Return the text escaped, with figures and their units kept on one line."""
    return escape(text).replace(" %", "&nbsp;%").replace(" of ", " of&nbsp;").replace(" dB", "&nbsp;dB")


def spec(text: str) -> str:
    """Return a component's spec escaped, with line breaks allowed between its settings only.

    Example:
        >>> spec("a:x=1,y=<2>+b")
        'a:<wbr>x=1,<wbr>y=&lt;2&gt;+<wbr>b'
    """
    return "<wbr>".join(escape(piece) for piece in re.split(r"(?<=[:,+/])", text) if piece)


def bullets(items: Sequence[str], most: int = 20) -> str:
    """Return a list of texts, at most the first ``most``."""
    shown = "".join(f"<li>{escape(item)}</li>" for item in items[:most])
    rest = f"<li>and {len(items) - most} more</li>" if len(items) > most else ""
    return f"<ul>{shown}{rest}</ul>"


def section(name: str, title: str, content: str) -> str:
    """Return a section with a heading."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
