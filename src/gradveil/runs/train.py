"""A federated training run with a folder: rows, checkpoints, saved updates, curves and a page to look at."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings
from gradveil.engines.run_folder import RunFolder
from gradveil.engines.simulation import Simulation
from gradveil.engines.training import Progress, record
from gradveil.report.curves import draw_curves
from gradveil.report.training import write_page


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with.

    Attributes:
        out: the run's folder.
        rows: one a round.
        clients: one a client, at the end.
        seconds: of this call, set-up included.
        note: what the data set says of itself.
    """

    out: Path
    rows: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    seconds: float
    note: str


def train(
    settings: TrainSettings,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    progress: Progress = lambda done, row, doing: None,
) -> TrainResult:
    """Train a federated model and leave everything in ``out``; goes on with the run there if ``resume``.

    Same settings, same bits: in the weights, and in the rows but for ``seconds``, whether or not the run was killed
    and resumed on its way, and however many workers it had.
    """
    started = time.perf_counter()
    with (
        RunFolder(out) as folder,
        Simulation(settings, data_root=data_root, workers=workers, clients_folder=out / "clients") as simulation,
    ):
        rows, clients = record(simulation, folder, simulation.dataset, resume=resume, progress=progress)
        draw_curves(rows, out)
        write_page(out, settings, rows, clients, simulation.dataset.note)
        progress(settings.rounds, rows[-1], "done")
        return TrainResult(out, rows, clients, time.perf_counter() - started, simulation.dataset.note)
