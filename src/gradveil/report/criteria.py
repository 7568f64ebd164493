"""Criteria such as ``identified>0.01``: the one place that decides whether a run counts as leaking.

A verdict, the exit code of ``--fail-on`` and the privacy card all come from here.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.rows import Column, Schema

NUMBER = r"[0-9.]+(?:e[+-]?\d+)?"
FORM = re.compile(
    rf"\s*(\w+)\s*(>=|<=|>|<)\s*(?:(blind)(?:\s*([+-]\s*{NUMBER}))?|([+-]?\s*{NUMBER}))\s*", re.IGNORECASE | re.ASCII
)
TABLES = ("summary", "costs", "members")
"""The lines of an audit that a criterion may be about; the first table that has lines with the field counts."""


@dataclass(frozen=True)
class Criterion:
    """A comparison of a field of a run's lines with a number, or with the same field of the blind guess.

    Attributes:
        text: as it was written.
        field: the field.
        operator: >, >=, < or <=.
        number: the number on the right.
        over_blind: whether the number is added to the blind guess's value.
    """

    text: str
    field: str
    operator: str
    number: float
    over_blind: bool = False

    def met_by(self, line: Mapping[str, Any]) -> bool | None:
        """Return whether a line meets the criterion, or None if a value that it needs was not measured.

        Example:
            >>> leak, = parse_criteria("psnr>blind+1", {"psnr", "blind_psnr"})
            >>> leak.met_by({"psnr": 20.0, "blind_psnr": 15.5}), leak.met_by({"psnr": 16.0, "blind_psnr": 15.5})
            (True, False)
        """
        value, base = line.get(self.field), line.get(f"blind_{self.field}") if self.over_blind else 0.0
        if value is None or base is None or math.isnan(value) or math.isnan(base):
            return None
        bound = base + self.number
        above, equal = value > bound, value == bound
        return bool({">": above, ">=": above or equal, "<": not above and not equal, "<=": not above}[self.operator])

    @property
    def is_leakier_above(self) -> bool:
        """Whether larger values are nearer to meeting the criterion."""
        return self.operator.startswith(">")


@dataclass(frozen=True)
class Verdict:
    """What a criterion says of a run.

    Attributes:
        criterion: as it was written.
        met: whether a line meets it; None if none does, and a defence has no line with the values that it needs.
        reason: the line that comes nearest or goes furthest, in words.
    """

    criterion: str
    met: bool | None
    reason: str

    @property
    def sentence(self) -> str:
        """The verdict in words; what did not leak to the attacks that were run is never called safe."""
        found = {True: "met", False: "not met", None: "not measured"}[self.met]
        return f"{self.criterion} is {found}: {self.reason}."


def parse_criteria(text: str | Sequence[str], fields: Iterable[str]) -> tuple[Criterion, ...]:
    """Return the criteria of a text, or of several; commas separate them.

    Args:
        text: criteria such as ``identified>0.01`` or ``psnr>blind+1``.
        fields: the fields that lines have.

    Raises:
        ConfigError: a criterion is not of this form, names an unknown field, or the blind guess of one that has none.

    Example:
        >>> found = parse_criteria("identified>0.01, psnr>blind+1", {"identified", "psnr", "blind_psnr"})
        >>> [criterion.field for criterion in found]
        ['identified', 'psnr']
        >>> parse_criteria("pnsr>20", {"psnr"})
        Traceback (most recent call last):
        gradveil.errors.UnknownNameError: Unknown field of a criterion 'pnsr'. Did you mean 'psnr'? Known: psnr.
    """
    known, found = set(fields), []
    pieces = [piece for one in ([text] if isinstance(text, str) else text) for piece in one.split(",")]
    for piece in pieces:
        match = FORM.fullmatch(piece)
        if not match:
            raise ConfigError(
                f"A criterion must be a field, > or <, and a number or blind+number, got {piece.strip()!r}. "
                'Write for example --fail-on "identified>0.01" or --fail-on "psnr>blind+1".'
            )
        name, number = match[1].lower(), _number((match[4] or match[5] or "0").replace(" ", ""), piece)
        if name not in known:
            raise UnknownNameError("field of a criterion", match[1], known)
        if match[3] and f"blind_{name}" not in known:
            raise ConfigError(
                f"A criterion must name blind only where lines have a blind guess, got {piece.strip()!r}: there is "
                f"none for {name} here. Compare with a number."
            )
        found.append(Criterion(piece.strip(), name, match[2], number, bool(match[3])))
    return tuple(found)


def _number(text: str, piece: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"A criterion must end in a finite number, got {text!r} in {piece.strip()!r}.")
    return number


def fields_of(schema: Schema, tables: Iterable[str] = TABLES) -> dict[str, Column]:
    """Return the columns that a criterion may name: numbers of lines, and metrics."""
    columns = [column for table in tables for column in schema.of(table)] + list(schema.metrics)
    return {column.key: column for column in reversed(columns) if column.type in ("number", "index")}


def judged(
    criteria: Iterable[Criterion], lines: Mapping[str, Sequence[Mapping[str, Any]]], schema: Schema
) -> list[Verdict]:
    """Return the verdict of each criterion on an audit's lines.

    The undefended lines count only if nothing else was audited: an audit of a defence always has them to compare with.

    Args:
        criteria: the criteria.
        lines: the lines by table: summary, costs, members.
        schema: their columns.
    """
    found = []
    for criterion in criteria:
        tables = [name for name in TABLES if lines.get(name) and criterion.field in fields_of(schema, (name,))]
        own = lines[tables[0]] if tables else ()
        defended = [line for line in own if line["defence"] != "none"]
        found.append(_judge(criterion, defended or own))
    return found


def judge_rows(criteria: Iterable[Criterion], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdict of each criterion on the rows of an attack on files."""
    return [_judge(criterion, rows) for criterion in criteria]


def _judge(criterion: Criterion, lines: Sequence[Mapping[str, Any]]) -> Verdict:
    measured = [line for line in lines if criterion.met_by(line) is not None]
    if not measured:
        return Verdict(criterion.text, None, f"no line of the run has {_needed(criterion)}")
    sign = 1 if criterion.is_leakier_above else -1

    def margin(line: Mapping[str, Any]) -> float:
        base = line[f"blind_{criterion.field}"] if criterion.over_blind else 0.0
        return float(sign * (line[criterion.field] - base))

    worst = max(measured, key=margin)
    who = f"under {worst['defence']}" + (f", {worst['attack']}" if worst.get("attack") else "")
    who += " with knowledge of the defence" if worst.get("adaptive") else ""
    beside = f" (blind guess {worst[f'blind_{criterion.field}']:.4g})" if criterion.over_blind else ""
    missing = f"; {len(lines) - len(measured)} lines have no value" if len(measured) < len(lines) else ""
    met = criterion.met_by(worst)
    without = sorted({line["defence"] for line in lines} - {line["defence"] for line in measured})
    if without and not met:
        return Verdict(criterion.text, None, f"no line under {', '.join(without)} has {_needed(criterion)}")
    return Verdict(criterion.text, met, f"{worst[criterion.field]:.4g}{beside} {who}{missing}")


def _needed(criterion: Criterion) -> str:
    return f"{criterion.field} and its blind guess" if criterion.over_blind else criterion.field
