"""One client's round: receive the model, train on local data under the defence's hooks, return what is sent."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.defences.base import Client, Defence
from gradveil.defences.parts.reports import Reports
from gradveil.errors import ConfigError
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.federated.steps import Stepper
from gradveil.secret_stream import SecretStream
from gradveil.storage import PrivateFolder
from gradveil.types import Batch, Tensors, Update


@dataclass(frozen=True)
class Broadcast:
    """What a server sends to a client when a round begins.

    Attributes:
        model: the shared part of the model as one vector.
        lr: the learning rate.
        round: number of the round, from 1.
        public: tensors beside the model, from the defence's ``public``.
    """

    model: Tensor
    lr: float
    round: int = 1
    public: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """What a client has when a round begins, beside its network.

    Attributes:
        data: its images.
        number: of the client, from 0.
        prepared: whether ``on_data`` has already replaced ``data``.
        state: tensors that survive rounds; the round's hooks change it in place.
        aux: public images, or None.
        folder: its private files, or None if nothing is kept.
    """

    data: Batch
    number: int = 0
    prepared: bool = False
    state: MutableMapping[str, Tensor] = field(default_factory=dict)
    aux: Batch | None = None
    folder: PrivateFolder | None = None

    def client(self, module: nn.Module, rng: SecretStream) -> Client:
        """Return the client as hooks see it before its first round, when it has received nothing."""
        return Client(
            id=self.number,
            round=1,
            model=module,
            start={},
            data=self.data,
            public={},
            state=self.state,
            rng=rng,
            aux=self.aux,
            folder=self.folder,
        )


@dataclass(frozen=True)
class Streams:
    """The secret random streams of one client's round.

    Attributes:
        hooks: for the defence's hooks, `Client.rng`.
        order: shuffles the batches; apart from ``hooks``, so that all defences see the same batches.
        data: for ``on_data``; by default ``hooks``.
        layers: sets torch's global generator while the network trains, for layers that draw from it (Dropout).
    """

    hooks: SecretStream
    order: SecretStream
    data: SecretStream | None = None
    layers: AbstractContextManager[None] = field(default_factory=nullcontext)

    @staticmethod
    def of(seed: int, client: int, round_number: int) -> "Streams":
        """Return the streams of a client and round; ``data`` and ``layers`` keep their defaults."""
        names = (client, "round", round_number)
        return Streams(SecretStream(seed, "client", *names), SecretStream(seed, "batches", *names))


@dataclass(frozen=True)
class Played:
    """One client's finished round.

    Attributes:
        update: what it sends.
        data: its images after ``on_data``.
        before: the private tensors of its model before training.
        after: the same after training.
        reports: the numbers that its hooks recorded, by name.
    """

    update: Update
    data: Batch
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    reports: Mapping[str, float]


def play_client(
    net: FlatModel,
    device: Device,
    broadcast: Broadcast,
    defence: Defence,
    how: LocalSettings,
    streams: Streams,
    *,
    ready: Callable[[Client], None] = lambda client: None,
    watch: Callable[[Batch], None] | None = None,
) -> Played:
    """Play one client's round: prepare its data if this was not done before, train, and return what it sends.

    Args:
        net: the client's network, with its own private tensors.
        device: what the client has.
        broadcast: what it received.
        defence: its defence.
        how: how it trains.
        streams: its random streams.
        ready: called with the client when its data are prepared, before it trains; an error stops the round.
        watch: called with every batch that the network is about to see.
    """
    net.receive(broadcast.model)
    client = replace(
        device.client(net.module, streams.hooks),
        round=broadcast.round,
        start=net.shared_tensors(broadcast.model),
        public=broadcast.public,
        reports=Reports(defence.reports),
    )
    if not device.prepared:
        client = replace(client, data=prepared_data(client, defence, streams))
    ready(client)
    before = net.private_tensors()
    with streams.layers:
        update = train_locally(net, broadcast.model, client, defence, how, broadcast.lr, streams.order, watch)
    return Played(update, client.data, before, net.private_tensors(), client.reports.means())


def prepared_data(client: Client, defence: Defence, streams: Streams) -> Batch:
    """Return the client's images after the defence's ``on_data``, on the device where they were before."""
    seen = replace(client, rng=streams.data or streams.hooks)
    return defence.on_data(client.data, seen).to(client.data.images.device)


def train_locally(
    net: FlatModel,
    received: Tensor,
    client: Client,
    defence: Defence,
    how: LocalSettings,
    lr: float,
    order: SecretStream,
    watch: Callable[[Batch], None] | None = None,
) -> Update:
    """Train ``net`` from the ``received`` shared vector on ``client.data`` and return the protected update.

    ``order`` shuffles the batches; it is not ``client.rng``, so that all defences see the same batches. Steps are those
    of a `gradveil.federated.steps.Stepper`. ``watch`` is called with every batch that the network is about to see.
    """
    _check_hooks(defence, how)
    net.receive(received)
    set_mode(net.module, how)
    stepper = Stepper(how, lr)
    num_examples = 0
    for step in step_positions(len(client.data), how, order):
        total: Tensor | None = None
        for positions in step:
            batch = defence.on_batch(client.data[positions], client)
            if watch is not None:
                watch(batch)
            net.gradients.zero_()
            if defence.needs_gradient:
                loss = F.cross_entropy(net.module(batch.images), batch.labels, label_smoothing=how.label_smoothing)
                loss.backward()  # type: ignore[no-untyped-call]
            if defence.overrides("on_gradient"):
                net.set_gradient(defence.on_gradient(net.gradient(), batch, client))
            if len(step) > 1:
                total = net.gradients.clone() if total is None else total.add_(net.gradients)
            num_examples += len(batch)
        gradient = net.gradients if total is None else total / len(step)
        if how.reduction == "sum":
            gradient = gradient * sum(map(len, step))
        with torch.no_grad():
            stepper.step(net.values[net.trained], gradient)
    change = net.values[net.shared] - received
    update = net.to_update(change, min(num_examples, len(client.data)))
    return defence.on_update(update, client)


def _check_hooks(defence: Defence, how: LocalSettings) -> None:
    """Raise ConfigError if a defence of gradients would protect other gradients than those of the steps."""
    if defence.overrides("on_gradient") and (how.accumulate > 1 or how.label_smoothing):
        raise ConfigError(
            f"accumulate must be 1 and label_smoothing 0 for defence {defence.name!r}, which works on single batches' "
            f"gradients of the plain loss, got {how.accumulate} and {how.label_smoothing:g}. Leave them out."
        )


def step_positions(num_images: int, how: LocalSettings, order: SecretStream) -> Iterator[list[Tensor]]:
    """Yield the positions of each step's batches: one batch, or up to ``how.accumulate`` of the same epoch.

    Example:
        >>> how = LocalSettings(batch_size=2, accumulate=2)
        >>> [[len(batch) for batch in step] for step in step_positions(5, how, SecretStream(0))]
        [[2, 2], [1]]
    """
    per_epoch = -(-num_images // (how.batch_size or num_images)) if how.algorithm == "fedavg" else 1
    step: list[Tensor] = []
    for number, positions in enumerate(batch_positions(num_images, how, order), start=1):
        step.append(positions)
        if len(step) == how.accumulate or number % per_epoch == 0:
            yield step
            step = []


def batch_positions(num_images: int, how: LocalSettings, order: SecretStream) -> Iterator[Tensor]:
    """Yield the positions of each batch of a round, shuffled anew in each epoch; an epoch's last may be smaller.

    Example:
        >>> [len(batch) for batch in batch_positions(5, LocalSettings(batch_size=2), SecretStream(0))]
        [2, 2, 1]
    """
    size = how.batch_size or num_images
    if how.algorithm == "fedsgd":
        yield order.permutation(num_images)[:size]
        return
    for _ in range(how.epochs):
        indices = order.permutation(num_images)
        for start in range(0, num_images, size):
            yield indices[start : start + size]


def set_mode(module: nn.Module, how: LocalSettings) -> None:
    """Set the network to training mode, but BatchNorm that is frozen and Dropout that is off to evaluation mode."""
    module.train()
    for layer in module.modules():
        frozen = isinstance(layer, _BatchNorm) and how.batch_norm == "freeze"
        if frozen or (isinstance(layer, _DropoutNd) and how.dropout == "off"):
            layer.eval()


def check_trainable(module: nn.Module, defence: Defence, how: LocalSettings) -> None:
    """Raise `ConfigError` before any work if the defence can't protect local training of this network."""
    set_mode(module, how)
    try:
        defence.check_training(module)
    finally:
        module.eval()


@dataclass(frozen=True)
class Score:
    """How well a model does on some images. Scores of disjoint sets of images can be added.

    Attributes:
        correct: the number of correct answers.
        loss_sum: the sum of the cross-entropies.
        count: the number of images.
        class_correct: the number of correct answers for the images of each class; empty if not known.
        class_count: the number of images of each class; empty if not known.

    Example:
        >>> both = Score(1, 0.5, 2, (1, 0), (1, 1)) + Score(2, 0.5, 2, (2, 0), (2, 0))
        >>> both.accuracy, both.balanced, both.majority
        (0.75, 0.5, 0.75)
    """

    correct: int = 0
    loss_sum: float = 0.0
    count: int = 0
    class_correct: tuple[int, ...] = ()
    class_count: tuple[int, ...] = ()

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.correct + other.correct,
            self.loss_sum + other.loss_sum,
            self.count + other.count,
            _added(self.class_correct, other.class_correct),
            _added(self.class_count, other.class_count),
        )

    @property
    def accuracy(self) -> float:
        """Return the share of correct answers."""
        return self.correct / self.count

    @property
    def loss(self) -> float:
        """Return the mean cross-entropy."""
        return self.loss_sum / self.count

    @property
    def balanced(self) -> float | None:
        """Return the mean over the classes of each class's share of correct answers, or None if not known."""
        if not self._knows_classes:
            return None
        shares = [right / there for right, there in zip(self.class_correct, self.class_count, strict=True) if there]
        return sum(shares) / len(shares)

    @property
    def majority(self) -> float | None:
        """Return the share of the most frequent class, the accuracy of always naming it, or None if not known."""
        return max(self.class_count) / self.count if self._knows_classes else None

    @property
    def _knows_classes(self) -> bool:
        return self.count > 0 and sum(self.class_count) == self.count


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def score(module: nn.Module, batch: Batch) -> Score:
    """Return the score of a network on images with class labels, in evaluation mode."""
    module.eval()
    with torch.no_grad():
        logits = module(batch.images)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum").item()
        right = logits.argmax(1) == batch.labels
        by_class = [torch.bincount(some, minlength=logits.shape[1]) for some in (batch.labels[right], batch.labels)]
        correct, count = (tuple(numbers.tolist()) for numbers in by_class)
        return Score(int(right.sum()), loss, len(batch), correct, count)
