r"""Sums as secure aggregation makes them: clipped, quantised, added modulo a power of two.

A client of a real protocol (Bonawitz et al. 2017, SecAgg+ in Flower) turns each entry of its weighted update into a
whole number and adds a mask that cancels in the sum of all clients. Masks change nothing of the sum, so that they are
not simulated; quantisation does change it, and is:

.. math:: q_k = \text{round}\Big(\frac{\text{clip}(w_k u_k, -R, R) + R}{2 R} \, 2^b\Big), \qquad
    \sum_k w_k u_k \approx \frac{2 R}{2^b} \Big(\sum_k q_k \bmod 2^m\Big) - K R

Differs from Flower: rounds to the nearest number, not at random; the modulus is as large as K clients need.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.types import Tensors, Update


@dataclass(frozen=True)
class Quantiser:
    """How entries become whole numbers.

    Attributes:
        bits: b; entries are in 2^b steps.
        bound: R; entries beyond it are clipped.
    """

    bits: int
    bound: float

    @property
    def step(self) -> float:
        """Return the size of a step."""
        return 2 * self.bound / (1 << self.bits)

    def encode(self, tensor: Tensor) -> Tensor:
        """Return the whole numbers, int64 from 0 to 2^b.

        Example:
            >>> Quantiser(2, 1.0).encode(torch.tensor([-9.0, -0.6, 0.0, 0.9]))
            tensor([0, 1, 2, 4])
        """
        return ((tensor.double().clamp(-self.bound, self.bound) + self.bound) / self.step).round().long()

    def decode(self, total: Tensor, count: int) -> Tensor:
        """Return the sum, in float64, of ``count`` numbers whose codes add up to ``total``."""
        return total.double() * self.step - count * self.bound

    def modulus(self, count: int) -> int:
        """Return the smallest power of two, at least 2^32, that the sum of ``count`` codes stays below."""
        return 1 << max(32, (count << self.bits).bit_length())


@dataclass(frozen=True)
class SecureSum:
    """The sum of a round's weighted updates, as a server gets it, and what quantising cost.

    Attributes:
        total: the sum, in float64.
        clipped: share of all clients' entries that were clipped; None if nobody can know.
        error: norm of the difference to the exact sum, over the norm of the exact sum; None if nobody can know.
    """

    total: Update
    clipped: float | None = None
    error: float | None = None


def secure_sum(updates: Sequence[Update], weights: Sequence[float], how: Quantiser) -> SecureSum:
    """Add up weighted updates modulo a power of two; buffers get the same weights.

    Example:
        >>> updates = [Update({"w": torch.tensor([0.3])}, 2), Update({"w": torch.tensor([-0.1])}, 3)]
        >>> found = secure_sum(updates, [0.5, 0.5], Quantiser(10, 1.0))
        >>> round(float(found.total.tensors["w"]), 3), found.clipped, found.error < 0.01
        (0.1, 0.0, True)
    """
    clipped = entries = 0
    off = whole = 0.0

    def added(parts: Sequence[Tensors]) -> dict[str, Tensor]:
        nonlocal clipped, entries, off, whole
        found = {}
        for name in parts[0]:
            scaled = [part[name].double() * weight for part, weight in zip(parts, weights, strict=True)]
            codes = torch.stack([how.encode(one) for one in scaled]).sum(0) % how.modulus(len(parts))
            found[name] = how.decode(codes, len(parts))
            exact = torch.stack(scaled).sum(0)
            clipped += sum(int(one.abs().gt(how.bound).sum()) for one in scaled)
            entries += sum(one.numel() for one in scaled)
            off += float((found[name] - exact).square().sum())
            whole += float(exact.square().sum())
        return found

    total = Update(
        added([one.tensors for one in updates]),
        sum(one.num_examples for one in updates),
        added([one.buffers for one in updates]),
    )
    return SecureSum(total, clipped / max(entries, 1), (off / whole) ** 0.5 if whole else 0.0)
