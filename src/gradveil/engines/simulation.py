"""The embedded federated simulation: data, clients, server and engine put together."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.federated import FederatedData, federate
from gradveil.defences import Defence, build_defence
from gradveil.engines.canaries import Canaries
from gradveil.engines.devices import defended, is_private, make_network, refuse_in_part
from gradveil.engines.in_process import InProcess
from gradveil.engines.rehearsal import rehearsed
from gradveil.engines.training import Row, Training, single_thread
from gradveil.engines.workers import Blueprint, Workers
from gradveil.errors import ConfigError
from gradveil.federated.client import check_trainable
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import Protocol
from gradveil.federated.server import Engine, Round, last_rounds, learning_rate
from gradveil.models.base import Normalisation, model_uses_aux, parse_normalisation
from gradveil.storage import PrivateFolder
from gradveil.threat.tap import Tap


class Simulation(Training):
    """A federated training run in memory; use as a context manager.

    Results depend only on the settings, not on the number of workers or on earlier runs in this process.

    Args:
        settings: everything that decides the result.
        data_root: the folder of named data sets; by default GRADVEIL_DATA, or the user's cache.
        workers: processes that train clients; 0 trains in this process, None takes one per core.
        clients_folder: where clients keep their private files; by default a temporary folder.
        dataset: a data set object, instead of the named one.
        aux: public images as an object, instead of the named ones.
        defence: a defence object, instead of the named one (needs ``workers=0``).
        network: builds the network, instead of the named model (needs ``workers=0``).

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
        self._tap: Tap | None = None
        given = defence or build_defence(settings.defence)
        if given.rehearses:
            dataset, aux = _both(settings, data_root, dataset, aux)
            settings, given = rehearsed(settings, given, dataset, aux, _scored)
        settings = given.training(settings)
        defence = given.planned(settings)
        check_choices(settings, defence)
        device = usable_device(settings.device)
        self.dataset, aux = _both(settings, data_root, dataset, aux)
        self.data: FederatedData = deal(self.dataset, settings, defence, aux)
        protected = settings.defended or range(settings.clients)
        defence.check_images(min(self.data.sizes[client] for client in protected), aux=bool(self.data.public))
        refuse_unmarked(defence, self.data.count("sensitive", None))
        shape, num_classes = self.dataset.shape, self.dataset.num_classes
        normalisation = chosen_normalisation(settings.normalise, self.dataset)
        build_network = network or (lambda: make_network(settings, shape, num_classes, normalisation, self.data.aux))
        net = server_network(settings, defence, build_network, shape, num_classes)
        self._canaries = Canaries.beside(settings, defence, net, self.data.sizes, shape) if settings.canaries else None
        self._stack = ExitStack()
        folder = clients_folder or Path(self._stack.enter_context(TemporaryDirectory(prefix="gradveil-clients-")))
        self._clients = folder
        self.num_workers = 0 if live or device.type != "cpu" else num_workers(workers, settings.num_sampled)
        engine: Engine
        if self.num_workers:
            blueprint = Blueprint(settings, shape, num_classes, normalisation, folder)
            engine = self._stack.enter_context(Workers(blueprint, self.data, net, self.num_workers))
        else:
            engine = InProcess(settings, self.data, defence, build_network, folder)
        has_sensitive = bool(self.data.count("sensitive", None))
        super().__init__(settings, defence, net, engine, self.data.sizes, has_sensitive=has_sensitive)

    def resume(self, model: Mapping[str, Tensor], server_state: Mapping[str, Tensor], done: int = 0) -> None:
        """Continue from a checkpoint. Raise if a client that trained has lost its keys since."""
        state = dict(server_state)
        if self._canaries is not None:
            self._canaries.resume(state)
        super().resume(model, state, done)
        if not self.net.has_private:
            return
        for client, last in sorted(last_rounds(self.settings, self.defence, self.sizes, done).items()):
            PrivateFolder(self._clients / str(client) / "private").require_state(last)

    def attach(self, tap: Tap) -> None:
        """Let a tap record its rounds, which must be among the ``save_rounds`` of a training with ``workers=0``."""
        if not isinstance(self.engine, InProcess):
            raise ConfigError(f"workers must be 0 to tap a training, got {self.num_workers}.")
        missing = sorted(set(tap.clients) - set(self.settings.save_rounds))
        if missing:
            raise ConfigError(f"save_rounds must name every tapped round, got none of: {', '.join(map(str, missing))}.")
        self.engine.attach(tap)
        self._tap = tap

    def step(self, number: int) -> tuple[Row, Round]:
        """Play one round, move the global model and evaluate it; record the round if it is tapped."""
        row, played = super().step(number)
        if self._canaries is not None:
            with single_thread():
                self._canaries.play(played, self.server_state, self.data.client(0).to(self.settings.device))
            if number == self.settings.rounds:
                row |= self._canaries.figures()
        if self._tap is not None:
            self._tap.arrived(played, self.net.module, learning_rate(self.settings, number))
        return row, played

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        """Return the server's own state, and that of the canaries."""
        return super().checkpoint | ({} if self._canaries is None else self._canaries.tensors())

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _both(
    settings: TrainSettings, root: Path | None, dataset: Dataset | None, aux: Dataset | None
) -> tuple[Dataset, Dataset | None]:
    """Return the private and the public data set, loaded if they are not given as objects."""
    dataset = dataset or load_dataset(settings.dataset, root)
    return dataset, aux or (load_dataset(settings.aux, root) if settings.aux else None)


def _scored(
    settings: TrainSettings, dataset: Dataset, defence: Defence, network: Callable[[], nn.Module], folder: Path
) -> Row:
    """Train in this process; return the last row."""
    with Simulation(
        settings, workers=0, dataset=dataset, defence=defence, network=network, clients_folder=folder
    ) as simulation:
        *_, last = simulation.run()
    return last


def check_choices(settings: TrainSettings, defence: Defence) -> None:
    """Raise if settings contradict the defence."""
    refuse_in_part(defence, settings)
    if settings.aggregation == "secure" and defence.overrides("on_server"):
        raise ConfigError(
            f"aggregation must be none for defence {defence.spec!r}, whose server works on single updates, got "
            "'secure'. Drop --aggregation."
        )
    if settings.aux and not (defence.uses_aux or model_uses_aux(settings.model)):
        raise ConfigError(
            f"aux is for defences and models that use public images, got it with {defence.spec!r} and "
            f"{settings.model!r}. Drop --aux."
        )


def deal(dataset: Dataset, settings: TrainSettings, defence: Defence, aux: Dataset | None) -> FederatedData:
    """Return the data set, dealt to the clients by the settings."""
    return federate(
        dataset,
        settings.partition,
        settings.clients,
        settings.sensitive,
        settings.seed,
        aux,
        defence.early_clients(settings.clients),
        defence.aux_labels and defence.uses_aux,
    )


def refuse_unmarked(defence: Defence, num_sensitive: int) -> None:
    """Raise if a defence protects only marked images, and no client has any."""
    if defence.marked_only and not num_sensitive:
        raise ConfigError(
            f"Defence {defence.spec!r} protects images that are marked sensitive, got none. "
            "Mark a share of each client's with --sensitive 0.1, or all with --sensitive 1.0."
        )


def server_network(
    settings: TrainSettings,
    defence: Defence,
    build_network: Callable[[], nn.Module],
    shape: tuple[int, int, int],
    num_classes: int,
) -> FlatModel:
    """Return the server's network after ``on_model``. Raise if it can't be trained or protected."""
    device = usable_device(settings.device)
    module = defended(build_network(), defence, settings.seed, "server").to(device)
    check_output(module, shape, num_classes, device)
    defence.check(module, shape)
    if settings.rounds:
        check_trainable(module, defence, Protocol.of(settings).local)
    return FlatModel(module, is_private(module, defence, settings))


def usable_device(text: str) -> torch.device:
    """Return the device of this name. Raise if torch can't use it here."""
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(
            f"device must be one that torch can use here, got {text!r}: {str(error).splitlines()[0]}"
        ) from error
    return device


def chosen_normalisation(text: str, dataset: Dataset) -> Normalisation | None:
    """Return the normalisation of a run's input: the data set's constants, or those in the text."""
    if text == "dataset":
        return Normalisation(dataset.mean, dataset.std)
    return parse_normalisation(text, dataset.shape[0], also="dataset, ")


def num_workers(asked: int | None, tasks: int) -> int:
    """Return the number of processes to start for ``tasks`` tasks, by default one per core; one alone gains nothing."""
    if asked is not None and asked < 0:
        raise ConfigError(f"workers must be at least 0, got {asked}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores if asked is None else asked, tasks)
    if os.name != "posix":
        return 0  # see `gradveil.engines.shared_file`
    return count if count > 1 or asked else 0


def check_output(module: nn.Module, shape: tuple[int, int, int], num_classes: int, device: torch.device) -> None:
    """Raise before any work if a model can't take the images, or has another number of classes."""
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
