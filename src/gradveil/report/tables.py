"""The page's tables: the summary as HTML, and all rows as columns of JSON that the page draws piece by piece."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gradveil.report.markup import spec
from gradveil.report.names import SPECS
from gradveil.report.summary import recovered
from gradveil.rows import KINDS, Column, Schema

NOTHING = "–"
CORE = frozenset(
    ("defence", "attack", "adaptive", "n", "recognisable", "psnr", "psnr_worst", "ssim", "identified",
     "not_converged", "accuracy", "epsilon_training", "kind", "seed", "target", "round", "converged")
)  # fmt: skip
"""Columns that a page shows at first; a box shows all."""


def shown(column: Column, line: Mapping[str, Any]) -> str:
    """Return a cell as text; a missing figure is a dash."""
    text = column.text(line) or ("" if column.is_text else NOTHING)
    if column.key == "n" and line.get("failed"):
        text += f" (+{line['failed']} failed)"
    if column.key == "knows" and not text:
        return "the update only"
    return text


def summary_table(lines: Sequence[Mapping[str, Any]], schema: Schema) -> str:
    """Return the summary as HTML; every cell of a figure carries the value that it is sorted by."""
    columns = page_columns(lines, schema, "summary", "price")
    head = "".join(_th(column) for column in columns)
    body = "".join(_tr(line, columns) for line in lines)
    return f'<table id="summary"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def page_columns(lines: Sequence[Mapping[str, Any]], schema: Schema, *tables: str) -> list[Column]:
    """Return the columns that a page shows: figures in the schema's order, then notes that some line has."""
    columns = [column for column in schema.used(lines, *tables) if column.shown]
    notes = [column for column in columns if column.format == "note"]
    used = {key for line in lines for key, value in line.items() if value not in (None, "")} | {"knows"}
    used -= set() if any(line.get("flags") for line in lines) else {"flags"}
    unused = {"epsilon_hat"} - used  # no canaries were played
    figures = [column for column in columns if column not in notes and column.key not in unused]
    return figures + [note for note in notes if note.key in used]


def _th(column: Column) -> str:
    kind = _class(column)
    hint = f' title="{escape(column.help)}"' if column.help else ""
    text = escape(column.head)
    return f'<th scope="col" class="{kind}" aria-sort="none"><button type="button"{hint}>{text}</button></th>'


def _tr(line: Mapping[str, Any], columns: Sequence[Column]) -> str:
    facets = f'data-defence="{escape(line["defence"])}" data-attack="{escape(line["attack"])}"'
    cells = "".join(_td(column, line) for column in columns)
    knowing = "" if line["adaptive"] is None else adaptive(line["adaptive"])
    return f'<tr {facets} data-adaptive="{knowing}">{cells}</tr>'


def _td(column: Column, line: Mapping[str, Any]) -> str:
    value, text = line[column.key], shown(column, line)
    sort = "" if column.is_text or value is None else f' data-v="{value:.10g}"'
    tag = 'th scope="row"' if column.key == "defence" else "td"
    content = spec(text) if column.key in SPECS else escape(text)
    head = f' data-head="{escape(column.head)}"'
    return f'<{tag} class="{_class(column)}"{sort}{head}>{content}</{tag.split()[0]}>'


def _class(column: Column) -> str:
    return f"{'text' if column.is_text else 'number'}{'' if column.key in CORE else ' more'}"


def adaptive(knows: bool) -> str:
    """Return the word for an attacker who knows the defence, or for one who does not."""
    return "adaptive" if knows else "plain"


def rows_columns(rows: Sequence[Mapping[str, Any]], schema: Schema) -> list[dict[str, Any]]:
    """Return all rows column by column, as the page's script reads them; texts are numbered because they repeat.

    Columns about membership are there only if rows about membership are.
    """
    kinds = [kind for kind in KINDS if kind != "membership" or any(row["kind"] == kind for row in rows)]
    own = {kind: set(schema.keys(kind)) for kind in kinds}
    columns = []
    for column in page_columns(rows, schema, *kinds):
        note = column.format == "note"
        kind = "text" if column.is_text else column.format
        entry: dict[str, Any] = {
            "key": column.key,
            "head": column.head,
            "kind": kind,
            "note": note,
            "more": column.key not in CORE,
        }
        there = [column.key in own[row["kind"]] for row in rows]
        if column.is_text:
            cells = [_words(column, row) if here else "" for row, here in zip(rows, there, strict=True)]
            texts = {text: number for number, text in enumerate(dict.fromkeys(cells))}
            entry |= {"texts": list(texts), "cells": [texts[cell] for cell in cells]}
        else:
            figures = [row[column.key] if here else None for row, here in zip(rows, there, strict=True)]
            entry["cells"] = [float(f"{value:.6g}") if isinstance(value, float) else value for value in figures]
        columns.append(entry)
    return columns


def _words(column: Column, row: Mapping[str, Any]) -> str:
    text = column.text(row)
    if column.key == "why" and row["failed"]:
        return f"failed: {text}"
    if column.key == "converged" and row["converged"] is False and recovered(row):
        return "no, but it recovered the images"
    return "nothing found" if column.key == "tripwire" and row["tripwire"] == [] else text
