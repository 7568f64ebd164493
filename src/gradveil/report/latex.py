"""The summary of an audit as a table for papers, in LaTeX with booktabs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.report.tables import NOTHING, shown
from gradveil.rows import Schema

COLUMNS = (
    "defence", "attack", "adaptive", "recognisable", "psnr", "psnr_worst", "ssim", "identified", "accuracy",
    "epsilon_training",
)  # fmt: skip
"""The columns of a paper's table, as far as the audit has them."""
SIGNS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "ε": r"$\varepsilon$", "μ": r"$\mu$", "δ": r"$\delta$",
    "×": r"$\times$", "–": "--", "≥": r"$\ge$",
}  # fmt: skip


def to_latex(lines: Sequence[Mapping[str, Any]], schema: Schema, caption: str) -> str:
    """Return the lines as a table. The defence is named once per group of lines."""
    every = {column.key: column for column in schema.used(lines, "summary", "price")}
    columns = [
        every[key] for key in COLUMNS if key in every and any(line.get(key) not in (None, "", []) for line in lines)
    ]
    body, before = [], None
    for line in lines:
        cells = [escaped(shown(column, line)) for column in columns]
        if cells and cells[0] == before:
            cells[0] = ""
        else:
            before = cells[0] if cells else None
        body.append(" & ".join(cells) + r" \\")
    sides = "".join("l" if column.is_text else "r" for column in columns)
    head = " & ".join(escaped(column.head) for column in columns) + r" \\"
    return "\n".join(
        [
            r"% Needs \usepackage{booktabs}. Written by gradveil from rows.jsonl.",
            r"\begin{table}", r"\centering", rf"\caption{{{escaped(caption)}}}", rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
        ]
    )  # fmt: skip


def escaped(text: str) -> str:
    r"""Return a text as LaTeX prints it.

    Example:
        >>> escaped("50 % of a_b")
        '50 \\% of a\\_b'
    """
    text = re.sub(r"[\x00-\x1f\x7f]", " ", text.replace("\n", " "))
    return "".join(SIGNS.get(sign, sign) for sign in (text if text != NOTHING else "–"))
