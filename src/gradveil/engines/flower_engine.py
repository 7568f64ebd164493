"""The engine that plays each client on the node of its site: questions out, answers checked before anything is used."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.defences import Defence
from gradveil.engines.answer_limits import AnswerLimits
from gradveil.engines.introductions import Failure, content_of
from gradveil.engines.messages import listed, read_arrays, read_config, whole
from gradveil.engines.nodes import Nodes
from gradveil.engines.questions import Content
from gradveil.engines.reading import no_foreign_error, of_client
from gradveil.engines.secure_rounds import secure_total
from gradveil.engines.simulation import chosen_normalisation
from gradveil.engines.site_codes import CODES
from gradveil.engines.sum_opening import SumPlan
from gradveil.engines.tripwire import announce
from gradveil.errors import ConfigError, GradveilError, MessageError
from gradveil.federated.answers import ExpectedUpdate, check_score, check_sent
from gradveil.federated.client import Score
from gradveil.federated.secure_sum import Quantiser
from gradveil.federated.server import Engine, Missing, ScoreRequest, Sent, Summed, round_weights
from gradveil.models.trunk import Trunk
from gradveil.types import Tensors, Update

from flwr.app import ArrayRecord, ConfigRecord, RecordDict  # isort: skip - messages says if it is missing

LOG = logging.getLogger("flwr")


class FlowerEngine:
    """Plays each client on the node of its site.

    No answer is believed: see `gradveil.federated.answers` and `gradveil.engines.messages`.

    Args:
        nodes: the connection to the nodes, which have introduced themselves.
        settings: of the run.
        defence: shared by server and clients.
        dataset: the server's; nodes build their network for its shape, classes and normalisation.
        here: scores the server's own model.
        expected: what updates must be.
        limits: what clients may state.

    Attributes:
        sizes: number of images of each client; 0 for a client that was never there.
        num_sensitive: number of marked images of all clients.
        fewest: number of clients without which a round is not used.
        trained: the last finished round in which each client trained, so that it notices lost state.
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
        self._nodes, self._here = nodes, here
        self._settings, self._defence, self._expected, self._limits = settings, defence, expected, limits
        self._num_classes = dataset.num_classes
        normalisation = chosen_normalisation(settings.normalise, dataset)
        self._network = ConfigRecord({"shape": list(dataset.shape), "num-classes": dataset.num_classes})
        if normalisation is not None:
            self._network["mean"], self._network["std"] = list(normalisation.mean), list(normalisation.std)
        everyone, known = range(settings.clients), nodes.known
        self.sizes = [known[number].images if number in known else 0 for number in everyone]
        self.num_sensitive = sum(each.sensitive for each in known.values())
        self.fewest, self.trained = limits.min_clients, dict.fromkeys(everyone, 0)
        self._early = defence.early_clients(settings.clients)
        self._needed = list(everyone) if settings.bad_answers == "stop" else list(self._early)

    def pin(self, trunk: Trunk | None) -> None:
        """Tell sites which frozen part the server's network has; a site that has built another one refuses."""
        if trunk is not None:
            self._network["trunk"] = trunk.fingerprint

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterator[Sent | Missing | Summed]:
        """Let clients train at their sites, all at once; yield in the order of ``clients``.

        With ``aggregation = secure`` all but early clients send their updates masked, and one sum is yielded.
        """
        content = self._content(round_number, model) | {"public": ArrayRecord(dict(public))}
        content["step"] = ConfigRecord({"lr": lr})
        contents: dict[int, Content] = {client: {**content, **self._before(client)} for client in clients}
        if clients and self._settings.aggregation == "secure" and clients[0] not in self._early:
            yield from self._summed(round_number, contents)
            return
        answers = self._ask("train", contents, self.fewest)
        for client in clients:
            try:
                yield self._sent(client, round_number, answers[client])
            except GradveilError as error:
                LOG.warning("%s", error)
                yield Missing(client, error)

    def _summed(self, round_number: int, contents: Mapping[int, Content]) -> Iterator[Missing | Summed]:
        """Yield why clients are missing, and the sum of all others' updates."""
        settings = self._settings
        half = len(contents) // 2 + 1
        fewest = max(2, half, self.fewest, self._defence.fewest_clients)
        threshold = len(contents) if settings.bad_answers == "stop" else min(fewest, len(contents))
        weights = round_weights(settings, self._defence, self.sizes, round_number)
        late = [client for client in contents if not weights[client]]  # of no weight: sites refuse such sums
        yield from (
            Missing(client, MessageError(f"Client {client} was not there before this round.")) for client in late
        )
        contents = {client: content for client, content in contents.items() if client not in late}
        if self._expected.sent is None:
            raise ConfigError(f"Defence {self._defence.spec!r} does not say what it sends, which a secure sum needs.")
        plan = SumPlan(
            round_number,
            {client: weights[client] for client in contents},
            threshold,
            Quantiser(settings.sum_bits, settings.sum_range),
            self._expected.sent,
            contents,
        )
        found = secure_total(plan, self._ask, self._check_facts)
        yield from (Missing(client, error) for client, error in found.lost.items())
        self.trained |= dict.fromkeys(found.facts, round_number)
        for client, facts in found.facts.items():
            self._announce(client, round_number, facts)
        yield Summed(tuple(found.facts), found.total, [self._reports(facts) for facts in found.facts.values()])

    def _check_facts(self, client: int, facts: Mapping[str, Any]) -> None:
        """Raise unless the plain values beside a masked update are possible."""
        whole(facts, "images", 0, self.sizes[client])
        whole(facts, "alarms", 0, 1)
        self._reports(facts)

    def _announce(self, client: int, round_number: int, facts: Mapping[str, Any]) -> None:
        if whole(facts, "alarms", 0, 1):
            announce(
                f"The model that client {client} received in round {round_number} must contain no traps, got some. "
                "Its log says which."
            )

    def _ask(self, kind: str, contents: Mapping[int, Content], fewest: int = 0) -> dict[int, RecordDict | Failure]:
        answers = self._nodes.ask(kind, contents, self._needed, min(fewest, len(contents)))
        for number, known in self._nodes.known.items():
            self.sizes[number] = known.images  # of a client that was not there before
        return answers

    def _sent(self, client: int, round_number: int, answer: RecordDict | Failure) -> Sent:
        """Return a client's update. Raise if the answer breaks any rule; the error names the client."""
        with of_client(client), no_foreign_error():
            content = content_of(answer, f"Client {client}")
            facts, form = read_config(content, "facts"), self._expected.sent
            likes = (None, None) if form is None else (form.tensors, form.buffers)
            most = self._expected.most_entries
            parts = (read_arrays(content, k, like, most) for k, like in zip(("tensors", "buffers"), likes, strict=True))
            tensors, buffers = parts
            update = Update(tensors, whole(facts, "images", 0, self.sizes[client]), buffers)
            check_sent(update, self._expected, self.sizes[client])
            self.trained[client] = round_number
            reports = self._reports(facts)
            self._announce(client, round_number, facts)
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
        shared = self._content(round_number, model)
        asked = {
            client: [request for request in requests if request.client in (client, None) and request not in at_server]
            for client in range(len(self.sizes))
        }
        contents = {
            client: shared | self._before(client) | {"requests": _to_config(mine)}
            for client, mine in asked.items()
            if mine
        }
        answers = self._ask("evaluate", contents)
        for client, mine in asked.items():
            if mine:
                for request, score in zip(mine, self._scores(client, mine, answers[client]), strict=True):
                    totals[request] += score
        return [totals[request] for request in requests]

    def _scores(self, client: int, asked: Sequence[ScoreRequest], answer: RecordDict | Failure) -> list[Score]:
        """Return a client's scores; raise if they are impossible, or leave them out, as the settings say."""
        try:
            with of_client(client), no_foreign_error():
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

    def _before(self, client: int) -> dict[str, ConfigRecord]:
        return {"before": ConfigRecord({"trained": self.trained[client]})}


def _pieces(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield consecutive pieces of these lengths."""
    left = iter(numbers)
    return (tuple(islice(left, length)) for length in lengths)


def _to_config(requests: Sequence[ScoreRequest]) -> ConfigRecord:
    own = [request.client is not None for request in requests]
    return ConfigRecord({"images": [request.images for request in requests], "own": own})
