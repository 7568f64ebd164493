"""The engine on real machines, over Flower: the server plays the same rounds, and every site trains on its own data.

A Flower app needs only ``server_app()`` from here and ``client_app()`` from `gradveil.engines.flower_site`: see
docs/flower.md and examples/flower. Flower's run config holds the settings of `TrainSettings`; it may also have ``out``,
a folder of the server, and ``data-root``, where the server looks for named data sets.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split, load_dataset
from gradveil.data.federated import FederatedData
from gradveil.defences import Defence, build_defence
from gradveil.engines.devices import make_network
from gradveil.engines.flower_site import LOG, SERVER_KEYS, config, run_settings, tensors
from gradveil.engines.in_process import InProcess
from gradveil.engines.run_folder import RunFolder
from gradveil.engines.simulation import check_choices, chosen_normalisation, refuse_unmarked, server_network
from gradveil.engines.training import Training, record
from gradveil.engines.tripwire import announce
from gradveil.errors import ConfigError, WorkerError, named_error
from gradveil.federated.client import Score
from gradveil.federated.server import Engine, ScoreRequest, Sent, last_rounds
from gradveil.types import Tensors, Update

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict  # isort: skip - flower_site says if missing
from flwr.serverapp import Grid, ServerApp  # isort: skip


class FlowerEngine:
    """Plays each client on the node of its site; asks the nodes once for their numbers.

    Args:
        grid: Flower's connection to the nodes.
        settings: of the run.
        defence: shared by server and clients.
        dataset: the server's; nodes build their network for its shape, classes and normalisation.
        here: scores the server's own model.
        timeout: seconds to wait for a node's answer; None waits as long as Flower does.
        wait: seconds to wait for all nodes to connect.

    Attributes:
        sizes: number of images of each client.
        num_sensitive: number of marked images of all clients.
    """

    def __init__(
        self,
        grid: Grid,
        settings: TrainSettings,
        defence: Defence,
        dataset: Dataset,
        here: Engine,
        *,
        timeout: float | None = None,
        wait: float = 600.0,
    ) -> None:
        self._grid, self._here, self._timeout = grid, here, timeout
        self._settings, self._defence = settings, defence
        self._names: dict[int, str] = {}
        normalisation = chosen_normalisation(settings.normalise, dataset)
        self._network = ConfigRecord({"shape": list(dataset.shape), "num-classes": dataset.num_classes})
        if normalisation is not None:
            self._network["mean"], self._network["std"] = list(normalisation.mean), list(normalisation.std)
        nodes = self._present(settings.clients, wait)
        answers = self._ask("query", {node: {} for node in nodes})
        facts = {node: config(answer, "facts") for node, answer in answers.items()}
        numbers = {node: fact["number"] for node, fact in facts.items()}
        if sorted(numbers.values()) != list(range(settings.clients)):
            raise ConfigError(
                f"The nodes' numbers must be 0..{settings.clients - 1}, each once, got {sorted(numbers.values())}. "
                "Start each node with its own: --node-config 'partition-id=NUMBER ...'; or set the run's clients."
            )
        self._nodes = [node for node, _ in sorted(numbers.items(), key=lambda pair: pair[1])]
        self._names = {node: f"Client {number}" for node, number in numbers.items()}
        self.sizes = [int(facts[node]["images"]) for node in self._nodes]
        self.num_sensitive = sum(int(fact["sensitive"]) for fact in facts.values())

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterator[Sent]:
        """Let clients train at their sites, all at once; yield in the order of ``clients``."""
        content = self._content(round_number, model) | {"public": ArrayRecord(dict(public))}
        content["step"] = ConfigRecord({"lr": lr})
        before = self._before(round_number - 1)
        answers = self._ask("train", {self._nodes[client]: content | before[client] for client in clients})
        for client in clients:
            facts, sent = config(answers[self._nodes[client]], "facts"), answers[self._nodes[client]].array_records
            for alarm in facts["alarms"]:
                announce(alarm)
            update = Update(tensors(sent["tensors"]), facts["images"], tensors(sent["buffers"]))
            yield Sent(client, update, dict(zip(facts["report-names"], facts["report-values"], strict=True)))

    def score(self, round_number: int, requests: Sequence[ScoreRequest], model: Tensors) -> list[Score]:
        """Score the server's model on the server's test images here, and everything else at the sites.

        A site scores its own images only; so a client's own model is scored on this client's marked images only.
        """
        at_server = [request for request in requests if request == ScoreRequest("test")]
        totals = dict.fromkeys(requests, Score())
        totals |= zip(at_server, self._here.score(round_number, at_server, model), strict=True)
        shared = self._content(round_number, model)
        asked = {
            node: [request for request in requests if request.client in (client, None) and request not in at_server]
            for client, node in enumerate(self._nodes)
        }
        before = self._before(round_number)
        contents = {
            node: shared | before[client] | {"requests": _to_config(mine)}
            for client, (node, mine) in enumerate(asked.items())
            if mine
        }
        for node, answer in self._ask("evaluate", contents).items():
            facts = config(answer, "facts")
            by_class = (_pieces(facts[key], facts["classes"]) for key in ("class-correct", "class-count"))
            scores = map(Score, facts["correct"], facts["loss-sum"], facts["count"], *by_class)
            for request, score in zip(asked[node], scores, strict=True):
                totals[request] += score
        return [totals[request] for request in requests]

    def _content(self, round_number: int, model: Tensors) -> dict[str, ArrayRecord | ConfigRecord]:
        arrays, number = ArrayRecord(dict(model)), ConfigRecord({"number": round_number})
        return {"model": arrays, "round": number, "network": self._network}

    def _before(self, done: int) -> list[dict[str, ConfigRecord]]:
        """Return the last finished round in which each client trained, or 0, so that it notices lost state."""
        last = last_rounds(self._settings, self._defence, self.sizes, done)
        return [{"before": ConfigRecord({"trained": last.get(client, 0)})} for client in range(len(self.sizes))]

    def _present(self, count: int, wait: float) -> list[int]:
        """Wait for all nodes and return them."""
        until = time.monotonic() + wait
        while len(nodes := list(self._grid.get_node_ids())) < count:
            if time.monotonic() > until:
                raise WorkerError(
                    f"All {count} nodes must be there within {wait:g} seconds, got {len(nodes)}. "
                    "Start the missing nodes, or set the run's clients."
                )
            time.sleep(1)
        return nodes

    def _ask(
        self, kind: str, contents: Mapping[int, Mapping[str, ArrayRecord | ConfigRecord]]
    ) -> dict[int, RecordDict]:
        """Return each node's answer, in the order of ``contents``. Raise if one fails or does not answer."""
        records = {node: RecordDict(dict(content)) for node, content in contents.items()}
        messages = [Message(record, dst_node_id=node, message_type=kind) for node, record in records.items()]
        answers, reasons = dict[int, RecordDict](), dict[int, str]()
        for reply in self._grid.send_and_receive(messages, timeout=self._timeout) if messages else ():
            if reply.has_content():
                answers[reply.metadata.src_node_id] = reply.content
            else:  # the node's own error, or the SuperLink's, which names no node
                reasons[reply.metadata.src_node_id] = reply.error.reason or ""
        for node in contents:
            if node not in answers:
                name = self._names.get(node, f"Node {node}")
                reason = reasons.get(node) or " ".join(filter(None, reasons.values())) or "nothing came in time."
                raise WorkerError(
                    f"{name} must answer, got: {reason} Look at its SuperNode; with an out folder, the same run "
                    "continues from its last checkpoint."
                )
            if "error" in answers[node]:
                failure = config(answers[node], "error")
                name = self._names.get(node, f"Node {node} (partition-id {failure['number']})")
                message = f"{name} sent nothing. {failure['message']}"
                raise named_error(failure["kind"], message) or WorkerError(message)
        return {node: answers[node] for node in contents}


def server_app(*, timeout: float | None = None, wait: float = 600.0) -> ServerApp:
    """Return a ServerApp that trains by the run config, into the server's folder ``out`` if the run config has one.

    The folder gets the rows, the checkpoint, the model and one row per client; a run with the same settings continues
    there.
    """

    def main(grid: Grid, context: Context) -> None:
        out, root = (str(context.run_config.get(key, "")) for key in SERVER_KEYS)
        settings = run_settings(context)
        dataset = load_dataset(settings.dataset, Path(root) if root else None)
        training = flower_training(grid, settings, dataset, timeout=timeout, wait=wait)
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
    grid: Grid, settings: TrainSettings, dataset: Dataset, *, timeout: float | None = None, wait: float = 600.0
) -> Training:
    """Return the server's side of a run over Flower; of ``dataset`` only the test images are used."""
    defence = build_defence(settings.defence)
    check_choices(settings, defence)
    normalisation = chosen_normalisation(settings.normalise, dataset)
    build_network = partial(make_network, settings, dataset.shape, dataset.num_classes, normalisation)
    net = server_network(settings, defence, build_network, dataset.shape, dataset.num_classes)
    none = Split(dataset.train.images[:0], dataset.train.labels[:0])
    nobody = FederatedData(none, dataset.test, np.arange(0), np.zeros(settings.clients + 1, int), np.zeros(0, bool))
    here = InProcess(settings, nobody, defence, build_network, Path("unused"))
    engine = FlowerEngine(grid, settings, defence, dataset, here, timeout=timeout, wait=wait)
    refuse_unmarked(defence, engine.num_sensitive)
    return Training(settings, defence, net, engine, engine.sizes, has_sensitive=bool(engine.num_sensitive))


def _say(row: Mapping[str, object] | None, doing: str = "training") -> None:
    LOG.info("%s: %s", doing, {} if row is None else dict(row))


def _pieces(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield consecutive pieces of these lengths."""
    left = iter(numbers)
    return (tuple(islice(left, length)) for length in lengths)


def _to_config(requests: Sequence[ScoreRequest]) -> ConfigRecord:
    own = [request.client is not None for request in requests]
    return ConfigRecord({"images": [request.images for request in requests], "own": own})
