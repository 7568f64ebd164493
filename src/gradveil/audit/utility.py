"""The utility cell of an audit: what a defence costs in accuracy and time."""

import dataclasses
import statistics
import time
from typing import Any

from gradveil.audit.plan import Cell, Rows, facts_of, finite
from gradveil.audit.settings import AuditSettings
from gradveil.data import Dataset
from gradveil.engines.devices import local_settings
from gradveil.engines.simulation import Simulation
from gradveil.progress import tell

TIMED_ROUNDS = 5
"""Rounds in which `none` trains too, in turns with the defence, for the ratio of their times."""

UTILITY = (
    "kind", "defence", "seed", "accuracy", "accuracy_sensitive", "loss", "round_seconds", "overhead", "rounds",
    "epsilon", "delta", "seconds", "why", "failed", "cell",
)  # fmt: skip


def price_cell(cell: Cell, settings: AuditSettings, dataset: Dataset) -> Rows:
    """Train under the defence; in the first rounds `none` trains too, in turns, so that a noisy machine hits both."""
    training = settings.training(cell.defence, cell.seed)
    training = dataclasses.replace(training, eval_every=training.rounds)
    started = time.perf_counter()
    ours: list[float] = []
    plain: list[float] = []
    row: dict[str, Any] = {}
    with (
        Simulation(training, workers=0, dataset=dataset) as simulation,
        Simulation(dataclasses.replace(training, defence="none"), workers=0, dataset=dataset) as undefended,
    ):
        for number in range(1, training.rounds + 1):
            if cell.defence != "none" and number <= TIMED_ROUNDS:
                plain.append(float(str(undefended.step(number)[0]["seconds"])))
            row = simulation.step(number)[0]
            ours.append(float(str(row["seconds"])))
            tell(number / training.rounds)
        smallest = min(simulation.sizes)  # gives away most, if it trains in every round
        budget = simulation.defence.budget(local_settings(training).releases(smallest, training.rounds))
    timed = slice(1, len(plain)) if len(plain) > 1 else slice(len(plain))  # the first round warms caches
    ratios = [one / other for one, other in zip(ours[timed], plain[timed], strict=True)]
    found = {
        "accuracy": row["accuracy"],
        "accuracy_sensitive": row["accuracy_sensitive"],
        "loss": row["loss"],
        "round_seconds": round(statistics.median(ours), 4),
        "overhead": round(statistics.median(ratios), 3) if ratios else 1.0,
        "rounds": training.rounds,
        "epsilon": finite(budget.epsilon if budget else None),
        "delta": budget.delta if budget else None,
        "seconds": round(time.perf_counter() - started, 3),
        "why": "",
        "failed": False,
    }
    return [{key: (facts_of(cell) | found)[key] for key in UTILITY}]
