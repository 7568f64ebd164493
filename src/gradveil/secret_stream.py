"""Secret random streams: all draws that protect someone come from a cipher, so that no draw tells of the others."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.randomness import SECRET, block_key

_BLOCK = 16
"""Bytes in a block of AES."""
_CHUNK = 2**15
"""Normal numbers that are drawn together; more do not fit a processor's cache."""
_POSITIVE = 2**63 - 1
"""Mask of all bits of a 64-bit word but the sign."""


class SecretStream:
    """Random draws from AES-256 in counter mode, keyed by a hash of a seed and the names of a purpose.

    Whoever sees any number of draws can tell the others no better than by breaking AES, or by guessing the seed. So
    the seed must be secret: a real site takes 256 bits from the operating system. A simulation takes the run's seed,
    so that the same seed gives the same draws; that hides nothing from those who know the seed.

    All draws are on the CPU. A stream is not for several threads at once.

    Example:
        >>> one, same, other = (SecretStream(0, "client", number) for number in (3, 3, 4))
        >>> first = one.uniform((5,))
        >>> torch.equal(first, same.uniform((5,))), torch.equal(first, other.uniform((5,)))
        (True, False)

    Args:
        seed: any whole number; for secrecy, 256 bits from the operating system.
        purpose: names of what is drawn. Streams with different names are unrelated.
    """

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self._key = hashlib.sha256(repr(("gradveil", seed, *purpose)).encode()).digest()
        self._cipher = Cipher(AES(self._key), CTR(bytes(_BLOCK))).encryptor()

    def fork(self, *purpose: str | int) -> "SecretStream":
        """Return an unrelated stream for one purpose; it depends on how this stream was made, not on its draws."""
        return SecretStream(int.from_bytes(self._key, "big"), "fork", *purpose)

    def words(self, count: int) -> Tensor:
        """Draw 64-bit words, (count,) of type int64: every bit is random, the sign included."""
        found = np.empty(count + 2, np.int64)  # the cipher wants room for one block more
        self._cipher.update_into(bytes(8 * count), found.view(np.uint8).data)
        return torch.from_numpy(found[:count])

    def seed(self) -> int:
        """Draw a secret seed of 256 bits for `gradveil.randomness.global_stream`.

        It is for layers that draw from torch's global generator themselves (Dropout). That generator is a Mersenne
        Twister: whoever sees enough of its raw draws can compute all others of the same ``with`` block. It must never
        make noise or keys.
        """
        return SECRET | int.from_bytes(self.words(4).numpy().tobytes(), "big")

    def uniform(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw numbers in [0, 1), all multiples of the type's precision (2^-24 for float32) with equal probability."""
        digits = min(53, 1 - round(math.log2(torch.finfo(dtype).eps)))
        return _shaped(((self._words(shape) >> (64 - digits)) & (2**digits - 1)).double() * 2.0**-digits, shape, dtype)

    def bernoulli(self, probability: float, shape: Sequence[int]) -> Tensor:
        """Draw booleans that are true with a probability, to an accuracy of 2^-53."""
        return self.uniform(shape, torch.float64) < probability

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """Draw whole numbers from ``low`` to ``high`` - 1, all equally likely; words beyond are drawn again."""
        if not low < high <= low + 2**62:
            raise ConfigError(f"high must be above low by at most 2^62, got {low} and {high}. Swap or change them.")
        mask = (1 << (high - low - 1).bit_length()) - 1
        found = self._words(shape) & mask
        while len(beyond := (found >= high - low).nonzero()[:, 0]):
            found[beyond] = self.words(len(beyond)) & mask
        return _shaped(found + low, shape, torch.int64)

    def permutation(self, count: int) -> Tensor:
        """Draw an order of the numbers from 0 to ``count`` - 1: all orders are equally likely."""
        while True:
            words, order = self.words(count).sort()
            if not bool((words[1:] == words[:-1]).any()):
                return order

    def exponential(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw from the exponential distribution with mean 1; never infinite, and at most 88."""
        return _shaped(_surprise(self.words(2 * math.prod(shape))), shape, dtype)

    def laplace(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Draw from the Laplace distribution with density exp(-abs(x) / scale) / (2 scale).

        In float64 it is accurate to 2^-46 scales.
        """
        count = math.prod(shape)
        words = self.words(2 * count)
        negative = words[:count] < 0
        minus, plus = torch.tensor([-scale, scale], dtype=torch.float64)
        return _shaped(_surprise(words).mul_(torch.where(negative, minus, plus)), shape, dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
        """Draw from the normal distribution with mean 0, by Box and Muller's transformation.

        In float64 it is accurate to 2^-46 standard deviations. The radius comes from 126 random bits, so tails are as
        accurate as the middle, and the angle from 64. For noise with a guarantee use `gradveil.defences.parts.grid`,
        which adds such draws on a grid.
        """
        count = math.prod(shape)
        found = torch.empty(count, dtype=dtype)
        for start in range(0, count, _CHUNK):
            part = found[start : start + _CHUNK]
            part.copy_(self._normal_pairs(-(-len(part) // 2), std).view(-1)[: len(part)])
        return found.view(tuple(shape))

    def _normal_pairs(self, count: int, std: float) -> Tensor:
        """Draw (2, count) normal numbers in float64."""
        words = self.words(3 * count)
        radius = _surprise(words[: 2 * count]).mul_(2 * std * std).sqrt_()
        turned = words[2 * count :].double().mul_(math.pi * 2.0**-63)
        pairs = torch.empty(2, count, dtype=torch.float64)
        torch.cos(turned, out=pairs[0])
        torch.sin(turned, out=pairs[1])
        return pairs.mul_(radius)

    def _words(self, shape: Sequence[int]) -> Tensor:
        return self.words(math.prod(shape))


def attackers_stream(rng: torch.Generator) -> SecretStream:
    """Return a stream for an attacker who draws as a client does; it protects nothing, so a generator may key it."""
    return SecretStream(int(torch.randint(2**63 - 1, (), generator=rng)), "attacker")


def layer_stream() -> SecretStream:
    """Return a stream for a layer that draws while it computes, keyed by torch's global generator and its block's key.

    The cipher hides the generator's bits: whoever sees the layer's draws learns nothing about the generator. Whoever
    knows the generator, for example from masks of Dropout, does not know the key of `global_stream`.
    """
    return SecretStream(block_key(), "layer", *torch.randint(2**32, (8,)).tolist())


def _surprise(words: Tensor) -> Tensor:
    """Return -log(u) as float64, (n,), of 2 n words, with u uniform in (0, 1] from 126 bits.

    u is made of the n first words and, for the bits behind them, of the n others. The words lose their signs.
    """
    high, low = words.bitwise_and_(_POSITIVE).double().view(2, -1)
    uniform: Tensor = high.mul_(2.0**-63).add_(low, alpha=2.0**-126).add_(2.0**-127)
    return uniform.log_().neg_()


def _shaped(numbers: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return numbers.view(tuple(shape)).to(dtype)
