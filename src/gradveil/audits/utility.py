"""The utility cell of an audit: what a defence costs in accuracy and time."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gradveil.audits.plan import Cell, Rows, facts_of
from gradveil.audits.settings import AuditSettings
from gradveil.audits.tapping import save_taps, world_of
from gradveil.data import Dataset
from gradveil.defences import Budget
from gradveil.engines.simulation import Simulation
from gradveil.federated.budgets import budget_fields, weakest_budget
from gradveil.federated.learning import at_chance
from gradveil.federated.protocol import Protocol
from gradveil.metrics.epsilon_hat import MEASURED, exceeding
from gradveil.progress import tell
from gradveil.storage import forget_states
from gradveil.threat.tap import Tap

TIMED_ROUNDS = 9
"""Rounds in which `none` trains too, alternating with the defence, to compare their times."""


def price_cell(
    cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None, out: Path | None = None
) -> Rows:
    """Train under the defence and return one row with its accuracy, time and privacy budget.

    In the first rounds `none` trains too, alternating with the defence, so that a busy machine slows both alike. On a
    CPU, rounds are measured by the process's computing time, which other processes hardly change. ``out`` is the
    audit's folder, which gets the taps that attacks need; defended images of an earlier try are used again.
    """
    world = world_of(settings, cell.defence, cell.seed, dataset, root)
    training, clients = world.training, None if out is None else out / "clients" / cell.name
    started = time.perf_counter()
    ours: list[float] = []
    plain: list[float] = []
    row: dict[str, Any] = {}
    with ExitStack() as stack:
        if clients is not None:
            forget_states(clients)
        defended = Simulation(training, workers=0, dataset=dataset, data_root=root, clients_folder=clients)
        simulation = stack.enter_context(defended)
        tap = Tap(world.chosen, training.aggregation)
        simulation.attach(tap)
        runs = [(simulation, ours)]
        clock = time.process_time if training.device == "cpu" else time.perf_counter
        if cell.defence != "none":
            twin = world_of(settings, "none", cell.seed, dataset).training
            undefended = Simulation(dataclasses.replace(twin, save_rounds=(), canaries=0), workers=0, dataset=dataset)
            runs.append((stack.enter_context(undefended), plain))
        for run, _ in runs:
            run.clock = clock
        for number in range(1, training.rounds + 1):
            for run, seconds in reversed(runs) if number % 2 else runs:  # they take turns to go first
                if run is simulation or number <= TIMED_ROUNDS:
                    last = run.step(number)[0]
                    seconds.append(float(str(last["seconds"])))
                    row = last if run is simulation else row
            tell(number / training.rounds)
        if out is not None:
            save_taps(tap, out / "trainings" / cell.name)
        budget, why = _worst_budget(simulation), _protected(simulation)
    if row.get("canaries_exceed"):
        why = "; ".join(filter(None, (exceeding(row), why)))
    found = {
        **{key: row[key] for key in ("accuracy", "accuracy_balanced", "accuracy_majority", "accuracy_sensitive")},
        "loss": row["loss"],
        "at_chance": at_chance(row, dataset.test.labels),
        "reports": row.get("reports"),
        **_times(ours, plain or ours),
        "rounds": training.rounds,
        **dict.fromkeys(("epsilon", "delta")),
        **budget_fields(budget),
        **{key: row.get(key) for key in MEASURED},
        "seconds": round(time.perf_counter() - started, 3),
        "why": why,
        "failed": False,
    }
    return [settings.schema.row("utility", facts_of(cell) | found)]


def _times(ours: Sequence[float], plain: Sequence[float]) -> dict[str, float | None]:
    """Return the medians of both trainings' seconds in the same rounds, without the first, and their ratio.

    The first round warms caches; if it is the only one, the ratio is not known.
    """
    rounds = slice(min(1, len(plain) - 1), len(plain))
    own, undefended = statistics.median(ours[rounds]), statistics.median(plain[rounds])
    known = len(plain) > 1 and undefended > 0
    return {
        "round_seconds": round(own, 6),
        "round_seconds_undefended": round(undefended, 6),
        "overhead": 1.0 if ours is plain else round(own / undefended, 3) if known else None,
    }


def _protected(simulation: Simulation) -> str:
    """Return which images a defence of marked images protects, or "" if it protects all."""
    if not simulation.defence.marked_only:
        return ""
    marks = simulation.data.sensitive
    marked = f"{int(marks.sum()):,} of {len(marks):,} images are marked as sensitive (--sensitive)"
    return f"{marked}, and only these are fully protected"


def _worst_budget(simulation: Simulation) -> Budget | None:
    """Return the weakest guarantee of any client that trains in every round, or None if there is none."""
    how, rounds = Protocol.of(simulation.settings).local, simulation.settings.rounds
    entries = sum(p.numel() for p in simulation.net.module.parameters() if p.requires_grad)
    return weakest_budget(simulation.defence, how, simulation.sizes, rounds, entries)
