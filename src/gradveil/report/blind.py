"""The blind guess in tables and plots: what someone has who never saw the update."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradveil.metrics import schema_of
from gradveil.rows import Column, Row, Schema

NAME = "blind guess"
"""What stands in the place of the defence."""
EXPLAINED = """A <b>blind guess</b> is what someone has who never saw the update: the average of public images of the
same class if the attacker knows labels or guesses them, else the mean public image."""
IDENTIFIED = """<b>Identified</b>: the guess is closer (by MSE) to the true image than to any of {others:,} others;
chance is {chance}."""


def blind_lines(rows: Iterable[Mapping[str, Any]], schema: Schema | None = None) -> list[Row]:
    """Return one line of the summary per kind of blind guess that the rows have, with the fields of attacks.

    ``defence`` is "blind guess", ``attack`` says which, and ``adaptive`` is None. Rows of earlier versions have none.
    """
    schema = schema or schema_of()
    found: dict[str, dict[tuple[object, ...], Mapping[str, Any]]] = {}
    labels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind", "privacy") == "privacy" and row.get("blind") and not row.get("failed"):
            target = row.get("seed"), row.get("target"), row.get("round")
            found.setdefault(row["blind"], {}).setdefault(target, row)
            if row.get("label_accuracy") is not None and "labels" not in (row.get("knows") or ()):
                labels.setdefault(row["blind"], []).append(row)
    return [
        _line(name, list(targets.values()), schema, _mean(labels.get(name, []), "blind_label_accuracy"))
        for name, targets in found.items()
    ]


def _line(name: str, rows: Sequence[Mapping[str, Any]], schema: Schema, labels: float | None) -> Row:
    """Return the line of one blind guess; ``labels`` is its share of right labels, None if no attacker guessed any."""
    figures = {column.key: _mean(rows, f"blind_{column.key}") for column in schema.metrics}
    psnrs = [row["blind_psnr"] for row in rows if row.get("blind_psnr") is not None]
    own = {
        "defence": NAME,
        "attack": name,
        "blind": name,
        "n": len(rows),
        "images": sum(int(row.get("images") or 1) for row in rows),
        "seeds": len({row.get("seed") for row in rows}),
        "failed": 0,
        "psnr_worst": max(psnrs, default=None),
        "identified": _mean(rows, "blind_identified"),
        "candidates": _mean(rows, "candidates"),
        "label_accuracy": labels,
        "knows": ["labels"] * (name == "class average"),
        "flags": [],
    }
    known = set(schema.keys("summary"))
    return schema.row("summary", schema.blank("summary") | {k: v for k, v in (figures | own).items() if k in known})


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def blind_level(summary: Iterable[Mapping[str, Any]], metric: Column) -> float | None:
    """Return the leak of the best blind guess of any line by a metric, or None if none was measured.

    Example:
        >>> psnr = Column("psnr", "number", "PSNR, dB", leakier=True)
        >>> blind_level([{"blind_psnr": 11.0}, {"blind_psnr": 12.5}, {}], psnr)
        12.5
    """
    values = [line[key] for line in summary if line.get(key := f"blind_{metric.key}") is not None]
    return (max if metric.leakier else min)(values, default=None)


def chance(line: Mapping[str, Any]) -> str:
    """Return the chance of picking the true image by guessing, in words.

    In a batch, any of its guesses may be matched to an image, which raises the chance to at most that many times.

    Example:
        >>> chance({"candidates": 1001.0, "n": 2, "images": 2}), chance({"candidates": 1001.0, "n": 2, "images": 16})
        ('0.1 %', 'at most 0.8 %')
    """
    each = max(1.0, line["images"] / line["n"]) if line["n"] else 1.0
    return f"{'at most ' * (each > 1)}{min(100.0, 100 * each / line['candidates']):.2g} %"
