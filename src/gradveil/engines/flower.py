"""The engine on real machines, over Flower: the server plays the same rounds, and every site trains on its own data.

A Flower app needs only ``server_app()`` from here and ``client_app()`` from `gradveil.engines.flower_site`: see
docs/flower.md and examples/flower. Flower's run config holds the settings of `TrainSettings`; it may also have ``out``,
a folder of the server, and ``data-root``, where the server looks for named data sets.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split, load_dataset
from gradveil.data.auxiliary import joined
from gradveil.data.federated import FederatedData
from gradveil.defences import Defence, build_defence, planned_defence
from gradveil.engines.devices import make_network
from gradveil.engines.in_process import InProcess
from gradveil.engines.messages import listed, read_arrays, read_config, whole
from gradveil.engines.nodes import Failure, Nodes, content_of
from gradveil.engines.run_folder import RunFolder
from gradveil.engines.simulation import check_choices, chosen_normalisation, refuse_unmarked, server_network
from gradveil.engines.site import run_settings
from gradveil.engines.site_codes import CODES
from gradveil.engines.training import Training, record
from gradveil.engines.tripwire import announce
from gradveil.errors import ConfigError, GradveilError, MessageError
from gradveil.federated.answers import ExpectedUpdate, check_score, check_sent
from gradveil.federated.client import Score
from gradveil.federated.server import Engine, Missing, ScoreRequest, Sent, last_rounds
from gradveil.models.trunk import Trunk, trunk_of
from gradveil.registry import convert
from gradveil.types import Tensors, Update
from gradveil.validate import in_range

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict  # isort: skip - messages says if it is missing
from flwr.serverapp import Grid, ServerApp  # isort: skip

LOG = logging.getLogger("flwr")


@dataclass(frozen=True)
class AnswerLimits:
    """What the server accepts of any client.

    Attributes:
        max_images: largest number of images that a client may state; its update is weighted by it.
        max_norm: largest Euclidean norm of an update; 0 means any.
    """

    max_images: int = 1_000_000
    max_norm: float = 0.0

    def __post_init__(self) -> None:
        in_range("max_images", self.max_images, 1)
        in_range("max_norm", self.max_norm, 0)


class FlowerEngine:
    """Plays each client on the node of its site; asks the nodes once for their numbers.

    No answer is believed: see `gradveil.federated.answers` and `gradveil.engines.messages`.

    Args:
        nodes: the connection to the nodes.
        settings: of the run.
        defence: shared by server and clients.
        dataset: the server's; nodes build their network for its shape, classes and normalisation.
        here: scores the server's own model.
        expected: what updates must be.
        limits: what clients may state.

    Attributes:
        sizes: number of images of each client.
        num_sensitive: number of marked images of all clients.
    """

    def __init__(
        self,
        nodes: Nodes,
        settings: TrainSettings,
        defence: Defence,
        dataset: Dataset,
        here: Engine,
        expected: ExpectedUpdate,
        limits: AnswerLimits,
    ) -> None:
        self._ask, self._here = nodes.ask, here
        self._settings, self._defence, self._expected, self._limits = settings, defence, expected, limits
        self._num_classes = dataset.num_classes
        normalisation = chosen_normalisation(settings.normalise, dataset)
        self._network = ConfigRecord({"shape": list(dataset.shape), "num-classes": dataset.num_classes})
        if normalisation is not None:
            self._network["mean"], self._network["std"] = list(normalisation.mean), list(normalisation.std)
        found = nodes.introduced(settings.clients, limits.max_images, stop=settings.bad_answers == "stop")
        self._nodes = [found[number].node for number in range(settings.clients)]
        self.sizes = [found[number].images for number in range(settings.clients)]
        self.num_sensitive = sum(each.sensitive for each in found.values())

    def pin(self, trunk: Trunk | None) -> None:
        """Tell sites which frozen part the server's network has; a site that has built another one refuses."""
        if trunk is not None:
            self._network["trunk"] = trunk.fingerprint

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterator[Sent | Missing]:
        """Let clients train at their sites, all at once; yield in the order of ``clients``."""
        content = self._content(round_number, model) | {"public": ArrayRecord(dict(public))}
        content["step"] = ConfigRecord({"lr": lr})
        before = self._before(round_number - 1)
        answers = self._ask("train", {self._nodes[client]: content | before[client] for client in clients})
        for client in clients:
            try:
                yield self._sent(client, round_number, answers[self._nodes[client]])
            except GradveilError as error:
                LOG.warning("%s", error)
                yield Missing(client, error)

    def _sent(self, client: int, round_number: int, answer: RecordDict | Failure) -> Sent:
        """Return a client's update. Raise if the answer breaks any rule; the error names the client."""
        with _of_client(client), _no_foreign_error():
            content = content_of(answer, f"Client {client}")
            facts, form = read_config(content, "facts"), self._expected.sent
            likes = (None, None) if form is None else (form.tensors, form.buffers)
            most = self._expected.most_entries
            parts = (read_arrays(content, k, like, most) for k, like in zip(("tensors", "buffers"), likes, strict=True))
            tensors, buffers = parts
            update = Update(tensors, whole(facts, "images", 0, self.sizes[client]), buffers)
            check_sent(update, self._expected, self.sizes[client])
            reports = self._reports(facts)
            if whole(facts, "alarms", 0, 1):
                announce(
                    f"The model that client {client} received in round {round_number} must contain no traps, got some. "
                    "Its log says which."
                )
            return Sent(client, update, reports, self._expected)

    def _reports(self, facts: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers that the defence declares; others are an error."""
        known = self._defence.reports
        names = listed(facts, "report-names", str, len(known))
        values = listed(facts, "report-values", (float, int), len(known))
        if len(names) != len(values) or not set(names) <= set(known) or not all(map(math.isfinite, values)):
            raise MessageError("Reports must be finite numbers under the defence's names, got others.")
        return dict(zip(names, map(float, values), strict=True))

    def score(self, round_number: int, requests: Sequence[ScoreRequest], model: Tensors) -> list[Score]:
        """Score the server's model on the server's test images here, and everything else at the sites.

        A site scores its own images only; so a client's own model is scored on this client's marked images only. A
        score that a site does not give has a count of 0.
        """
        at_server = [request for request in requests if request == ScoreRequest("test")]
        totals = dict.fromkeys(requests, Score())
        totals |= zip(at_server, self._here.score(round_number, at_server, model), strict=True)
        shared, before = self._content(round_number, model), self._before(round_number)
        asked = {
            client: [request for request in requests if request.client in (client, None) and request not in at_server]
            for client in range(len(self._nodes))
        }
        contents = {
            self._nodes[client]: shared | before[client] | {"requests": _to_config(mine)}
            for client, mine in asked.items()
            if mine
        }
        answers = self._ask("evaluate", contents)
        for client, mine in asked.items():
            if mine:
                for request, score in zip(mine, self._scores(client, mine, answers[self._nodes[client]]), strict=True):
                    totals[request] += score
        return [totals[request] for request in requests]

    def _scores(self, client: int, asked: Sequence[ScoreRequest], answer: RecordDict | Failure) -> list[Score]:
        """Return a client's scores; raise if they are impossible, or leave them out, as the settings say."""
        try:
            with _of_client(client), _no_foreign_error():
                return self._read_scores(client, asked, content_of(answer, f"Client {client}"))
        except GradveilError as error:
            if self._settings.bad_answers == "stop":
                raise
            LOG.warning("%s", error)
            return [Score()] * len(asked)

    def _read_scores(self, client: int, asked: Sequence[ScoreRequest], content: RecordDict) -> list[Score]:
        facts, most = read_config(content, "facts"), len(asked)
        given = listed(facts, "given", str, most)
        correct, counts, lengths = (listed(facts, key, int, most) for key in ("correct", "count", "classes"))
        losses = listed(facts, "loss-sum", (int, float), most)
        if any(len(values) != most for values in (given, correct, losses, counts, lengths)):
            raise MessageError(f"Scores must be given for all {most} requests, got another number of them.")
        by_class = [listed(facts, key, int, most * self._num_classes) for key in ("class-correct", "class-count")]
        if not {0, self._num_classes}.issuperset(lengths) or any(len(each) != sum(lengths) for each in by_class):
            raise MessageError("Numbers per class must be given for all classes or none, got other numbers.")
        pieces = zip(*(_pieces(values, lengths) for values in by_class), strict=True)
        scores = []
        figures = zip(correct, losses, counts, pieces, strict=True)
        for request, kind, (right, loss, count, classes) in zip(asked, given, figures, strict=True):
            score = Score(right, loss, count, *classes)
            most_images = self._limits.max_images if request.images == "test" else self.sizes[client]
            check_score(score, most_images, self._num_classes)
            if kind not in ("exact", "noised"):
                reason = kind if kind in CODES else "unknown"
                LOG.info("Client %s gave no score of %s images (code %r).", client, request.images, reason)
            scores.append(score if kind in ("exact", "noised") else Score())
        return scores

    def _content(self, round_number: int, model: Tensors) -> dict[str, ArrayRecord | ConfigRecord]:
        arrays, number = ArrayRecord(dict(model)), ConfigRecord({"number": round_number})
        return {"model": arrays, "round": number, "network": self._network}

    def _before(self, done: int) -> list[dict[str, ConfigRecord]]:
        """Return the last finished round in which each client trained, or 0, so that it notices lost state."""
        last = last_rounds(self._settings, self._defence, self.sizes, done)
        return [{"before": ConfigRecord({"trained": last.get(client, 0)})} for client in range(len(self.sizes))]


def server_app(*, timeout: float | None = None, wait: float = 600.0) -> ServerApp:
    """Return a ServerApp that trains by the run config, into the server's folder ``out`` if the run config has one.

    The folder gets the rows, the checkpoint, the model and one row per client; a run with the same settings continues
    there.
    """

    def main(grid: Grid, context: Context) -> None:
        out, root = (str(context.run_config.get(key, "")) for key in ("out", "data-root"))
        settings, limits = run_settings(context), _limits(context)
        place = Path(root) if root else None
        dataset = load_dataset(settings.dataset, place)
        aux = load_dataset(settings.aux, place) if settings.aux else None
        training = flower_training(grid, settings, dataset, limits, aux, timeout=timeout, wait=wait)
        if not out:
            for row in training.run():
                _say(row)
            return
        with RunFolder(Path(out)) as folder:
            record(training, folder, dataset, resume=True, progress=lambda done, row, doing: _say(row, doing))

    app = ServerApp()
    app.main()(main)
    return app


def flower_training(
    grid: Grid,
    settings: TrainSettings,
    dataset: Dataset,
    limits: AnswerLimits | None = None,
    aux: Dataset | None = None,
    *,
    timeout: float | None = None,
    wait: float = 600.0,
) -> Training:
    """Return the server's side of a run over Flower; of ``dataset`` only the test images are used.

    A model that is made of public images takes those of ``aux``. Sites make the same model of their own copy, and
    refuse the run if its fingerprint is another one.
    """
    settings = build_defence(settings.defence).training(settings)
    defence = planned_defence(settings)
    check_choices(settings, defence)
    if settings.canaries:
        raise ConfigError(
            f"canaries are played in a simulation, got {settings.canaries} in a run over Flower. Set canaries = 0, and "
            "measure the same settings with gradveil train --canaries."
        )
    normalisation = chosen_normalisation(settings.normalise, dataset)
    nobody = _nobody(settings, dataset, aux)
    build_network = partial(make_network, settings, dataset.shape, dataset.num_classes, normalisation, nobody.aux)
    net = server_network(settings, defence, build_network, dataset.shape, dataset.num_classes)
    here = InProcess(settings, nobody, defence, build_network, Path("unused"))
    limits = limits or AnswerLimits()
    expected = ExpectedUpdate.of(net.to_update(net.values[net.shared], 0), defence, limits.max_norm)
    nodes = Nodes(grid, timeout, wait)
    engine = FlowerEngine(nodes, settings, defence, dataset, here, expected, limits)
    engine.pin(trunk_of(net.module))
    refuse_unmarked(defence, engine.num_sensitive)
    return Training(settings, defence, net, engine, engine.sizes, has_sensitive=bool(engine.num_sensitive))


def _nobody(settings: TrainSettings, dataset: Dataset, aux: Dataset | None) -> FederatedData:
    """Return the server's own data: test images, and public images if there are any, but no client's image."""
    none, public = Split(dataset.train.images[:0], dataset.train.labels[:0]), None
    if aux is not None:
        both, first = joined(dataset, aux, labelled=False), len(dataset.train)
        public = Split(both.images[first:], both.labels[first:])
    ends = np.zeros(settings.clients + 1, int)
    return FederatedData(none, dataset.test, np.arange(0), ends, np.zeros(0, bool), public)


def _limits(context: Context) -> AnswerLimits:
    """Return the server's limits from the run config; 0 or an empty text is the default."""
    keys = {"max-images": "max_images", "max-norm": "max_norm"}
    given = {keys[key]: value for key, value in context.run_config.items() if key in keys and value not in ("", 0)}
    return AnswerLimits(**convert(AnswerLimits, given, owner="a server's limits"))


@contextmanager
def _of_client(client: int) -> Iterator[None]:
    """Let an error about a message name the client."""
    try:
        yield
    except MessageError as error:
        raise MessageError(f"The answer of client {client} was not used. {error}") from error


@contextmanager
def _no_foreign_error() -> Iterator[None]:
    """Turn an error that no check foresaw into one about the message."""
    try:
        yield
    except GradveilError:
        raise
    except Exception as error:  # whatever Python meets in values that somebody made up
        raise MessageError(f"A message must be one that can be read, got {type(error).__name__} on reading.") from error


def _say(row: Mapping[str, object] | None, doing: str = "training") -> None:
    LOG.info("%s: %s", doing, {} if row is None else dict(row))


def _pieces(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield consecutive pieces of these lengths."""
    left = iter(numbers)
    return (tuple(islice(left, length)) for length in lengths)


def _to_config(requests: Sequence[ScoreRequest]) -> ConfigRecord:
    own = [request.client is not None for request in requests]
    return ConfigRecord({"images": [request.images for request in requests], "own": own})
