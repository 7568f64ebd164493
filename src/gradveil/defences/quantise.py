"""Quantisation: round each entry to one of a few levels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.feedback import Compression
from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream
from gradveil.types import Tensors
from gradveil.validate import in_range

_TINY = 1e-12


@dataclass(frozen=True)
class Quantise(Compression):
    r"""Round the entries of each tensor to as many levels as ``bits`` bits can encode.

    .. math::
        \text{1 bit: } \tilde u_i = \operatorname{mean}|u| \cdot \operatorname{sign}(u_i), \qquad
        \text{n bits: } \tilde u_i = \frac mk \operatorname{round}\Big(\frac{k u_i}{m}\Big), \quad
        m = \max|u|,\ k = 2^{n-1} - 1

    With n > 1 bits there are :math:`2^n - 1` levels, symmetric about zero, including zero. ``stochastic`` rounds up or
    down at random such that the expected value is the entry itself; with one bit the levels are then :math:`\pm m`. A
    tensor of zeros stays zero. BatchNorm's running statistics (``Update.buffers``) are sent unchanged.

    Threat model: an honest-but-curious server that sees individual updates.
    Does not protect: against an attacker who accepts every gradient that rounds to the one it saw. Even signs alone
        suffice for a trained inverter to recover images (Wu et al. 2023, Learning To Invert). With ``feedback``,
        against a server that adds up many rounds of the same images.
    Guarantee: none; evidence is empirical.
    Reference: Bernstein et al. 2018, https://arxiv.org/abs/1802.04434 (signs), with the scale of Karimireddy et al.
        2019, https://arxiv.org/abs/1901.09847; Alistarh et al. 2017 (QSGD), https://arxiv.org/abs/1610.02132
        (stochastic rounding); Wen et al. 2017 (TernGrad), https://arxiv.org/abs/1705.07878 (``bits=2`` with
        ``stochastic``).
    Differs from the paper: QSGD divides by the L2 norm; this divides by the largest magnitude, as TernGrad does. Exact
        zeros have no sign and stay zero.

    Attributes:
        where: ``update`` rounds the update once per round; ``gradient`` rounds the gradient of every local step.
        bits: bits per entry, 1 to 16.
        stochastic: whether to round at random, without bias.
        feedback: whether rounding errors are kept on the device and added in the next round (Karimireddy et al.).
    """

    bits: int = 1
    stochastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("bits", self.bits, 1, 16)
        if not isinstance(self.bits, int):
            raise ConfigError(f"bits must be a whole number, got {self.bits}. Set bits to one from 1 to 16.")

    @property
    def levels(self) -> int:
        """Return k, the number of positive levels."""
        return max((1 << self.bits - 1) - 1, 1)

    def perturb(self, tensors: Tensors, rng: SecretStream) -> dict[str, Tensor]:
        """Round each tensor separately; draw one random number per entry if ``stochastic``."""
        return {name: self._rounded(tensor, rng) for name, tensor in tensors.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``sign`` for one bit, ``cell`` for more bits, or ``likelihood`` for stochastic rounding.

        ``sign`` compares smoothed signs. ``cell`` counts only the part of a difference that lies outside the rounding
        interval. Stochastic rounding is treated as unbiased noise; its variance is 1/6 of a squared level on average,
        and a whole squared level for one bit. Of several rounds with ``feedback``, ``sum`` compares the sums.
        """
        if self.feedback and arrived.rounds > 1:
            return {"sum": Countermove(adds_up=True)}
        if self.stochastic:
            share = 1.0 if self.bits == 1 else math.sqrt(1 / 6)
            present = {name: t.abs().reshape(len(t), -1) for name, t in arrived.gradients.items() if t.numel()}
            sizes = {name: flat.amax(1).mean().item() for name, flat in present.items()}
            noise = {name: share * size / self.levels for name, size in sizes.items() if size > 0}
            return {"likelihood": Countermove(distance="l2", noise=noise)}
        if self.bits == 1:
            return {"sign": Countermove(_soft_signs, "cosine")}
        return {"cell": Countermove(self._outside, "l2")}

    def _rounded(self, tensor: Tensor, rng: SecretStream) -> Tensor:
        if not tensor.numel():
            return tensor.clone()
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if self.bits == 1 and not self.stochastic:
            return (wide.sign() * wide.abs().mean()).to(tensor.dtype)
        largest = wide.abs().max()
        exact = wide / largest.masked_fill(largest == 0, 1.0) * self.levels  # in [-k, k]
        if not self.stochastic:
            return (exact.round() / self.levels * largest).to(tensor.dtype)
        draw = rng.uniform(tensor.shape, wide.dtype).to(tensor.device)
        if self.bits == 1:
            level = (draw < (1 + exact) / 2) * 2.0 - 1.0
        else:
            level = exact.floor() + (draw < exact - exact.floor())
        return (level / self.levels * largest).to(tensor.dtype)

    def _outside(self, guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
        """Return the seen gradient plus the part of the guess's difference from it that rounding cannot explain."""
        sent = {}
        for name, tensor in guess.items():
            reach = _largest(seen[name]) / self.levels * (1.0 if self.stochastic else 0.5)
            difference = tensor - seen[name]
            sent[name] = seen[name] + difference - torch.maximum(torch.minimum(difference, reach), -reach)
        return sent


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest magnitude of each of T gradients, shaped (T, 1, ...) for broadcasting."""
    if not tensor.numel():
        return tensor.abs()
    return tensor.abs().reshape(len(tensor), -1).amax(1).view(-1, *[1] * (tensor.dim() - 1))


def _soft_signs(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Return a smooth sign of each entry x of the guess, x / (abs(x) + median), times the largest seen magnitude."""
    sent = {}
    for name, tensor in guess.items():
        if tensor.numel():
            magnitudes = tensor.abs()
            median = magnitudes.detach().reshape(len(tensor), -1).median(1).values
            soft = tensor / (magnitudes + median.view(-1, *[1] * (tensor.dim() - 1)) + _TINY)
            sent[name] = soft * _largest(seen[name])
        else:
            sent[name] = tensor
    return sent
