"""Trainings that experiments share: each one runs once, and its rows are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split
from gradveil.engines.simulation import Simulation
from gradveil.errors import DivergedError
from gradveil.reproduce.base import Lab


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Attributes:
        rows: one per round, as `gradveil train` writes them.
        why: the reason why the training ended before its last round, or "".
    """

    rows: list[dict[str, Any]]
    why: str = ""

    def last(self, figure: str) -> float | None:
        """Return a figure of the last round, or None if the training ended before it."""
        return None if self.why or not self.rows else float(self.rows[-1][figure])


def trained(
    lab: Lab,
    settings: TrainSettings,
    progress: Callable[[float], None],
    *,
    dataset: Dataset | None = None,
    aux: Dataset | None = None,
) -> Trained:
    """Train, unless the lab keeps the rows of this training already; stop at the round in which it diverges.

    Args:
        lab: keeps the rows.
        settings: the settings of the training.
        progress: called with the finished share of the rounds.
        dataset: replaces the data set that the settings name.
        aux: replaces the auxiliary data set that the settings name.
    """

    def work() -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        try:
            with Simulation(
                settings, dataset=dataset, aux=aux, data_root=lab.data_root, workers=lab.workers
            ) as simulation:
                for row in simulation.run():
                    rows.append(dict(row))
                    progress(len(rows) / settings.rounds)
        except DivergedError as error:
            return {"rows": rows, "why": str(error)}
        return {"rows": rows, "why": ""}

    return Trained(**lab.once(("training", settings, _facts(dataset), _facts(aux)), work))


def thinned(split: Split, most: int) -> Split:
    """Return at most ``most`` images, spread evenly over a split that may be sorted by class.

    Example:
        >>> thinned(Split(np.zeros((5, 1, 2, 2), np.uint8), np.arange(5)), 3).labels.tolist()
        [0, 2, 4]
    """
    places = np.linspace(0, len(split) - 1, min(most, len(split))).astype(int)
    return Split(split.images[places], split.labels[places])


def _facts(data: Dataset | None) -> tuple[str, int, int] | None:
    return None if data is None else (data.name, len(data.train), len(data.test))
