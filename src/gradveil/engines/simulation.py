"""The embedded federated simulation: data, clients, server and engine put together."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.federated import FederatedData, federate
from gradveil.defences import Defence, build_defence
from gradveil.engines.devices import defended, is_private, make_network, refuse_in_part
from gradveil.engines.in_process import InProcess
from gradveil.engines.workers import Blueprint, Workers
from gradveil.errors import ConfigError, DivergedError, RunFolderError
from gradveil.flat import FlatModel
from gradveil.models.base import Normalisation, parse_normalisation
from gradveil.server import Engine, Round, ScoreRequest, learning_rate, play_round
from gradveil.tripwire import hearing

MOST_PERSONAL = 200
"""Clients with a model of their own that are scored on all test images at the end."""
Row = dict[str, object]


class Simulation:
    """A federated training run in memory; use as a context manager.

    Results depend on the settings alone: not on the number of workers, nor on what ran before in this process.

    Args:
        settings: all that decides the result.
        data_root: where data sets are looked for; by default GRADVEIL_DATA, else the user's cache.
        workers: processes that train clients; 0 trains in this process, None takes one a core.
        clients_folder: where clients keep their private files; by default a temporary folder.
        dataset: a data set at hand, in place of the named one.
        aux: public images at hand, in place of the named ones.
        defence: a defence object, in place of the named one (needs ``workers=0``).
        network: builds the network, in place of the named model (needs ``workers=0``).

    Example:
        >>> settings = TrainSettings(rounds=1, clients=2, partition="iid:images=20", model="logistic")
        >>> with Simulation(settings, workers=0) as simulation:
        ...     for row in simulation.run():
        ...         print(row["round"], 0 <= row["accuracy"] <= 1)
        1 True
    """

    def __init__(
        self,
        settings: TrainSettings,
        *,
        data_root: Path | None = None,
        workers: int | None = None,
        clients_folder: Path | None = None,
        dataset: Dataset | None = None,
        aux: Dataset | None = None,
        defence: Defence | None = None,
        network: Callable[[], nn.Module] | None = None,
    ) -> None:
        live = defence is not None or network is not None
        if live and workers:
            raise ConfigError(f"workers must be 0 when a defence or network object is given, got {workers}.")
        self.settings = settings
        self.defence = defence or build_defence(settings.defence)
        refuse_in_part(self.defence, settings)
        device = usable_device(settings.device)
        self.dataset = dataset or load_dataset(settings.dataset, data_root)
        guards = self.defence.early_clients(settings.clients)
        if settings.aux and not self.defence.uses_aux:
            raise ConfigError(
                f"aux is for defences that use public images, got it with {self.defence.spec!r}. Drop --aux."
            )
        self.data: FederatedData = federate(
            self.dataset,
            settings.partition,
            settings.clients,
            settings.sensitive,
            settings.seed,
            aux or (load_dataset(settings.aux, data_root) if settings.aux else None),
            guards,
            self.defence.aux_labels,
        )
        protected = settings.defended or range(settings.clients)
        self.defence.check_images(min(self.data.sizes[client] for client in protected), aux=bool(self.data.public))
        if self.defence.marked_only and not self.data.count("sensitive", None):
            raise ConfigError(
                f"Defence {self.defence.spec!r} protects images that are marked sensitive, got none. "
                "Mark a share of each client's with --sensitive 0.1, or all with --sensitive 1."
            )
        shape, num_classes = self.dataset.shape, self.dataset.num_classes
        normalisation = chosen_normalisation(settings.normalise, self.dataset)
        build_network = network or (lambda: make_network(settings, shape, num_classes, normalisation))
        module = defended(build_network(), self.defence, settings.seed, "server").to(device)
        check_output(module, shape, num_classes, device)
        self.defence.check(module)
        self.net = FlatModel(module, is_private(module, self.defence, settings))
        self.model: dict[str, Tensor] = _copy(self.net.shared_tensors(self.net.values[self.net.shared]))
        self.server_state: dict[str, Tensor] = {}
        self.sizes = self.data.sizes
        self._stack = ExitStack()
        folder = clients_folder or Path(self._stack.enter_context(TemporaryDirectory(prefix="gradveil-clients-")))
        self.num_workers = 0 if live or device.type != "cpu" else num_workers(workers, settings.num_sampled)
        self.engine: Engine
        if self.num_workers:
            blueprint = Blueprint(settings, shape, num_classes, normalisation, folder)
            self.engine = self._stack.enter_context(Workers(blueprint, self.data, self.net, self.num_workers))
        else:
            self.engine = InProcess(settings, self.data, self.defence, build_network, folder)

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def resume(self, model: Mapping[str, Tensor], server_state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's model and server state."""
        if {name: tensor.shape for name, tensor in model.items()} != {n: t.shape for n, t in self.model.items()}:
            raise RunFolderError("The checkpoint must fit the model of this run, got other tensors or shapes.")
        self.model = {name: model[name].to(self.net.values) for name in self.model}
        self.server_state = dict(server_state)

    def run(self, first: int = 1, on_round: Callable[[Round], None] = lambda _: None) -> Iterator[Row]:
        """Play the rounds from ``first`` on; yields a row after each. With no rounds, only evaluates."""
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
        started = time.perf_counter()
        self.net.receive(self.net.shared_vector(self.model))
        with hearing() as alarms:
            played = play_round(
                number, self.settings, self.defence, self.engine, self.sizes, self.net.module, self.model,
                self.server_state,
            )  # fmt: skip
        self.model = played.model
        seconds = time.perf_counter() - started
        due = number % self.settings.eval_every == 0 or number == self.settings.rounds
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
        return row, played

    def client_rows(self, round_number: int) -> list[Row]:
        """Each client's size and the accuracy of its model on its own training images and on the test images.

        Where clients have private tensors, each has a model of its own; the test images are then scored for the first
        `MOST_PERSONAL` clients only.
        """
        everyone = range(self.settings.clients)
        personal = everyone[:MOST_PERSONAL] if self.net.has_private else range(0)
        asked = [ScoreRequest("test", client) for client in personal] or [ScoreRequest("test")]
        with single_thread():
            own = self.engine.score(round_number, [ScoreRequest("own", client) for client in everyone], self.model)
            test = [score.accuracy for score in self.engine.score(round_number, asked, self.model)]
        others = None if personal else test[0]
        return [
            {
                "client": client,
                "images": self.sizes[client],
                "accuracy_own": own[client].accuracy,
                "accuracy_test": test[client] if client < len(personal) else others,
            }
            for client in everyone
        ]

    def _evaluate(self, number: int, clients: tuple[int, ...]) -> Mapping[str, float | None]:
        """Accuracy and loss on the test images, and accuracy on the sensitive ones.

        Where parts of the model are private, no single model exists: the figures are means over the round's clients,
        each with its own, and ``accuracy_server`` is that of the server's model with its own random private part.
        """
        views: tuple[int | None, ...] = clients if self.net.has_private and clients else (None,)
        has_sensitive = bool(self.data.count("sensitive", None))
        requests = [ScoreRequest("test", view) for view in views]
        requests += [ScoreRequest("sensitive", view) for view in views] if has_sensitive else []
        requests += [ScoreRequest("test")] if views != (None,) else []
        scores = self.engine.score(number, requests, self.model)
        test, rest = scores[: len(views)], scores[len(views) :]
        loss = sum(score.loss for score in test) / len(test)
        if not math.isfinite(loss):
            raise DivergedError(f"The test loss must stay finite, got {loss}: the training diverged. Lower --lr.")
        figures: dict[str, float | None] = dict.fromkeys(_FIGURES)
        figures["accuracy"] = sum(score.accuracy for score in test) / len(test)
        figures["loss"] = loss
        if has_sensitive:
            figures["accuracy_sensitive"] = sum(score.accuracy for score in rest[: len(views)]) / len(views)
        if views != (None,):
            figures["accuracy_server"] = scores[-1].accuracy
        return figures


@contextmanager
def single_thread() -> Iterator[None]:
    """One torch thread: the bits are those of a worker, and no idle thread spins on the workers' cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_FIGURES = ("accuracy", "loss", "accuracy_sensitive", "accuracy_server")


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def usable_device(text: str) -> torch.device:
    """The device of this name, tried out; an error where torch can't use it here."""
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(
            f"device must be one that torch can use here, got {text!r}: {str(error).splitlines()[0]}"
        ) from error
    return device


def chosen_normalisation(text: str, dataset: Dataset) -> Normalisation | None:
    """How a run normalises its input: by the data set's constants, or as the text says."""
    if text == "dataset":
        return Normalisation(dataset.mean, dataset.std)
    return parse_normalisation(text, dataset.shape[0], also="dataset, ")


def num_workers(asked: int | None, tasks: int) -> int:
    """Processes to start for so many tasks, by default one a core; a single one would only add the copying."""
    if asked is not None and asked < 0:
        raise ConfigError(f"workers must be at least 0, got {asked}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores if asked is None else asked, tasks)
    return count if count > 1 or asked else 0


def check_output(module: nn.Module, shape: tuple[int, int, int], num_classes: int, device: torch.device) -> None:
    """A model that can't take the images, or has another number of classes, is found before any work."""
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.zeros(2, *shape, device=device))
    except Exception as error:
        raise ConfigError(
            f"The model must take images of shape {shape}, got {type(error).__name__}: {error}."
        ) from error
    if not isinstance(output, Tensor):
        raise ConfigError(f"The model must return (N, {num_classes}) for this data set, got a {type(output).__name__}.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("The model must have parameters to train, got a model without any.")
    if tuple(output.shape) != (2, num_classes):
        raise ConfigError(
            f"The model must return (N, {num_classes}) for this data set, got {tuple(output.shape)} for N = 2."
        )
