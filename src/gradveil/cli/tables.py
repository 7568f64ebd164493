"""The tables that `gradveil audit` prints: the columns that matter most, within 100 characters.

All other columns are in rows.csv, in summary.csv and on the page.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gradveil.registry import parse_spec
from gradveil.report.flags import MARK
from gradveil.rows import Column, Schema

WIDTH = 100
"""Characters per line, unless a terminal is narrower."""
MOST = 8
"""Columns of a table at most."""
LONGEST = 14
"""Characters of a head's word at most before it folds."""
SPECS = ("defence", "attack")
"""Columns that fold."""
SUMMARY_SHOWN = (
    "defence", "attack", "adaptive", "recognisable", "psnr", "identified", "guessed", "not_converged", "accuracy",
)  # fmt: skip
"""Columns of the table of attacks that rebuild images; `guessed` only if some images have no guess."""
MEMBERS_SHOWN = ("defence", "attack", "auc", "auc_worst", "tpr_at_1_fpr", "auc_loss", "gap", "accuracy")
"""Columns of the table of attacks on membership."""


def audit_table(title: str, lines: Sequence[Mapping[str, Any]], schema: Schema) -> Table:
    """Return what leaked under each defence and attack, and the accuracy under the defence in the same line.

    Metrics beside the standard ones come next to the PSNR, and the training's epsilon last, as far as there is room.
    A flagged line has a mark; `gradveil.report.flags.explained` says why.

    Args:
        title: what was audited.
        lines: the summary with the costs of each defence (`gradveil.report.summary.with_costs`).
        schema: the columns of the audit.
    """
    columns = {column.key: column for column in schema.of("summary", "price")}
    columns |= {column.key: column for column in schema.metrics}  # the PSNR without its interval
    partly = any(line["guessed"] is not None and line["guessed"] < 1 for line in lines)
    shown = [key for key in SUMMARY_SHOWN if key != "guessed" or partly]
    chosen = [metric.key for metric in schema.metrics[4:]]  # behind the standard ones
    budgeted = any(line["epsilon_training"] is not None for line in lines)
    if partly or chosen or budgeted or not any(line["identified"] is not None for line in lines):
        shown.remove("identified")  # the others have no room elsewhere
    if not any(line["psnr"] is not None for line in lines):
        shown.remove("psnr")
    place = shown.index("recognisable") + 1
    shown[place:place] = chosen[: MOST - len(shown)]
    if len(shown) < MOST and budgeted:
        shown.append("epsilon_training")
    return _table(title, lines, [columns[key] for key in shown])


def membership_table(title: str, lines: Sequence[Mapping[str, Any]], schema: Schema) -> Table:
    """Return how well members are told from others under each defence; figures are means over rounds and seeds."""
    return _table(title, lines, [schema.column("members", key) for key in MEMBERS_SHOWN])


def _table(title: str, lines: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Table:
    """Return a table of `WIDTH` characters: figures are as wide as they need, specs share the rest and fold."""
    names = Counter(parse_spec(attack)[0] for attack in {line["attack"] for line in lines})
    cells = {column.key: [_cell(column, line, names) for line in lines] for column in columns}
    heads = {c.key: min(LONGEST, max(map(len, c.head.split()))) for c in columns}
    widths = {key: max([heads[key], *map(len, texts)]) for key, texts in cells.items()}
    rest = WIDTH - 1 - 3 * len(columns) - sum(width for key, width in widths.items() if key not in SPECS)
    widths |= _shared(rest, {key: widths[key] for key in SPECS})
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.head, width=widths[column.key])
    for row in zip(*([_folded(text, widths[key]) for text in texts] for key, texts in cells.items()), strict=True):
        table.add_row(*row)
    return table


def _shared(room: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Share room among columns: each gets what it wants if that is at most its share, the others divide the rest.

    Example:
        >>> _shared(40, {"defence": 60, "attack": 8})
        {'attack': 8, 'defence': 32}
    """
    given: dict[str, int] = {}
    for count, key in zip(range(len(wanted), 0, -1), sorted(wanted, key=lambda key: wanted[key]), strict=True):
        given[key] = min(wanted[key], (room - sum(given.values())) // count)
    return given


def _folded(text: str, width: int) -> str:
    """Break a spec into lines, between its settings if possible.

    Example:
        >>> _folded("prune:fraction=0.9+dcs2", 14).splitlines()
        ['prune:', 'fraction=0.9+', 'dcs2']
    """
    lines = [""]
    for piece in re.split(r"(?<=[:,+/])", text):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _cell(column: Column, line: Mapping[str, Any], names: Mapping[str, int]) -> str:
    if column.key == "attack" and names[name := parse_spec(line["attack"])[0]] == 1:
        return name  # without its settings, if no other attack has that name
    mark = f" {MARK}" * (column.key == "recognisable" and bool(line.get("flags")))
    return (column.text(line, short=True) or "-") + mark
