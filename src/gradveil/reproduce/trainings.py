"""The trainings that experiments are made of: each is done once, and its rows are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.engines.simulation import Simulation
from gradveil.errors import DivergedError
from gradveil.reproduce.base import Lab


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        rows: one a round, as `gradveil train` writes them.
        why: why it ended before its last round, or "".
    """

    rows: list[dict[str, Any]]
    why: str = ""

    def last(self, figure: str) -> float | None:
        """A figure after the last round; None where the training did not get there."""
        return None if self.why or not self.rows else float(self.rows[-1][figure])


def trained(
    lab: Lab,
    settings: TrainSettings,
    progress: Callable[[float], None],
    *,
    dataset: Dataset | None = None,
    aux: Dataset | None = None,
) -> Trained:
    """Train, unless the lab's folder holds the rows of this training; one that diverges ends there.

    Args:
        lab: where the rows are kept.
        settings: of the training.
        progress: called with the share of the rounds that is done.
        dataset: in place of the one that the settings name.
        aux: likewise.
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


def _facts(data: Dataset | None) -> tuple[str, int, int] | None:
    return None if data is None else (data.name, len(data.train), len(data.test))
