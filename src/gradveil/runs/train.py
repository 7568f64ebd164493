"""A federated training with a folder: rows, checkpoints, saved updates, curves and a page."""

import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.engines.run_folder import RunFolder
from gradveil.engines.simulation import Simulation
from gradveil.engines.training import Progress, record
from gradveil.federated.learning import warning_of
from gradveil.report.curves import draw_curves
from gradveil.report.notebook import file_html, link_html, table_html
from gradveil.report.training import write_page

SHOWN = 5
"""Rounds that a notebook shows, the last ones."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a training; a notebook shows it as a table with the curves.

    Attributes:
        out: the run's folder.
        rows: one row per round.
        clients: one row per client, after the last round.
        seconds: duration of this call, set-up included.
        note: what is special about this copy of the data set, or "".
        warning: what to try if the training has not learned anything, or "".
    """

    out: Path
    rows: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    seconds: float
    note: str
    warning: str = ""

    @property
    def accuracy(self) -> float:
        """Share of the test images that the final model recognises."""
        return float(self.rows[-1]["accuracy"])

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.out / "report.html"

    def __repr__(self) -> str:
        return (
            f"TrainResult(rounds={self.rows[-1]['round']}, accuracy={self.accuracy:.2%}, report={str(self.report)!r})"
        )

    def _repr_html_(self) -> str:
        head = f"<p><strong>gradveil train</strong>: {self.accuracy:.2%} of the test images are recognised.</p>"
        head += f"<p><strong>{escape(self.warning)}</strong></p>" if self.warning else ""
        table = table_html(self.rows[-SHOWN:], ("round", "accuracy", "accuracy_sensitive", "loss", "seconds"))
        return head + file_html(self.out / "curves.png", "accuracy and loss", 300) + table + link_html(self.report)


def train(
    settings: TrainSettings,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    dataset: Dataset | None = None,
    progress: Progress = lambda done, row, doing: None,
) -> TrainResult:
    """Train a federated model and save everything in ``out``; continue the run there if ``resume``.

    ``dataset`` takes the place of the one that the settings name, if it is given.

    The same settings give the same bits in the weights and in all of the rows but ``seconds``, whether or not the run
    was killed and resumed, and with any number of workers.
    """
    started = time.perf_counter()
    with (
        RunFolder(out) as folder,
        Simulation(
            settings, data_root=data_root, workers=workers, clients_folder=out / "clients", dataset=dataset
        ) as simulation,
    ):
        rows, clients = record(simulation, folder, simulation.dataset, resume=resume, progress=progress)
        draw_curves(rows, out)
        write_page(out, settings, rows, clients, simulation.dataset.note)
        progress(settings.rounds, rows[-1], "done")
        seconds, warning = time.perf_counter() - started, warning_of(rows[-1], settings)
        return TrainResult(out, rows, clients, seconds, simulation.dataset.note, warning)
