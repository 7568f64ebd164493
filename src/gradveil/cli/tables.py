"""The tables that `gradveil audit` prints: the columns that matter most, within 100 characters.

All other columns are in rows.csv, in summary.csv and on the page.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gradveil.catalogue import catalogue
from gradveil.metrics.columns import STANDARD
from gradveil.registry import parse_spec
from gradveil.report.flags import MARK
from gradveil.report.names import SPECS, for_people
from gradveil.report.summary import seeks_pictures
from gradveil.rows import Column, Schema

WIDTH = 100
"""Characters per line, unless a terminal is narrower."""
MOST = 8
"""Columns of a table at most."""
LONGEST = 14
"""Characters of a head's word at most before it folds."""
SUMMARY_SHOWN = (
    "defence", "attack", "adaptive", "recognisable", "psnr", "identified", "guessed", "label_accuracy", "not_converged",
    "accuracy",
)  # fmt: skip
"""Columns of the table of attacks on updates, unless empty.

`guessed` is there only if some images have no guess, and `label_accuracy` only if an attack looks for labels."""
MEMBERS_SHOWN = ("defence", "attack", "auc", "auc_worst", "tpr_at_1_fpr", "auc_loss", "gap", "accuracy")
"""Columns of the table of attacks on membership; if some attacker knew the defence, `adaptive` replaces `auc_worst`."""


def audit_table(title: str, lines: Sequence[Mapping[str, Any]], schema: Schema) -> Table:
    """Return what leaked under each defence and attack, and the accuracy under the defence in the same line.

    Metrics beside the standard ones come before the PSNR, the user's own first. The training's epsilon comes last. Both
    are there only if there is room. A flagged line has a mark; `gradveil.report.flags.explained` says why.

    Args:
        title: what was audited.
        lines: the summary with the costs of each defence (`gradveil.report.summary.with_costs`).
        schema: the columns of the audit.
    """
    columns = {column.key: column for column in schema.of("summary", "price")}
    columns |= {column.key: column for column in schema.metrics}  # the PSNR without its interval
    return _table(title, lines, [columns[key] for key in _chosen(lines, schema)])


def _chosen(lines: Sequence[Mapping[str, Any]], schema: Schema) -> list[str]:
    """Return the columns to show: those that some line has a value for, as far as there is room."""
    done = [line for line in lines if line["n"]] or lines  # lines whose attacks all failed count nothing
    filled = {key for line in done for key, value in line.items() if value is not None}
    pictures = [line for line in lines if seeks_pictures(line)]
    partly = any(line["guessed"] is not None and line["guessed"] < 1 for line in pictures)
    hidden = {"guessed": not partly, "label_accuracy": len(pictures) == len(lines)}
    shown = [key for key in SUMMARY_SHOWN if (key in filled or key in SPECS) and not hidden.get(key)]
    ours = {name.replace("-", "_") for name in catalogue("metrics").entries}
    more = [metric.key for metric in schema.metrics if metric.key in filled and metric.key not in STANDARD]
    more = sorted(more, key=ours.__contains__)  # the user's own first
    budget = ["epsilon_training"] * ("epsilon_training" in filled)
    if "identified" in shown and len(shown) + len(more) + len(budget) > MOST:
        shown.remove("identified")  # the only column that gives way
    place = max(shown.index(key) for key in ("attack", "adaptive", "recognisable") if key in shown) + 1
    shown[place:place] = more[: MOST - len(shown)]
    return shown + budget[: MOST - len(shown)]


def canary_sentence(costs: Sequence[Mapping[str, Any]], schema: Schema) -> str:
    """Return what canaries measured under each defence, beside what it states, or "" if there were none.

    Example:
        >>> from gradveil.metrics import schema_of
        >>> line = {"defence": "dp-sgd", "epsilon": 12.1, "epsilon_hat": 5.5}
        >>> line |= {"epsilon_hat_low": 4, "epsilon_hat_high": 7}
        >>> canary_sentence([line], schema_of())
        'ε by canaries [99 %]: dp-sgd 5.5 [4, 7], stated 12.1.'
    """
    column = schema.column("costs", "epsilon_hat")
    told = [
        f"{line['defence']} {column.text(line)}"
        + (", nothing stated" if line["epsilon"] is None else f", stated {line['epsilon']:.3g}")
        for line in costs
        if line["epsilon_hat"] is not None
    ]
    return f"{column.head}: {'; '.join(told)}." if told else ""


def membership_table(title: str, lines: Sequence[Mapping[str, Any]], schema: Schema) -> Table:
    """Return how well members are told from others under each defence; figures are means over rounds and seeds."""
    knowing = any(line["adaptive"] for line in lines)
    keys = ["adaptive" if key == "auc_worst" and knowing else key for key in MEMBERS_SHOWN]
    return _table(title, lines, [schema.column("members", key) for key in keys])


def _table(title: str, lines: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> Table:
    """Return a table of `WIDTH` characters: figures are as wide as they need, specs share the rest and fold."""
    lines = for_people(lines)
    names = Counter(parse_spec(attack)[0] for attack in {line["attack"] for line in lines})
    marked = next((c.key for key in ("recognisable", "psnr", "adaptive") for c in columns if c.key == key), "")
    cells = {c.key: [_cell(c, line, names, c.key == marked) for line in lines] for c in columns}
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
    """Break a spec into lines, between its settings if possible; a setting that is too long behind = and _.

    Example:
        >>> _folded("prune:fraction=0.9+dcs2", 14).splitlines()
        ['prune:', 'fraction=0.9+', 'dcs2']
        >>> _folded("quantise:where=gradient+", 14).splitlines()
        ['quantise:', 'where=', 'gradient+']
    """
    lines = [""]
    pieces = re.split(r"(?<=[:,+/])", text)
    for piece in (part for p in pieces for part in (re.split(r"(?<=[=_])", p) if len(p) > width else [p])):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _cell(column: Column, line: Mapping[str, Any], names: Mapping[str, int], marked: bool) -> str:
    if column.key == "attack" and names[name := parse_spec(line["attack"])[0]] == 1:
        return name  # without its settings, if no other attack has that name
    if marked and line.get("failed") and not line["n"]:
        return "failed"
    mark = f" {MARK}" * (marked and bool(line.get("flags")))
    return (column.text(line, short=True) or "-") + mark
