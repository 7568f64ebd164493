"""Formulas: from docstrings to Markdown, and from Markdown's HTML to MathML, which browsers draw without a script."""

import html
import re
import textwrap

from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math::(.*)\n((?:\1 +.*\n|\n)*)", re.MULTILINE)
DRAWN = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\(|\\\[)\s*(.*?)\s*(?:\\\)|\\\])</\1>',
    re.DOTALL,
)


def markdown(doc: str) -> str:
    r"""Return a docstring's reStructuredText roles and formulas as Markdown.

    Example:
        >>> markdown("Scale by :math:`\\mu`, see ``clip``.")
        'Scale by $\\mu$, see `clip`.'
    """

    def block(found: re.Match[str]) -> str:
        body = textwrap.dedent(found[3]).strip() if found[3].strip() else found[2]
        return f"\n{found[1]}$$\n{textwrap.indent(body.strip(), found[1])}\n{found[1]}$$\n\n"

    doc = BLOCK.sub(block, doc + "\n").rstrip("\n")
    doc = re.sub(r":math:`([^`]*)`", r"$\1$", doc)
    return re.sub(r"``([^`]+)``", r"`\1`", re.sub(r"::$", ":", doc, flags=re.MULTILINE))


def mathml(page: str) -> str:
    """Return a page's HTML with every formula as MathML."""

    def drawn(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return convert(html.unescape(found[2]), display=display)

    return DRAWN.sub(drawn, page)
