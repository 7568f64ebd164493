"""The engine on real machines, over Flower: the server plays the same rounds, and every site trains on its own data.

A Flower app needs only ``server_app()`` from here and ``client_app()`` from `gradveil.engines.flower_site`: see
docs/flower.md and examples/flower. Flower's run config holds the settings of `TrainSettings`; it may also have ``out``,
a folder of the server, ``data-root``, where the server looks for named data sets, and the server's limits
(`gradveil.engines.answer_limits`).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split, load_dataset
from gradveil.data.auxiliary import joined
from gradveil.data.federated import FederatedData
from gradveil.defences import Defence, build_defence, planned_defence
from gradveil.engines.answer_limits import AnswerLimits, read_limits
from gradveil.engines.devices import make_network
from gradveil.engines.flower_engine import FlowerEngine
from gradveil.engines.in_process import InProcess
from gradveil.engines.nodes import Nodes
from gradveil.engines.questions import Patience
from gradveil.engines.run_folder import RunFolder
from gradveil.engines.simulation import check_choices, chosen_normalisation, refuse_unmarked, server_network
from gradveil.engines.site import run_settings
from gradveil.engines.training import Training, record
from gradveil.errors import ConfigError, GradveilError
from gradveil.federated.answers import ExpectedUpdate
from gradveil.federated.server import last_rounds
from gradveil.models.trunk import trunk_of
from gradveil.validate import in_range

from flwr.app import Context  # isort: skip - messages says if it is missing
from flwr.serverapp import Grid, ServerApp  # isort: skip

LOG = logging.getLogger("flwr")
_TRAINED = "flower.trained"
"""Where a checkpoint keeps the last round of each client."""


def server_app() -> ServerApp:
    """Return a ServerApp that trains by the run config, into the server's folder ``out`` if the run config has one.

    The folder gets the rows, the checkpoint, the model and one row per client; a run with the same settings continues
    there.
    """
    LOG.addFilter(_only_the_reason)
    app = ServerApp()
    app.main()(_run)
    return app


def _run(grid: Grid, context: Context) -> None:
    out, root = (str(context.run_config.get(key, "")) for key in ("out", "data-root"))
    settings, limits = run_settings(context), read_limits(context.run_config)
    place = Path(root) if root else None
    dataset = load_dataset(settings.dataset, place)
    aux = load_dataset(settings.aux, place) if settings.aux else None
    training = flower_training(grid, settings, dataset, limits, aux)
    if not out:
        for row in training.run():
            _say(row)
        return
    with RunFolder(Path(out)) as folder:
        record(training, folder, dataset, resume=True, progress=lambda done, row, doing: _say(row, doing))


def _only_the_reason(record: logging.LogRecord) -> bool:
    """Take the calls that led to an error of ours out of Flower's log: the reason says it all."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, GradveilError):
        record.msg, record.args = "The run ended. %s: %s", (type(error).__name__, str(error))
        record.exc_info = record.exc_text = None
    return True


class FlowerTraining(Training):
    """The server's side of a run over Flower; its checkpoint also says in which round each client trained last."""

    engine: FlowerEngine

    def resume(self, model: Mapping[str, Tensor], server_state: Mapping[str, Tensor], done: int = 0) -> None:
        """Continue from a checkpoint's model and server state, after ``done`` rounds."""
        kept = dict(server_state)
        trained = kept.pop(_TRAINED, None)
        super().resume(model, kept, done)
        if trained is None:
            self.engine.trained |= last_rounds(self.settings, self.defence, self.sizes, done)
        else:
            self.engine.trained |= enumerate(trained.tolist())

    @property
    def checkpoint(self) -> dict[str, Tensor]:
        """Return the server's own state, and the last round of each client."""
        trained = [self.engine.trained[client] for client in range(self.settings.clients)]
        return super().checkpoint | {_TRAINED: torch.tensor(trained)}


def flower_training(
    grid: Grid,
    settings: TrainSettings,
    dataset: Dataset,
    limits: AnswerLimits | None = None,
    aux: Dataset | None = None,
    *,
    wait: float | None = None,
) -> FlowerTraining:
    """Return the server's side of a run over Flower; of ``dataset`` only the test images are used.

    A model that is made of public images takes those of ``aux``. Sites make the same model of their own copy, and
    refuse the run if its fingerprint is another one. ``wait`` is the limits' ``wait_seconds``, if it is given.
    """
    limits = limits or AnswerLimits()
    limits = limits if wait is None else replace(limits, wait_seconds=wait)
    settings = build_defence(settings.defence).training(settings)
    settings = replace(settings, bad_answers="drop") if limits.min_clients else settings
    defence = planned_defence(settings)
    _check_settings(settings, defence, limits)
    normalisation = chosen_normalisation(settings.normalise, dataset)
    nobody = _nobody(settings, dataset, aux)
    build_network = partial(make_network, settings, dataset.shape, dataset.num_classes, normalisation, nobody.aux)
    net = server_network(settings, defence, build_network, dataset.shape, dataset.num_classes)
    here = InProcess(settings, nobody, defence, build_network, Path("unused"))
    expected = ExpectedUpdate.of(net.to_update(net.values[net.shared], 0), defence, limits.max_norm)
    nodes = _gathered(grid, settings, defence, limits)
    engine = FlowerEngine(nodes, settings, defence, dataset, here, expected, limits)
    engine.pin(trunk_of(net.module))
    refuse_unmarked(defence, engine.num_sensitive)
    return FlowerTraining(settings, defence, net, engine, engine.sizes, has_sensitive=bool(engine.num_sensitive))


def _nobody(settings: TrainSettings, dataset: Dataset, aux: Dataset | None) -> FederatedData:
    """Return the server's own data: test images, and public images if there are any, but no client's image."""
    none, public = Split(dataset.train.images[:0], dataset.train.labels[:0]), None
    if aux is not None:
        both, first = joined(dataset, aux, labelled=False), len(dataset.train)
        public = Split(both.images[first:], both.labels[first:])
    ends = np.zeros(settings.clients + 1, int)
    return FederatedData(none, dataset.test, np.arange(0), ends, np.zeros(0, bool), public)


def _check_settings(settings: TrainSettings, defence: Defence, limits: AnswerLimits) -> None:
    """Raise if settings contradict the defence or can't be used over Flower."""
    check_choices(settings, defence)
    in_range("min_clients", limits.min_clients, 0, settings.num_sampled)
    if settings.aggregation == "secure":
        _check_secure(settings, limits)
    if settings.canaries:
        raise ConfigError(
            f"canaries are played in a simulation, got {settings.canaries} in a run over Flower. Set canaries = 0, and "
            "measure the same settings with gradveil train --canaries."
        )


def _check_secure(settings: TrainSettings, limits: AnswerLimits) -> None:
    """Raise if settings do not go with sums of masked whole numbers."""
    if not settings.sum_bits:
        raise ConfigError(
            "aggregation secure adds up whole numbers over Flower, got sum-bits = 0. Set sum-bits = 22, and sum-range "
            "to the largest entry of a weighted update."
        )
    if limits.max_norm:
        raise ConfigError(
            f"max-norm bounds single updates, which aggregation secure hides, got {limits.max_norm:g}. Drop max-norm, "
            "or use a defence that clips."
        )
    if settings.sampling != "uniform":
        raise ConfigError(
            f"aggregation secure needs clients that count once in a sum, got sampling {settings.sampling!r}. Use "
            "sampling = uniform."
        )


def _gathered(grid: Grid, settings: TrainSettings, defence: Defence, limits: AnswerLimits) -> Nodes:
    """Return the connection to the nodes, once those that the run needs are there."""
    patience = Patience(limits.round_seconds or None, limits.wait_seconds)
    nodes = Nodes(grid, settings.clients, limits.max_images, patience)
    stop, early = settings.bad_answers == "stop", defence.early_clients(settings.clients)
    nodes.gather(stop=stop, fewest=limits.min_clients, needed=early)
    return nodes


def _say(row: Mapping[str, object] | None, doing: str = "training") -> None:
    LOG.info("%s: %s", doing, {} if row is None else dict(row))
