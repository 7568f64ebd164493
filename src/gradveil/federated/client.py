"""One client's round: receive the model, train on local data under the defence's hooks, return what is sent."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.defences.base import Client, Defence
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.types import Batch, Update


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
