"""Gradient pruning (compression): only the largest entries are sent."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defences.base import Perturbation
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.types import Tensors
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Prune(Perturbation):
    r"""Zero the ``fraction`` of entries of smallest magnitude, tensor by tensor or in all tensors together.

    .. math:: \tilde u_i = u_i \cdot \mathbb 1[\,|u_i| \ge \tau\,], \qquad \tau = \text{percentile}_{100\,p}(|u|)

    Of n entries :math:`\lceil p (n - 1) \rceil` are zeroed: as many as lie below the percentile when all magnitudes
    differ, and never the largest. Among equal ones the first are zeroed. BatchNorm's running statistics
    (``Update.buffers``) are sent as they are.

    Threat model: a curious server that sees single updates.
    Does not protect: against an attacker who matches the surviving entries only, which carry most of the energy.
    Guarantee: none; evidence is empirical.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Section 5; strengths used since: 0.2 in GGL
        (https://arxiv.org/abs/2203.15696), 0.7 (MNIST) and 0.9 (CIFAR-10) in DCS2, 0.99 in LODA.
    Differs from the paper: no warm-up and no accumulation of what was left out (Deep Gradient Compression); the
        threshold per tensor is that of the authors' released code.

    Attributes:
        where: ``update`` prunes what is sent, once a round; ``gradient`` the gradient of every local step.
        fraction: share of the entries that is zeroed; 1 leaves a single one.
        scope: ``tensor`` has a threshold for each tensor, ``global`` one for all.
    """

    fraction: float = 0.7
    scope: str = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("fraction", self.fraction, 0, 1)
        one_of("scope", self.scope, ["tensor", "global"])

    def perturb(self, tensors: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
        """Zero the smallest entries; nothing is drawn."""
        flat = [_magnitudes(tensor) for tensor in tensors.values()]
        if self.scope == "tensor":
            masks = [self._smallest(magnitudes) for magnitudes in flat]
        else:
            masks = list(torch.split(self._smallest(torch.cat(flat)), [len(part) for part in flat])) if flat else []
        return {
            name: tensor.masked_fill(mask.view(tensor.shape), 0.0)
            for (name, tensor), mask in zip(tensors.items(), masks, strict=True)
        }

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Compare the surviving entries only, or prune the guess at the rate found in what was seen.

        Where noise was added later, nothing is zero any more: then the guess is pruned by ``fraction``.
        """
        entries = sum(tensor.numel() for tensor in arrived.gradients.values())
        zeros = sum(int((tensor == 0).sum()) for tensor in arrived.gradients.values())
        if zeros < self.fraction / 2 * entries:
            return {"again": Countermove(self._by_fraction)}
        return {"surviving": Countermove(surviving, passes_noise=True), "again": Countermove(self._again)}

    def _by_fraction(self, guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
        """Each target's guess, pruned as the client would have."""
        rows = [self.perturb({name: t[row].detach() for name, t in guess.items()}, _NO_DRAWS) for row in _rows(guess)]
        return {name: t * torch.stack([row[name] != 0 for row in rows]) for name, t in guess.items()}

    def _smallest(self, magnitudes: Tensor) -> Tensor:
        """(n,) which entries to zero."""
        count = math.ceil(round(self.fraction * (len(magnitudes) - 1), 6))
        if count < 1:
            return torch.zeros_like(magnitudes, dtype=torch.bool)
        threshold = magnitudes.kthvalue(count).values
        return _lowest(magnitudes[None], threshold[None, None], torch.tensor([[count]], device=magnitudes.device))[0]

    def _again(self, guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
        """Each target's guess, pruned so that as many entries survive as in what was seen of it."""
        rows = {name: tensor.reshape(len(tensor), -1) for name, tensor in guess.items() if tensor.numel()}
        zeros = {name: (seen[name] == 0).reshape(len(row), -1) for name, row in rows.items()}
        if self.scope == "tensor":
            kept = {name: row * ~_pruned_rows(row, zeros[name]) for name, row in rows.items()}
        else:
            sizes = [row.shape[1] for row in rows.values()]
            whole = _pruned_rows(torch.cat([*rows.values()], 1), torch.cat([*zeros.values()], 1))
            masks = torch.split(whole, sizes, 1)
            kept = {name: row * ~mask for (name, row), mask in zip(rows.items(), masks, strict=True)}
        return {name: kept[name].view_as(tensor) if name in kept else tensor for name, tensor in guess.items()}


_NO_DRAWS = torch.Generator()


def _rows(tensors: Tensors) -> range:
    return range(len(next(iter(tensors.values()))))


def _magnitudes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).abs().to(torch.promote_types(tensor.dtype, torch.float32))


def surviving(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """The guess without the entries that are zero in what was seen."""
    return {name: tensor * (seen[name] != 0) for name, tensor in guess.items()}


def _pruned_rows(rows: Tensor, zeros: Tensor) -> Tensor:
    """(T, n) which entries to zero so that each row has as many zeros as its row of ``zeros`` has trues."""
    magnitudes = rows.detach().abs()
    counts = zeros.sum(1, keepdim=True)  # (T, 1)
    thresholds = magnitudes.sort(1).values.gather(1, (counts - 1).clamp(min=0))
    return _lowest(magnitudes, thresholds, counts) & (counts > 0)


def _lowest(magnitudes: Tensor, thresholds: Tensor, counts: Tensor) -> Tensor:
    """(T, n) the ``counts`` smallest of each row, given its count-th smallest; of equal ones the first."""
    below, equal = magnitudes < thresholds, magnitudes == thresholds
    missing = counts - below.sum(1, keepdim=True)  # (T, 1)
    return below | (equal & (equal.cumsum(1) <= missing))
