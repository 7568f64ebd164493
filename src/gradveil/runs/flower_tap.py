"""Store what the server of a Flower app sees, as files that ``gradveil attack`` and ``gradveil diagnose`` take.

``out`` gets a folder per round: ``round-1/model.safetensors`` is what the nodes received, ``round-1/NODE.safetensors``
what changed, and ``round-1/NODE.toml`` the specification, whose first lines are the command to type.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor, nn

from gradveil.defences import build_defence
from gradveil.engines.messages import num_bytes, read_arrays
from gradveil.errors import ConfigError, MessageError
from gradveil.models import create_model
from gradveil.models.weights import misfits
from gradveil.own import is_adopted
from gradveil.runs.loop_hooks import reference_of
from gradveil.runs.update_spec import make_spec
from gradveil.seal import sealed
from gradveil.storage import to_safetensors, write_atomic
from gradveil.types import Tensors
from gradveil.validate import in_range

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # isort: skip - as in messages
from flwr.serverapp import Grid  # isort: skip
from flwr.serverapp.strategy import Result, Strategy  # isort: skip

LOG = logging.getLogger("gradveil")
_TAPPED = ("configure_train", "aggregate_train")


class FlowerTap(Strategy):
    """A strategy that stores what the server sees of each client, and otherwise does what the wrapped one does.

    Example::

        strategy = gradveil.flower.Tap(FedAvg(), "tapped", model=Net, shape=(1, 28, 28), num_classes=10, epochs=1)
        strategy.start(grid, initial_arrays, num_rounds=3, train_config=ConfigRecord({"lr": 0.01}))

    The wrapped strategy gets the same messages and replies, in the same order. A problem of the tap, such as a full
    disk, is logged and ends no training. Files are complete or absent; updates have mode 0600.

    Args:
        strategy: any strategy of Flower's message API.
        out: folder for the files, new or empty.
        model: the network that the clients train: its class, another function that returns it, or a model of the zoo by
            name. Arrays must have the names of its state dict.
        shape: (C, H, W) of an image.
        num_classes: number of classes of the task.
        rounds: the rounds to store, or how many from the first on.
        max_bytes: stop storing before the files are larger than this together.
        known: other keys of a specification, if known: lr (by default ``lr`` of the messages' ConfigRecords), epochs,
            batch_size, momentum, normalise, defence and so on; see docs/attack.md.

    Raises:
        ConfigError: the folder is in use, or the facts contradict each other.
    """

    def __init__(
        self,
        strategy: Strategy,
        out: str | Path,
        *,
        model: str | nn.Module | Callable[..., nn.Module],
        shape: tuple[int, int, int],
        num_classes: int,
        rounds: int | Collection[int] = 10,
        max_bytes: int = 2**30,
        **known: Any,  # noqa: ANN401 - keys of a specification
    ) -> None:
        in_range("max_bytes", max_bytes, 1)
        self.strategy, self.out = strategy, Path(out).expanduser().absolute()
        self._rounds = range(1, rounds + 1) if isinstance(rounds, int) else frozenset(rounds)
        self._left, self._sent = max_bytes, dict[int, RecordDict]()
        self._configure, self._aggregate = strategy.configure_train, strategy.aggregate_train
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(f"{self.out} must be new or empty, got a folder with files. Choose another `out`.")
        factory = type(model) if isinstance(model, nn.Module) else model
        text = factory if isinstance(factory, str) else reference_of(factory)
        if is_adopted(text, "models"):
            raise ConfigError(
                f"model must be built again by other commands, got {text!r}, which is known in this process only. Put "
                "its class into a Python file that can be imported alone, or name a model of the zoo."
            )
        self._facts = {"model": text, "shape": list(shape), "num_classes": num_classes, "kind": "change", **known}
        make_spec({"lr": 1.0, **self._facts}, "the tap's specification")
        _require_same_network(str(known.get("defence", "none")))
        self._like = create_model(text, shape, num_classes, seed=0).state_dict()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the wrapped strategy has
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def start(self, *args: Any, **kwargs: Any) -> Result:  # noqa: ANN401 - arguments of the wrapped strategy
        """Run the wrapped strategy's own ``start``, with its two steps of training tapped."""
        before = {name: vars(self.strategy)[name] for name in _TAPPED if name in vars(self.strategy)}
        vars(self.strategy).update({name: getattr(self, name) for name in _TAPPED})
        try:
            return self.strategy.start(*args, **kwargs)
        finally:
            for name in _TAPPED:
                del vars(self.strategy)[name]
            vars(self.strategy).update(before)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages, and remember what each node is sent."""
        messages = list(self._configure(server_round, arrays, config, grid))
        self._sent = {message.metadata.dst_node_id: message.content for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the replies of a chosen round, and let the wrapped strategy aggregate them."""
        replies = list(replies)
        if server_round in self._rounds:
            models: dict[str, Path] = {}
            for reply in replies:
                try:
                    self._store(server_round, reply, models)
                except Exception as error:  # a tap must not stop a training
                    LOG.warning("The tap left out a reply of round %s: %s", server_round, error)
        return self._aggregate(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return what the wrapped strategy returns."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return what the wrapped strategy returns."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what the wrapped strategy logs."""
        self.strategy.summary()

    def _store(self, server_round: int, reply: Message, models: dict[str, Path]) -> None:
        """Write one reply: the model if this round has not written the same before, the update, the specification."""
        node = reply.metadata.src_node_id
        if reply.has_error() or self._left <= 0:
            return
        if node not in self._sent:
            raise MessageError(f"node {node} was not asked in this round.")
        sent = _only(self._sent[node], self._like)
        got = _only(reply.content, sent)
        change = {name: tensor - sent[name] for name, tensor in got.items() if tensor.is_floating_point()}
        folder = self.out / f"round-{server_round}"
        packed, digest = sealed(to_safetensors(sent)), _digest(sent)
        model = models.get(digest, folder / ("model.safetensors" if not models else f"model-{node}.safetensors"))
        spec = self._spec(self._sent[node], reply.content)
        files = {} if digest in models else {model: packed}
        files |= {folder / f"{node}.safetensors": sealed(to_safetensors(change))}
        command = (
            f"gradveil attack --model-file {model.name} --update {node}.safetensors --spec {node}.toml --attack gs"
        )
        trust = " --trust-code" if ".py:" in spec["model"] else ""
        head = (
            f"# What the server saw of node {node} in round {server_round}. In this folder, try:\n# {command}{trust}\n"
        )
        files |= {folder / f"{node}.toml": (head + tomli_w.dumps(spec)).encode()}
        self._write(files)
        models[digest] = model

    def _write(self, files: Mapping[Path, bytes]) -> None:
        """Write files if there is room for all of them; otherwise store nothing from now on."""
        size = sum(map(len, files.values()))
        if size > self._left:
            self._left = 0
            raise ConfigError("max_bytes is reached, and nothing more is stored. Raise it to store more.")
        self._left -= size
        for path, content in files.items():
            write_atomic(path, content, mode=0o600)

    def _spec(self, sent: RecordDict, reply: RecordDict) -> dict[str, Any]:
        """Return the specification of one update, checked as ``gradveil attack`` checks it."""
        spec = dict(self._facts)
        told = [record.get("lr") for record in sent.config_records.values()]
        rates = [float(value) for value in told if isinstance(value, (int, float)) and not isinstance(value, bool)]
        spec |= {"lr": rates[0]} if rates and "lr" not in spec else {}
        key = str(getattr(self.strategy, "weighted_by_key", "num-examples"))
        counts = [record.get(key) for record in reply.metric_records.values()]
        whole = [int(n) for n in counts if isinstance(n, (int, float)) and math.isfinite(n) and n >= 1 and n == int(n)]
        spec |= {"num_examples": whole[0]} if whole and "num_examples" not in spec else {}
        make_spec(spec, "the tap's specification")
        return spec


def _require_same_network(defence: str) -> None:
    """Raise if a defence edits the network: what the server gets are then not the tensors of the model."""
    if build_defence(defence).overrides("on_model"):
        raise ConfigError(
            f"A tap stores updates of the model as it is, got defence {defence!r}, which edits the network. To attack "
            "such updates, train with gradveil's own app and save-rounds, or audit the defence (gradveil audit)."
        )


def _only(content: RecordDict, like: Tensors) -> dict[str, Tensor]:
    """Return the tensors of the only ArrayRecord, which must fit those of a model."""
    names = list(content.array_records)
    if len(names) != 1:
        raise MessageError(f"a message must hold one ArrayRecord, the model, got {len(names)}.")
    found = read_arrays(content, names[0], None, num_bytes(content, names[0]))
    wrong = misfits(like, found)
    if wrong:
        raise MessageError(
            f"the arrays must be those of the model's state dict: {wrong[0]}. What a defence edits (fedkl, precode) "
            "is not tapped."
        )
    return found


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
