"""Gradient pruning (compression): send only the largest entries."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.feedback import Compression
from gradveil.secret_stream import SecretStream
from gradveil.types import Tensors
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Prune(Compression):
    r"""Set the ``fraction`` of entries with the smallest magnitudes to zero, in each tensor or in all tensors together.

    .. math:: \tilde u_i = u_i \cdot \mathbb 1[\,|u_i| \ge \tau\,], \qquad \tau = \text{percentile}_{100\,p}(|u|)

    Here p is ``fraction``. Of n entries :math:`\lceil p (n - 1) \rceil` become zero: those below the percentile if all
    magnitudes differ, and never the largest. Among equal magnitudes the first entries become zero. BatchNorm's running
    statistics (``Update.buffers``) are sent unchanged.

    Threat model: an honest-but-curious server that sees individual updates.
    Does not protect: against an attacker who matches only the surviving entries, which carry most of the squared norm.
        With ``feedback``, against a server that adds up many rounds of the same images.
    Guarantee: none; evidence is empirical.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Section 5. Later papers use 0.2 (GGL,
        https://arxiv.org/abs/2203.15696), 0.7 (MNIST) and 0.9 (CIFAR-10) (DCS2), and 0.99 (LODA).
    Differs from the paper: there is no warm-up, and pruned entries are accumulated for later rounds only with
        ``feedback`` (both are part of Deep Gradient Compression). One threshold per tensor is what the authors'
        released code uses.

    Attributes:
        where: ``update`` prunes the update once per round; ``gradient`` prunes the gradient of every local step.
        fraction: share of the entries that become zero; 1 keeps a single entry.
        scope: ``tensor`` uses one threshold per tensor, ``global`` one for all tensors.
        feedback: whether pruned entries are kept on the device and added in the next round.
    """

    fraction: float = 0.7
    scope: str = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("fraction", self.fraction, 0, 1)
        one_of("scope", self.scope, ["tensor", "global"])

    def perturb(self, tensors: Tensors, rng: SecretStream) -> dict[str, Tensor]:
        """Set the smallest entries to zero; ``rng`` is not used."""
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
        """Return ``surviving``, which compares only the surviving entries, and ``again``, which prunes the guess alike.

        If noise was added after pruning, no entry is zero any more; then only ``again`` is possible, with ``fraction``
        in place of the share of zeros seen. Of several rounds with ``feedback``, ``sum`` compares the sums.
        """
        if self.feedback and arrived.rounds > 1:
            return {"sum": Countermove(surviving, adds_up=True)}
        entries = sum(tensor.numel() for tensor in arrived.gradients.values())
        zeros = sum(int((tensor == 0).sum()) for tensor in arrived.gradients.values())
        if zeros < self.fraction / 2 * entries:
            return {"again": Countermove(self._by_fraction)}
        again = Countermove(self._again, zeroes=True)
        return {"surviving": Countermove(surviving, passes_noise=True, zeroes=True), "again": again}

    def _by_fraction(self, guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
        """Prune each target's guess by ``fraction``, as the client would."""
        rows = [self.perturb({name: t[row].detach() for name, t in guess.items()}, _NO_DRAWS) for row in _rows(guess)]
        return {name: t * torch.stack([row[name] != 0 for row in rows]) for name, t in guess.items()}

    def _smallest(self, magnitudes: Tensor) -> Tensor:
        """Return the mask (n,) of entries to set to zero."""
        count = math.ceil(round(self.fraction * (len(magnitudes) - 1), 6))
        if count < 1:
            return torch.zeros_like(magnitudes, dtype=torch.bool)
        threshold = magnitudes.kthvalue(count).values
        return _lowest(magnitudes[None], threshold[None, None], torch.tensor([[count]], device=magnitudes.device))[0]

    def _again(self, guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
        """Prune each target's guess so that as many entries survive as in its seen gradient."""
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


_NO_DRAWS = SecretStream(0)


def _rows(tensors: Tensors) -> range:
    return range(len(next(iter(tensors.values()))))


def _magnitudes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).abs().to(torch.promote_types(tensor.dtype, torch.float32))


def surviving(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Return the guess with zeros at all entries that are zero in the seen gradient."""
    return {name: tensor * (seen[name] != 0) for name, tensor in guess.items()}


def _pruned_rows(rows: Tensor, zeros: Tensor) -> Tensor:
    """Return the mask (T, n) that sets as many entries of each row to zero as its row of ``zeros`` has true values."""
    magnitudes = rows.detach().abs()
    counts = zeros.sum(1, keepdim=True)  # (T, 1)
    thresholds = magnitudes.sort(1).values.gather(1, (counts - 1).clamp(min=0))
    return _lowest(magnitudes, thresholds, counts) & (counts > 0)


def _lowest(magnitudes: Tensor, thresholds: Tensor, counts: Tensor) -> Tensor:
    """Return the mask (T, n) of the ``counts`` smallest entries per row, the first ones in case of ties.

    ``thresholds`` (T, 1) are the ``counts``-th smallest values of the rows.
    """
    below, equal = magnitudes < thresholds, magnitudes == thresholds
    missing = counts - below.sum(1, keepdim=True)  # (T, 1)
    return below | (equal & (equal.cumsum(1) <= missing))
