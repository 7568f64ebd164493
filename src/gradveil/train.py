"""A federated training run with a folder: rows, checkpoints, saved updates, curves and a page to look at."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.engines.devices import local_settings
from gradveil.engines.simulation import Simulation
from gradveil.registry import own_files
from gradveil.report.curves import draw_curves
from gradveil.report.training import write_page
from gradveil.run_folder import RunFolder, fingerprint, to_lines
from gradveil.server import Round, learning_rate
from gradveil.storage import save_tensors, write_atomic


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


Progress = Callable[[int, Mapping[str, Any] | None, str], None]
"""Called with the number of finished rounds, the last row and what is being done, at each change of these."""


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
        checkpoint = folder.begin(settings, _fingerprint(simulation.dataset, settings), resume=resume)
        rows: list[dict[str, Any]] = []
        done = 0
        if checkpoint is not None:
            simulation.resume(checkpoint.model, checkpoint.server_state)
            rows, done = list(checkpoint.rows), checkpoint.round
        progress(done, rows[-1] if rows else None, "training")
        if not (rows and settings.rounds == 0):
            for row in simulation.run(done + 1, lambda played: _save_round(out, played, settings)):
                number = int(str(row["round"]))
                folder.commit(number, row, simulation.model, simulation.server_state)
                rows.append(row)
                progress(number, row, "training")
        progress(settings.rounds, rows[-1], "scoring clients")
        clients = simulation.client_rows(settings.rounds)
        save_tensors(
            out / "model.safetensors", simulation.model, {"round": str(settings.rounds), "model": settings.model}
        )
        write_atomic(out / "clients.jsonl", to_lines(clients))
        draw_curves(rows, out)
        write_page(out, settings, rows, clients, simulation.dataset.note)
        progress(settings.rounds, rows[-1], "done")
        return TrainResult(out, rows, clients, time.perf_counter() - started, simulation.dataset.note)


def _save_round(out: Path, played: Round, settings: TrainSettings) -> None:
    """Save the model that a chosen round began with and what each client sent, as a server would have them."""
    if played.number not in settings.save_rounds:
        return
    folder = out / "rounds" / f"{played.number:06d}"
    how = local_settings(settings)
    facts = {
        "round": str(played.number),
        "model": settings.model,
        "defence": settings.defence,
        "algorithm": how.algorithm,
        "epochs": str(how.epochs),
        "batch_size": str(how.batch_size),
        "lr": repr(learning_rate(settings, played.number)),
        "momentum": repr(how.momentum),
        "nesterov": str(how.nesterov).lower(),
        "batch_norm": how.batch_norm,
        "weight_decay": repr(how.weight_decay),
        "normalise": settings.normalise,
    }
    save_tensors(folder / "model.safetensors", played.received, facts)
    for client, update in played.sent.items():
        own = {"client": str(client), "num_examples": str(update.num_examples), "buffers": ",".join(update.buffers)}
        save_tensors(folder / f"update-{client}.safetensors", {**update.tensors, **update.buffers}, facts | own)


def _fingerprint(dataset: Dataset, settings: TrainSettings) -> str:
    return fingerprint(dataset, [settings.weights, *own_files(settings.model), *own_files(settings.defence)])
