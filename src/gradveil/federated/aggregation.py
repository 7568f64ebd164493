"""How updates are weighted and added up."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.config import TrainSettings
from gradveil.errors import DefenceError, DivergedError
from gradveil.types import Tensors, Update


def update_weights(
    settings: TrainSettings, sizes: Sequence[int], drawn: Sequence[int], early: Sequence[int] = ()
) -> dict[int, float]:
    r"""Return the weight of each participating client's update: early clients always take part, others were drawn.

    ``size``: :math:`n_k / \sum_{j \in S} n_j`; ``uniform``: :math:`1 / K`; ``unbiased``: :math:`p_k N / K` with
    :math:`p_k = n_k / n`, which need not add up to one (an early client, never left to chance, has :math:`p_k`). A
    client drawn m times counts m times.

    Reference: McMahan et al. 2017 (``size``); Li et al. 2020, https://arxiv.org/abs/1907.02189, Schemes I
    (``--sampling size-replace --weighting uniform``) and II (``--weighting unbiased``).

    Example:
        >>> update_weights(TrainSettings(clients=4, sampled=2), [10, 30, 20, 40], [0, 1])
        {0: 0.25, 1: 0.75}
        >>> update_weights(TrainSettings(clients=4, sampled=2, weighting="unbiased"), [10, 30, 20, 40], [0, 1])
        {0: 0.2, 1: 0.6}
    """
    present = [*early, *(client for client in drawn if client not in early)]
    times = Counter(present)
    if not present:
        return {}
    if settings.weighting == "uniform":
        return {client: count / len(present) for client, count in times.items()}
    if settings.weighting == "unbiased":
        factor = len(sizes) / len(drawn) / sum(sizes)
        fixed = {client: sizes[client] / sum(sizes) for client in early}
        return {client: fixed.get(client, count * sizes[client] * factor) for client, count in times.items()}
    total = sum(sizes[client] for client in present)
    return {client: count * sizes[client] / total for client, count in times.items()}


class Aggregate:
    """The running weighted sum of updates, in float64 and in a fixed order, so that the bits never vary.

    Buffers are averaged: their weights are divided by ``weight_sum``, as a variance must not be extrapolated.
    """

    def __init__(self, weight_sum: float = 1.0) -> None:
        self._share = 1 / weight_sum if weight_sum else 0.0  # no drawn client has weight: nothing moves
        self._totals: dict[str, Tensor] = {}
        self._buffers: set[str] = set()
        self._examples = 0

    def add(self, update: Update, weight: float) -> None:
        """Add one client's update."""
        self._buffers |= update.buffers.keys()
        self._examples += update.num_examples if weight else 0
        for tensors, factor in ((update.tensors, weight), (update.buffers, weight * self._share)):
            for name, tensor in tensors.items():
                change = tensor.double() * factor
                self._totals[name] = self._totals[name].add_(change) if name in self._totals else change

    def total(self, factor: float = 1.0) -> Update:
        """Return the sum, in float64, times a factor: if updates are missing, it restores the sum of the weights."""
        scaled = self._totals if factor == 1 else {name: total * factor for name, total in self._totals.items()}
        tensors = {name: total for name, total in scaled.items() if name not in self._buffers}
        return Update(tensors, self._examples, {name: scaled[name] for name in scaled if name in self._buffers})

    def apply(self, model: Tensors, total: Update | None = None) -> dict[str, Tensor]:
        """Return the model plus the sum, or another ``total``; it must have every tensor of the model, and no other."""
        total = self.total() if total is None else total
        totals = {**total.tensors, **total.buffers}
        if totals.keys() != model.keys():
            odd = sorted(totals.keys() ^ model.keys())
            raise DefenceError(
                f"Updates must hold the shared tensors of the model after on_server, got others: {', '.join(odd[:5])}."
            )
        moved = {
            name: (tensor.double() + totals[name].to(tensor.device)).to(tensor.dtype) for name, tensor in model.items()
        }
        bad = [name for name, tensor in moved.items() if not tensor.isfinite().all()]
        if bad:
            raise DivergedError(
                f"The model must stay finite, got NaN or infinity in {bad[0]}: the training diverged. Lower --lr."
            )
        return moved


def mean_of(updates: Sequence[Update], weights: Sequence[float]) -> Update:
    """Return the weighted mean of updates, added up in float64; its number of examples is their sum.

    Example:
        >>> one, two = Update({"w": torch.zeros(1)}, 3), Update({"w": torch.ones(1)}, 5)
        >>> mean_of([one, two], [1.0, 3.0])
        Update(tensors={'w': tensor([0.7500])}, num_examples=8, buffers={})
    """
    whole = sum(weights)
    shares = [weight / whole if whole else 1 / len(weights) for weight in weights]

    def mean(parts: Sequence[Tensors]) -> dict[str, Tensor]:
        pairs = list(zip(parts, shares, strict=True))
        return {
            name: torch.stack([part[name].double() * share for part, share in pairs]).sum(0).to(tensor.dtype)
            for name, tensor in parts[0].items()
        }

    examples = sum(update.num_examples for update in updates)
    return Update(mean([one.tensors for one in updates]), examples, mean([one.buffers for one in updates]))
