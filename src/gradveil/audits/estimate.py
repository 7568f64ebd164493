"""How long an audit will take on this machine, from short trials before the work, and what to lower if it is long."""

import dataclasses
import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradveil.attacks import build_any_attack
from gradveil.audits.pilot import Clock, Pilot
from gradveil.audits.plan import Cell
from gradveil.audits.settings import AuditSettings
from gradveil.data import Dataset
from gradveil.defences import build_defence
from gradveil.own import told_error
from gradveil.registry import Component, parse_spec

BUDGET = 10.0
"""Seconds for all trials, about. Attacks that are left then take as long as under the defences that were tried."""
SHARE = 0.05
"""Share of the work found so far that trials may take, before attacks that were tried elsewhere are not tried again."""
LIMIT = 0.3
"""Seconds after which a trial is stopped, if it can be."""
SHORT = 5.0
"""Seconds of an attack's cell that is so short that the same attack is not tried under every other defence."""
LONG = 600.0
"""Seconds of an audit that is long enough to ask first, and to say what to lower."""
COSTLY = ("iterations", "restarts", "queries", "every", "probes", "steps", "shadows")
"""Settings of attacks and defences on which their time depends."""

Kind = tuple[str, str, str, bool]
"""Kind of the cells, defence, attack, and whether the attacker knows the defence."""


@dataclass(frozen=True)
class Piece:
    """All cells of one kind: the trainings under a defence, or an attack on it.

    Attributes:
        title: what the cells do.
        cells: their number.
        seconds: of one cell; None if it could not be tried.
        kind: what they have in common.
        why: why it could not be tried, or "".
    """

    title: str
    cells: int
    seconds: float | None
    kind: Kind
    why: str = ""

    @property
    def total(self) -> float:
        """Seconds of all cells; 0 if unknown."""
        return (self.seconds or 0.0) * self.cells

    def text(self) -> str:
        """Return the piece in words.

        Example:
            >>> Piece("gs on none", 3, 61.0, ("privacy", "none", "gs", False)).text()
            'gs on none: 3 x 61 s'
        """
        times = f"{self.cells} x " * (self.cells > 1)
        if self.seconds is None:
            return f"{self.title}: not estimated, since a trial failed: {self.why}"
        return f"{self.title}: {times}{duration(self.seconds)}"


@dataclass(frozen=True)
class Estimate:
    """How long an audit will take.

    Attributes:
        pieces: what it consists of, the longest first.
        seconds: of the whole, on this number of workers.
        workers: processes that share the work; 0 for this one alone.
        advice: what to lower if it is long.
    """

    pieces: tuple[Piece, ...]
    seconds: float
    workers: int
    advice: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        """Whether to ask before the work."""
        return self.seconds > LONG

    def lines(self, *, every: bool = True) -> list[str]:
        """Return the estimate in words: the whole, and its pieces if ``every`` or if it is long; failed ones always."""
        on = f"{self.workers} workers" if self.workers > 1 else "one process"
        unknown = any(piece.seconds is None for piece in self.pieces)
        whole = f"Estimate: {'at least ' * unknown}about {duration(self.seconds)} on {on}."
        shown = [piece for piece in self.pieces if every or self.is_long or piece.seconds is None]
        told = [whole, *(f"  {piece.text()}" for piece in shown)]
        return [*told, f"To lower it: {'; '.join(self.advice)}."] if self.is_long and self.advice else told

    def document(self) -> dict[str, object]:
        """Return the estimate as JSON values."""
        pieces = [
            {"what": p.title, "cells": p.cells, "seconds_per_cell": p.seconds} | ({"why": p.why} if p.why else {})
            for p in self.pieces
        ]
        return {"seconds": self.seconds, "workers": self.workers, "pieces": pieces, "to_lower": list(self.advice)}


def estimate(
    settings: AuditSettings,
    dataset: Dataset,
    cells: Sequence[Cell],
    *,
    workers: int = 0,
    root: Path | None = None,
    clock: Clock | None = None,
    budget: float = BUDGET,
) -> Estimate:
    """Return how long some cells will take, from a short trial of each kind of cell.

    Trainings are tried by single steps of a client, attacks by their first steps on the first updates. Figures are
    rough: searches that end early or are compiled take less, and metrics, evaluation and reports are not counted. On a
    CPU the default ``clock`` counts computing time, so that other programs on the machine change nothing.
    """
    clock = clock or (time.process_time if settings.device == "cpu" else time.perf_counter)
    kinds: dict[Kind, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault((cell.kind, cell.defence, cell.attack, cell.adaptive), []).append(cell)
    started, pilot = clock(), Pilot(settings, dataset, root, LIMIT, clock)
    seconds, failed = dict[Kind, float | None](), dict[Kind, str]()
    for kind, own in sorted(kinds.items(), key=lambda item: item[0][0] != "utility"):
        like = _borrowed(kind, seconds)
        so_far = sum((seconds[known] or 0.0) * len(kinds[known]) for known in seconds)
        spent = clock() - started > min(budget, max(1.0, SHARE * so_far))
        short = like is not None and like < SHORT and not own[0].adaptive
        if like is not None and (spent or short):
            seconds[kind] = like
        else:
            seconds[kind], failed[kind] = _tried(pilot, own[0])
    pieces = [Piece(_title(own[0]), len(own), seconds[kind], kind, failed.get(kind, "")) for kind, own in kinds.items()]
    pieces.sort(key=lambda piece: -piece.total)
    each = {cell.name: seconds[kind] or 0.0 for kind, own in kinds.items() for cell in own}
    return Estimate(tuple(pieces), makespan(cells, each, workers), workers, _advice(settings, pieces))


def _title(cell: Cell) -> str:
    """Return what the cells of a kind do."""
    return dataclasses.replace(cell, needs="").title


def _tried(pilot: Pilot, cell: Cell) -> tuple[float | None, str]:
    """Return the seconds of a cell; if the trial failed, None and why: then so may the cell."""
    try:
        return pilot.cell(cell), ""
    except Exception as error:  # a user's own component may raise anything
        return None, told_error(error)


def _borrowed(kind: Kind, known: Mapping[Kind, float | None]) -> float | None:
    """Return the most seconds of the same attack under other defences, or None; a training is like no other."""
    if kind[0] == "utility":
        return None
    alike = [value for other, value in known.items() if (other[0], other[2]) == (kind[0], kind[2]) and value]
    return max(alike, default=None)


def makespan(cells: Iterable[Cell], seconds: Mapping[str, float], workers: int) -> float:
    """Return when the last cell ends if each worker takes the first cell whose training is finished.

    Example:
        >>> cells = [Cell("t", "utility", "none", 0), Cell("a", "privacy", "none", 0, needs="t")]
        >>> makespan([*cells, Cell("b", "privacy", "none", 0, needs="t")], {"t": 1.0, "a": 2.0, "b": 3.0}, 2)
        4.0
    """
    waiting = list(cells)
    open_ = {cell.name for cell in waiting}
    busy: list[tuple[float, str]] = []
    now, free = 0.0, max(1, workers)
    while waiting or busy:
        ready = next((cell for cell in waiting if cell.needs not in open_), None)
        if free and ready is not None:
            waiting.remove(ready)
            heapq.heappush(busy, (now + seconds[ready.name], ready.name))
            free -= 1
            continue
        now, name = heapq.heappop(busy)
        open_.discard(name)
        free += 1
    return now


def _advice(settings: AuditSettings, pieces: Sequence[Piece]) -> tuple[str, ...]:
    """Return what to lower, by the pieces that take most."""
    found: dict[str, None] = {}
    whole = sum(piece.total for piece in pieces)
    for piece in pieces:
        if piece.total < 0.1 * whole or not whole:
            continue
        kind, defence, attack, _ = piece.kind
        if kind in ("utility", "membership"):
            found[f"--rounds (now {settings.rounds})"] = None
            found |= dict.fromkeys(_settings_of(build_defence(part)) for part in defence.split("+"))
        if kind == "privacy":
            taps = "/".join(map(str, settings.taps))
            found[f"--tap (now {taps})"] = None
            found[f"--targets (now {settings.targets})"] = None
        if attack:
            found[_settings_of(build_any_attack(attack))] = None
    if settings.seeds > 1:
        found[f"--seeds (now {settings.seeds})"] = None
    return tuple(filter(None, found))


def _settings_of(component: Component) -> str:
    """Return the settings of a component on which its time depends, with their values, or "" if it has none.

    Example:
        >>> _settings_of(build_any_attack("gs:iterations=500"))
        'gs:iterations (now 500)'
    """
    fields = {field.name for field in dataclasses.fields(component)}
    name = parse_spec(component.spec)[0]
    values = {key: getattr(component, key) for key in COSTLY if key in fields}
    return ", ".join(f"{name}:{key} (now {value})" for key, value in values.items() if value and value != 1)


def duration(seconds: float) -> str:
    """Return a time in words, with two digits at most.

    Example:
        >>> duration(0.2), duration(48.3), duration(150), duration(7000)
        ('1 s', '48 s', '2.5 min', '1.9 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{max(1, round(seconds))} s"
