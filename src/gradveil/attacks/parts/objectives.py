r"""The distance between a guessed update and the one seen: one number per target.

Guess and target are tensors by name, each (T, shape of the parameter); the result is (T,). Weights (a factor per
tensor, by default 1) and masks (1 for entries that count, (T, ...) or (...)) let an attacker leave out what a defence
changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.errors import UnknownNameError
from gradveil.types import Tensors


@dataclass(frozen=True)
class Objective:
    r"""A distance between updates.

    ``l2``: :math:`\sum_l w_l \|g_l - \hat g_l\|_2^2` (DLG); ``l1``: :math:`\sum_l w_l \|g_l - \hat g_l\|_1`;
    ``cosine``: :math:`1 - \langle g, \hat g\rangle / \|g\| \|\hat g\|` over all layers together (GS), where
    :math:`w_l` scales both inner product and norms. ``l2+norm`` is l2 plus its root, which GRNN's code calls a
    Wasserstein distance; ``l2+sliced`` is l2 plus a true one, :math:`\\sum_l w_l W_2(g_l, \\hat g_l)`: the rows of each
    weight (the entries of a bias) are points, and their distance is taken along `SLICES` random directions.

    Attributes:
        kind: l2, l1, cosine, l2+norm or l2+sliced.
        weights: factor of each tensor's term; 0 leaves it out, and missing names have 1.
        masks: which entries count, by name; missing names count in full.
        relative: whether the distance is divided by that of a zero guess, so that a guess of zero has distance 1.
    """

    kind: str = "l2"
    weights: Mapping[str, float] = field(default_factory=dict)
    masks: Tensors = field(default_factory=dict)
    relative: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UnknownNameError("objective", self.kind, _KINDS)

    def __call__(self, guess: Tensors, target: Tensors) -> Tensor:
        """Return the distance (T,) of each target."""
        pairs = []
        for name, wanted in target.items():
            weight = self.weights.get(name, 1.0)
            if weight:
                mask = self.masks.get(name)
                found, aim = (guess[name], wanted) if mask is None else (guess[name] * mask, wanted * mask)
                form = _points(aim) if self.kind == "l2+sliced" else (len(aim), -1)
                pairs.append((found.reshape(form), aim.reshape(form), weight))
        distance = _KINDS[self.kind](pairs)
        return distance / _of_nothing(self.kind, pairs) if self.relative else distance

    def of_nothing(self, target: Tensors) -> Tensor:
        """Return the distance (T,) of a zero guess, the reference for any loss."""
        zero = {name: torch.zeros_like(tensor) for name, tensor in target.items()}
        return self(zero, target)


Pairs = list[tuple[Tensor, Tensor, float]]


def _of_nothing(kind: str, pairs: Pairs) -> Tensor:
    distance = _KINDS[kind]([(torch.zeros_like(aim), aim, weight) for _, aim, weight in pairs])
    return distance.clamp_min(torch.finfo(distance.dtype).tiny)


def _l2(pairs: Pairs) -> Tensor:
    return torch.stack([weight * (guess - wanted).square().sum(1) for guess, wanted, weight in pairs]).sum(0)


def _l1(pairs: Pairs) -> Tensor:
    return torch.stack([weight * (guess - wanted).abs().sum(1) for guess, wanted, weight in pairs]).sum(0)


def _cosine(pairs: Pairs) -> Tensor:
    """Return half the squared distance of the unit vectors: 1 - cosine, but exact if both nearly agree."""
    ours = torch.stack([weight * guess.square().sum(1) for guess, _, weight in pairs]).sum(0)
    theirs = torch.stack([weight * aim.square().sum(1) for _, aim, weight in pairs]).sum(0)
    tiny = torch.finfo(ours.dtype).tiny
    ours_inverse, theirs_inverse = (square.clamp_min(tiny).rsqrt()[:, None] for square in (ours, theirs))
    apart = [weight * (guess * ours_inverse - aim * theirs_inverse).square().sum(1) for guess, aim, weight in pairs]
    directionless = (ours == 0).to(ours) + (theirs == 0).to(ours)  # a zero vector counts as orthogonal to all
    return (torch.stack(apart).sum(0) + directionless) / 2


def _l2_and_norm(pairs: Pairs) -> Tensor:
    square = _l2(pairs)
    return square + square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()


def _l2_and_sliced(pairs: Pairs) -> Tensor:
    """Return l2 plus the sliced Wasserstein distance, of pairs (T, points, coordinates)."""
    square = _l2([(guess.flatten(1), aim.flatten(1), weight) for guess, aim, weight in pairs])
    apart = [weight * sliced_wasserstein(guess, aim) for guess, aim, weight in pairs]
    return square + torch.stack(apart).sum(0)


def _points(tensor: Tensor) -> tuple[int, int, int]:
    """Return the shape of a gradient (T, outputs, ...) as points, one per output."""
    points = tensor.shape[1] if tensor.dim() > 1 else 1
    return len(tensor), points, tensor[0].numel() // max(points, 1)


SLICES = 32
"""Directions that a sliced distance averages over."""


def sliced_wasserstein(first: Tensor, second: Tensor) -> Tensor:
    r"""Return the distance (T,) of two clouds of equally many points, (T, points, coordinates).

    .. math:: \Big(\text{mean}_\theta\, \text{mean}_i\, (a^\theta_{(i)} - b^\theta_{(i)})^2\Big)^{1/2}

    with the points' coordinates :math:`a^\theta` along a unit vector :math:`\theta`, sorted. The directions are fixed;
    for points with one coordinate the distance is exact.

    Reference: Bonneel et al. 2015, https://doi.org/10.1007/s10851-014-0506-3, Definition 2.

    Example:
        >>> sliced_wasserstein(torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[3.0], [2.0]]]))
        tensor([2.])
    """
    directions = torch.randn(first.shape[2], SLICES, generator=torch.Generator().manual_seed(0)).to(first)
    directions = directions / directions.norm(dim=0, keepdim=True).clamp_min(torch.finfo(first.dtype).tiny)
    ours, theirs = (torch.sort(cloud @ directions, 1).values for cloud in (first, second))
    return (ours - theirs).square().mean((1, 2)).clamp_min(torch.finfo(first.dtype).tiny).sqrt()


_KINDS: dict[str, Callable[[Pairs], Tensor]] = {
    "l2": _l2, "l1": _l1, "cosine": _cosine, "l2+norm": _l2_and_norm, "l2+sliced": _l2_and_sliced,
}  # fmt: skip
