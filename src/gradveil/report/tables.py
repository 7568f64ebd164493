"""The page's tables: the summary as HTML, and all rows as columns of JSON that the page draws piece by piece."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gradveil.report.headline import percent
from gradveil.report.markup import spec

NOTHING = "–"


@dataclass(frozen=True)
class Heading:
    """A column: the key of its figure, what stands above it, an explanation, and how a figure is written."""

    key: str
    head: str
    title: str
    text: Callable[[Any, Mapping[str, Any]], str]
    is_text: bool = False


def _fixed(digits: int) -> Callable[[Any, Mapping[str, Any]], str]:
    return lambda value, _: f"{value:,.{digits}f}"


def _words(value: object, _: object) -> str:
    return str(value)


def _percent(value: float, _: object) -> str:
    return percent(value)


def _interval(value: float, line: Mapping[str, Any]) -> str:
    """Mean with its interval, which one seed does not have."""
    if line["psnr_low"] is None:
        return f"{value:.2f} (1 seed)"
    return f"{value:.2f} [{line['psnr_low']:.2f}, {line['psnr_high']:.2f}]"


def _of_all(value: int, line: Mapping[str, Any]) -> str:
    return f"{value} of {line['n']}"


def _budget(value: float, line: Mapping[str, Any]) -> str:
    return _at(value, line["delta"])


def _budget_of_training(value: float, line: Mapping[str, Any]) -> str:
    return _at(value, line["delta_training"])


def _at(epsilon: float, delta: float | None) -> str:
    return f"{epsilon:.3g}" if delta is None else f"{epsilon:.3g} at δ = {delta:.3g}"


SUMMARY = (
    Heading("defence", "Defence", "", _words, True),
    Heading("attack", "Attack", "", _words, True),
    Heading("adaptive", "Knows defence", "Whether the attacker knows the defence", lambda v, _: adaptive(v), True),
    Heading("n", "n", "Attacked targets, over all seeds", _fixed(0)),
    Heading("recognisable", "Recognisable", "SSIM to the truth of at least 0.5; no guess counts as 0", _of_all),
    Heading("psnr", "PSNR, dB [95 %]", "Mean of the seeds' means, with its t interval over seeds", _interval),
    Heading("psnr_worst", "Worst PSNR", "Worst case: the largest PSNR of all targets and seeds", _fixed(2)),
    Heading("ssim", "SSIM", "Mean; 1 is the truth itself", _fixed(3)),
    Heading("lpips", "LPIPS", "Mean; 0 is the truth itself", _fixed(3)),
    Heading("guessed", "Guessed", "Share of the images that there is a guess for; figures are of these", _percent),
    Heading("label_accuracy", "Labels", "Share of the labels that were recovered, where any was guessed", _percent),
    Heading("not_converged", "Attack did not converge", "Targets on which the attack did not converge", _of_all),
    Heading("epsilon", "ε of the update", "Privacy budget of the one update that was attacked", _budget),
    Heading("certificate", "Certified distance", "First order, for attackers of the protected layer alone", _fixed(2)),
    Heading("knows", "Attacker knew", "", lambda v, _: ", ".join(v) or "the update only", True),
    Heading("epsilon_training", "ε of the training", "Privacy budget of the whole training", _budget_of_training),
    Heading("accuracy", "Accuracy", "Test accuracy after training with the defence, mean over seeds", _percent),
    Heading("accuracy_sensitive", "Sensitive accuracy", "Accuracy on the sensitive images", _percent),
    Heading("round_seconds", "s / round", "Seconds of a round", _fixed(2)),
    Heading("overhead", "Overhead", "Time of a round, as a multiple of the undefended one", lambda v, _: f"{v:.2f}×"),
    Heading("seconds", "s / target", "Seconds that the attack took for a target", _fixed(2)),
)


def with_costs(summary: Iterable[Mapping[str, Any]], costs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the summary, each with what its defence costs; defences that were not attacked have a line too."""
    by_name = {cost["defence"]: cost for cost in costs}
    keys = ("accuracy", "accuracy_sensitive", "round_seconds", "overhead")
    lines = []
    for line in summary:
        cost = by_name.get(line["defence"], {})
        budget = {"epsilon_training": cost.get("epsilon"), "delta_training": cost.get("delta")}
        lines.append({**line, **budget, **{key: cost.get(key) for key in keys}})
    return lines


def summary_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The summary; every cell carries the value that it is sorted by."""
    head = "".join(_th(heading.head, heading.title, heading.is_text) for heading in SUMMARY)
    body = "".join(_tr(line) for line in lines)
    return f'<table id="summary"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _th(head: str, title: str, is_text: bool) -> str:
    kind = "text" if is_text else "number"
    hint = f' title="{escape(title)}"' if title else ""
    return f'<th scope="col" class="{kind}" aria-sort="none"><button type="button"{hint}>{escape(head)}</button></th>'


def _tr(line: Mapping[str, Any]) -> str:
    facets = f'data-defence="{escape(line["defence"])}" data-attack="{escape(line["attack"])}"'
    cells = "".join(_td(heading, line) for heading in SUMMARY)
    return f'<tr {facets} data-adaptive="{adaptive(line["adaptive"])}">{cells}</tr>'


def _td(heading: Heading, line: Mapping[str, Any]) -> str:
    value = line[heading.key]
    shown = NOTHING if value is None else heading.text(value, line)
    if heading.key == "n" and line.get("failed"):
        shown += f" (+{line['failed']} failed)"
    sort = "" if heading.is_text or value is None else f' data-v="{value:.10g}"'
    tag = 'th scope="row"' if heading.key == "defence" else "td"
    content = spec(shown) if heading.key in ("defence", "attack") else escape(shown)
    return f'<{tag} class="{"text" if heading.is_text else "number"}"{sort}>{content}</{tag.split()[0]}>'


def adaptive(knows: bool) -> str:
    """The word for whether an attacker knows the defence."""
    return "adaptive" if knows else "plain"


ROWS = (
    ("kind", "Kind", "text"),
    ("defence", "Defence", "text"),
    ("attack", "Attack", "text"),
    ("adaptive", "Knows defence", "text"),
    ("seed", "Seed", "0"),
    ("target", "Target", "0"),
    ("psnr", "PSNR, dB", "2"),
    ("ssim", "SSIM", "3"),
    ("lpips", "LPIPS", "3"),
    ("mse", "MSE", "5"),
    ("label_accuracy", "Labels", "%"),
    ("guessed", "Guessed", "%"),
    ("converged", "Converged", "text"),
    ("attacker_loss", "Attacker's loss", "g"),
    ("accuracy", "Accuracy", "%"),
    ("accuracy_sensitive", "Sensitive accuracy", "%"),
    ("round_seconds", "s / round", "2"),
    ("overhead", "Overhead", "2"),
    ("epsilon", "ε", "g"),
    ("certificate", "Certified distance", "g"),
    ("delta", "δ", "g"),
    ("tripwire", "Tripwire", "text"),
    ("seconds", "Seconds", "2"),
    ("countermove", "Countermove", "text"),
    ("knows", "Attacker knew", "text"),
    ("why", "Note", "text"),
)


MEMBERSHIP_ROWS = (
    ("round", "Round", "0"),
    ("client", "Client", "0"),
    ("auc", "AUC", "3"),
    ("tpr_at_1_fpr", "TPR at 1 % FPR", "%"),
    ("advantage", "Advantage", "3"),
    ("auc_loss", "AUC, loss", "3"),
    ("auc_confidence", "AUC, confidence", "3"),
    ("members", "Members", "0"),
    ("non_members", "Others", "0"),
    ("queries", "Queries", "0"),
    ("accuracy_members", "Accuracy, members", "%"),
    ("accuracy_non_members", "Accuracy, others", "%"),
)
"""The columns that rows about membership add."""


def rows_columns(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All rows, column by column; texts are numbered, for they repeat."""
    columns = []
    more = MEMBERSHIP_ROWS if any(row["kind"] == "membership" for row in rows) else ()
    for key, head, kind in (*ROWS[:-3], *more, *ROWS[-3:]):
        column: dict[str, Any] = {"key": key, "head": head, "kind": kind}
        cells = [_raw(key, row) for row in rows]
        if kind == "text":
            texts = {text: number for number, text in enumerate(dict.fromkeys(cells))}
            column |= {"texts": list(texts), "cells": [texts[cell] for cell in cells]}
        else:
            column["cells"] = [float(f"{cell:.6g}") if isinstance(cell, float) else cell for cell in cells]
        columns.append(column)
    return columns


def _raw(key: str, row: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a text, a number or nothing
    value = row[key]
    if row["kind"] == "utility" and key in ("adaptive", "target", "converged", "knows", "attack"):
        return None if key == "target" else ""
    if (row["kind"] == "membership" and key == "target") or (
        row["kind"] != "membership" and key in ("round", "client")
    ):
        return None
    if key == "adaptive":
        return adaptive(value)
    if key == "converged":
        return "" if value is None else "yes" if value else "no"
    if key == "why":
        return f"failed: {value}" if row["failed"] else value
    if key == "tripwire":
        return "" if value is None else ", ".join(value) or "nothing found"
    return ", ".join(value) if key == "knows" else value
