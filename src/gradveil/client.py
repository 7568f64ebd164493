"""One client's round: receive the model, train on local data under the defence's hooks, return what is sent."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.defences.base import Client, Defence, Releases
from gradveil.flat import FlatModel
from gradveil.types import Batch, Update
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains.

    Attributes:
        algorithm: ``fedavg`` trains for ``epochs``; ``fedsgd`` takes the gradient of a single batch.
        epochs: passes over the client's data in a round.
        batch_size: images a step; 0 is all of the client's.
        momentum: of SGD; starts anew each round.
        nesterov: Nesterov's form of the momentum.
        weight_decay: L2 penalty, added to the gradient after the defence.
        batch_norm: ``freeze`` trains with the received running statistics; else those of the batch are used.
    """

    algorithm: str = "fedavg"
    epochs: int = 1
    batch_size: int = 32
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    batch_norm: str = "average"

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ["fedavg", "fedsgd"])
        in_range("epochs", self.epochs, 1)
        in_range("batch_size", self.batch_size, 0)
        in_range("momentum", self.momentum, 0, 1, open_high=True)
        in_range("weight_decay", self.weight_decay, 0)
        one_of("batch_norm", self.batch_norm, ["average", "local", "freeze"])

    def step_weights(self, num_examples: int) -> list[float]:
        """How much each step's gradient counts in the whole change, for it goes on in the momentum.

        Example:
            >>> LocalSettings(epochs=3, batch_size=0, momentum=0.5).step_weights(4)
            [1.75, 1.5, 1.0]
        """
        steps = self.num_steps(num_examples)
        carried = [(1 - self.momentum**left) / (1 - self.momentum) for left in range(steps, 0, -1)]
        return [1 + self.momentum * weight for weight in carried] if self.nesterov else carried

    def num_steps(self, num_examples: int) -> int:
        """How many steps a round takes on so many images.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4).num_steps(10)
            6
        """
        if self.algorithm == "fedsgd":
            return 1
        return self.epochs * -(-num_examples // (self.batch_size or num_examples))

    def releases(self, num_examples: int, rounds: int = 1, entries: int = 0) -> Releases:
        """What a client with so many images gives away in so many rounds, for the accounting of privacy.

        ``entries`` are those of the model, where a defence's budget depends on them.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4).releases(10, rounds=3)
            Releases(num_examples=10, batch_size=4, steps=18, uses=6, rounds=3, entries=0)
        """
        batch = min(self.batch_size or num_examples, num_examples)
        passes = self.epochs if self.algorithm == "fedavg" else 1
        return Releases(num_examples, batch, self.num_steps(num_examples) * rounds, passes * rounds, rounds, entries)


def train_locally(
    net: FlatModel,
    received: Tensor,
    client: Client,
    defence: Defence,
    how: LocalSettings,
    lr: float,
    order: torch.Generator,
    watch: Callable[[Batch], None] | None = None,
) -> Update:
    """Train ``net`` from the ``received`` shared vector on ``client.data`` and return the protected update.

    ``order`` shuffles the batches; it is not ``client.rng``, so that all defences see the same batches. SGD is that of
    `torch.optim.SGD`, on one vector: d = g + weight_decay * w, v = momentum * v + d, w = w - lr * v. ``watch`` is shown
    every batch that the network is about to see.
    """
    net.receive(received)
    _set_mode(net.module, how)
    velocity: Tensor | None = None
    num_examples = 0
    for batch in _batches(client.data, how, order):
        batch = defence.on_batch(batch, client)
        if watch is not None:
            watch(batch)
        net.gradients.zero_()
        F.cross_entropy(net.module(batch.images), batch.labels).backward()  # type: ignore[no-untyped-call]
        if defence.overrides("on_gradient"):
            net.set_gradient(defence.on_gradient(net.gradient(), batch, client))
        with torch.no_grad():
            velocity = _step(net.values[net.trained], net.gradients, velocity, how, lr)
        num_examples += len(batch)
    change = net.values[net.shared] - received
    update = net.to_update(change, min(num_examples, len(client.data)))
    return defence.on_update(update, client)


def _step(weights: Tensor, gradient: Tensor, velocity: Tensor | None, how: LocalSettings, lr: float) -> Tensor | None:
    """One step of SGD in place; returns the new velocity, None without momentum."""
    if how.weight_decay:
        gradient = gradient.add(weights, alpha=how.weight_decay)
    if how.momentum:
        velocity = gradient.clone() if velocity is None else velocity.mul_(how.momentum).add_(gradient)
        gradient = gradient.add(velocity, alpha=how.momentum) if how.nesterov else velocity
    weights.sub_(gradient, alpha=lr)
    return velocity


def _batches(data: Batch, how: LocalSettings, order: torch.Generator) -> Iterator[Batch]:
    """The batches of a round in a fresh random order each epoch; the last of an epoch may be smaller."""
    size = how.batch_size or len(data)
    if how.algorithm == "fedsgd":
        yield data[torch.randperm(len(data), generator=order)[:size]]
        return
    for _ in range(how.epochs):
        indices = torch.randperm(len(data), generator=order)
        for start in range(0, len(data), size):
            yield data[indices[start : start + size]]


def _set_mode(module: nn.Module, how: LocalSettings) -> None:
    module.train()
    if how.batch_norm == "freeze":
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()


@dataclass(frozen=True)
class Score:
    """How well a model does on some images; scores of parts add up."""

    correct: int = 0
    loss_sum: float = 0.0
    count: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(self.correct + other.correct, self.loss_sum + other.loss_sum, self.count + other.count)

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return self.correct / self.count

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss_sum / self.count


def score(module: nn.Module, batch: Batch) -> Score:
    """Score a network on images with class labels, in evaluation mode."""
    module.eval()
    with torch.no_grad():
        logits = module(batch.images)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum").item()
        return Score(int((logits.argmax(1) == batch.labels).sum()), loss, len(batch))
