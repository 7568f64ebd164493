"""A federated training over any engine: the loop over rounds, the server's model, and the figures of each row."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.defences import Defence
from gradveil.engines.run_folder import RunFolder, fingerprint, to_lines
from gradveil.engines.saved_rounds import save_round
from gradveil.engines.tripwire import hearing
from gradveil.errors import DivergedError, RunFolderError
from gradveil.federated.budgets import budget_fields, weakest_budget
from gradveil.federated.client import Score
from gradveil.federated.flat import FlatModel
from gradveil.federated.learning import at_chance, several
from gradveil.federated.protocol import Protocol
from gradveil.federated.server import Engine, Round, ScoreRequest, learning_rate, naming_the_largest, play_round
from gradveil.registry import own_files
from gradveil.rows import COLUMNS, Schema
from gradveil.storage import save_tensors, write_atomic

MOST_PERSONAL = 200
"""At most this many clients with their own models are scored on all test images at the end."""
Row = dict[str, Any]


class Training:
    """The server's side of a run, wherever its clients are.

    Args:
        settings: everything that decides the result.
        defence: shared by server and clients.
        net: the server's network, after ``on_model``.
        engine: plays the clients.
        sizes: number of images of each client.
        has_sensitive: whether any client has images that are marked sensitive.

    Attributes:
        clock: the clock, in seconds, that measures how long rounds take; by default the time that passes.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        settings: TrainSettings,
        defence: Defence,
        net: FlatModel,
        engine: Engine,
        sizes: list[int],
        *,
        has_sensitive: bool,
    ) -> None:
        self.settings, self.defence, self.net, self.engine, self.sizes = settings, defence, net, engine, sizes
        self._has_sensitive = has_sensitive
        self.model: dict[str, Tensor] = _copy(net.shared_tensors(net.values[net.shared]))
        self.server_state: dict[str, Tensor] = {}

    def resume(self, model: Mapping[str, Tensor], server_state: Mapping[str, Tensor], done: int = 0) -> None:
        """Continue from a checkpoint's model and server state, after ``done`` rounds."""
        if {name: tensor.shape for name, tensor in model.items()} != {n: t.shape for n, t in self.model.items()}:
            raise RunFolderError("The checkpoint must fit the model of this run, got other tensors or shapes.")
        self.model = {name: model[name].to(self.net.values) for name in self.model}
        self.server_state = dict(server_state)

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        """Return everything beside the model that a later round needs."""
        return dict(self.server_state)

    def run(self, first: int = 1, on_round: Callable[[Round], None] = lambda _: None) -> Iterator[Row]:
        """Play the rounds from ``first`` on and yield a row after each. Without rounds, only evaluate."""
        if self.settings.rounds == 0:
            with single_thread():
                figures = self._evaluate(0, ())
            yield {"kind": "round", "round": 0, **figures, "lr": None, "clients": 0, "seconds": 0.0}
        for number in range(first, self.settings.rounds + 1):
            row, played = self.step(number)
            on_round(played)
            yield row

    def step(self, number: int) -> tuple[Row, Round]:
        """Play one round, move the global model and evaluate it."""
        with single_thread():
            return self._step(number)

    def _step(self, number: int) -> tuple[Row, Round]:
        started = self.clock()
        self.net.receive(self.net.shared_vector(self.model))
        with hearing() as alarms:
            played = play_round(
                number, self.settings, self.defence, self.engine, self.sizes, self.net.module, self.model,
                self.server_state,
            )  # fmt: skip
        self.model = played.model
        seconds = self.clock() - started
        due = number % self.settings.eval_every == 0 or number == self.settings.rounds
        with naming_the_largest(number, played.norms):
            figures = self._evaluate(number, played.clients) if due else dict.fromkeys(_FIGURES)
        row: Row = {
            "kind": "round",
            "round": number,
            **figures,
            "lr": learning_rate(self.settings, number),
            "clients": len(played.clients),
            "seconds": round(seconds, 4),
        }
        if self.settings.tripwire != "off":
            row["tripwire_warnings"] = len(alarms)  # clients that found a trap
        if played.dropped:
            row["dropped"] = list(played.dropped.values())  # each reason names its client
        if played.quantised is not None and played.quantised.error is not None:
            row |= {"sum_clipped": played.quantised.clipped, "sum_error": played.quantised.error}
        if number == self.settings.rounds and not self.settings.defended:
            row |= self._budget(number)
        if self.defence.reports:
            row["reports"] = {n: v if math.isfinite(v) else None for n, v in sorted(played.reports.items())}
        Schema(COLUMNS).check("round", row)
        return row, played

    def _budget(self, rounds: int) -> Row:
        """Return what the defence guarantees to every client after this many rounds, or nothing if it states none."""
        entries = sum(p.numel() for p in self.net.module.parameters() if p.requires_grad)
        how = Protocol.of(self.settings).local
        return budget_fields(weakest_budget(self.defence, how, filter(None, self.sizes), rounds, entries))

    def client_rows(self, round_number: int) -> list[Row]:
        """Return one row per client: its size, and its model's accuracy on its own training images and on test images.

        If clients have private tensors, each has its own model; then test images are scored for the first
        `MOST_PERSONAL` clients only. A real site gives the scores that it agreed to; the others are None.
        """
        everyone = range(self.settings.clients)
        personal = everyone[:MOST_PERSONAL] if self.net.has_private else range(0)
        asked = [ScoreRequest("test", client) for client in personal] or [ScoreRequest("test")]
        asked = [ScoreRequest("own", client) for client in everyone] + asked
        with single_thread():
            scores = self.engine.score(round_number, asked, self.model)
        own, test = (
            [_accuracy(score) for score in some] for some in (scores[: len(everyone)], scores[len(everyone) :])
        )
        others = None if personal else test[0]
        return [
            {
                "client": client,
                "images": self.sizes[client],
                "accuracy_own": own[client],
                "accuracy_test": test[client] if client < len(personal) else others,
            }
            for client in everyone
        ]

    def _evaluate(self, number: int, clients: tuple[int, ...]) -> Mapping[str, float | None]:
        """Return accuracy and loss on the test images, and accuracy on the sensitive ones.

        If parts of the model are private, no single model exists: the figures are means over the round's clients, each
        with its own model, and ``accuracy_server`` is that of the server's model with its own random private part.
        """
        views: tuple[int | None, ...] = clients if self.net.has_private and clients else (None,)
        requests = [ScoreRequest("test", view) for view in views]
        requests += [ScoreRequest("sensitive", view) for view in views] if self._has_sensitive else []
        requests += [ScoreRequest("test")] if views != (None,) else []
        scores = self.engine.score(number, requests, self.model)
        test, rest = [score for score in scores[: len(views)] if score.count], scores[len(views) :]
        figures: dict[str, float | None] = dict.fromkeys(_FIGURES)
        if views != (None,):
            figures["accuracy_server"] = scores[-1].accuracy
        if not test:  # no site gave a score
            return figures
        loss = sum(score.loss for score in test) / len(test)
        if not math.isfinite(loss):
            raise DivergedError(f"The test loss must stay finite, got {loss}: the training diverged. Lower --lr.")
        figures["accuracy"] = sum(score.accuracy for score in test) / len(test)
        figures["accuracy_balanced"] = _mean([score.balanced for score in test])
        figures["accuracy_majority"] = _mean([score.majority for score in test])
        figures["loss"] = loss
        if self._has_sensitive:
            marked = [score.accuracy for score in rest[: len(views)] if score.count]  # a real site scores its own only
            figures["accuracy_sensitive"] = sum(marked) / len(marked) if marked else None
        return figures


Progress = Callable[[int, Mapping[str, Any] | None, str], None]
"""Called with the number of finished rounds, the last row and the current activity, whenever one of them changes."""


def record(
    training: Training,
    folder: RunFolder,
    dataset: Dataset,
    *,
    resume: bool,
    progress: Progress = lambda done, row, doing: None,
) -> tuple[list[Row], list[Row]]:
    """Train, saving to ``folder``; resume from its checkpoint if asked. Return round rows and client rows."""
    settings, out = training.settings, folder.path
    files = [settings.weights, *own_files(settings.model), *own_files(settings.defence)]
    checkpoint = folder.begin(settings, fingerprint(dataset, files), resume=resume)
    rows: list[Row] = []
    done = 0
    if checkpoint is not None:
        training.resume(checkpoint.model, checkpoint.server_state, checkpoint.round)
        rows, done = list(checkpoint.rows), checkpoint.round
    progress(done, rows[-1] if rows else None, "training")
    if not (rows and settings.rounds == 0):
        for row in training.run(done + 1, lambda played: save_round(out, played, settings, dataset)):
            number = int(str(row["round"]))
            if several(number, settings.rounds) and at_chance(row, dataset.test.labels):
                row["at_chance"] = True
            folder.commit(number, row, training.model, training.checkpoint)
            rows.append(row)
            progress(number, row, "training")
    progress(settings.rounds, rows[-1], "scoring clients")
    clients = training.client_rows(settings.rounds)
    save_tensors(out / "model.safetensors", training.model, {"round": str(settings.rounds), "model": settings.model})
    write_atomic(out / "clients.jsonl", to_lines(clients))
    return rows, clients


@contextmanager
def single_thread() -> Iterator[None]:
    """Use one torch thread: the bits are those of a worker, and no idle thread spins on the workers' cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_FIGURES = ("accuracy", "accuracy_balanced", "accuracy_majority", "loss", "accuracy_sensitive", "accuracy_server")


def _accuracy(score: Score) -> float | None:
    return score.accuracy if score.count else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is not known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
