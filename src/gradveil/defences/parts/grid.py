r"""Noise on a grid: the noise of all defences, in a form to which attacks on floating-point arithmetic do not apply.

Noise that is added to floating-point numbers can be taken off again, at least in part: which numbers can come out
depends on what went in (Mironov 2012, https://doi.org/10.1145/2382196.2382264), the draws that give a seen sum can be
searched for (Jin et al. 2022, https://arxiv.org/abs/2112.05307), and rounding within a sum can exceed the sensitivity
(Casacuberta et al. 2022, https://arxiv.org/abs/2207.10635). Here everything is a whole number of steps g, a power of
two of at most :math:`\sigma / 2^{20}`:

- A clipped contribution is rounded toward zero to the grid, which never increases its norm (`in_steps`). Sums of steps
  below :math:`2^{53}` are exact in float64.
- The noise is :math:`\text{round}(s Z)` steps, with Z a standard normal or Laplace draw in float64 and
  :math:`s = \sigma / g`. Since x is whole, :math:`x + \text{round}(s Z) = \text{round}(x + s Z)`: this is the ideal
  mechanism followed by rounding, so the bounds of the ideal one hold for it unchanged, with Poisson sampling too.
- The sum is then converted to the type that is sent. That depends on the exact sum alone, so it costs nothing. All
  that is sent is on the grid: rounding to float32 only moves to a coarser power of two.

A discrete Gaussian drawn by rejection (Canonne, Kamath and Steinke 2020, https://arxiv.org/abs/2004.00010) would need
no draw in floating point, but is some hundred times slower here, its time depends on the draws, and accountants for
sampled batches do not cover it. Opacus adds several floating-point draws instead, which makes the search for draws
harder, but does not exclude it. Google's library rounds to a grid as we do.

What differs from the ideal: Z is accurate to :math:`2^{-46}` (`SecretStream.normal`), so the probability of each pair
of results is that of the ideal mechanism within a factor of :math:`1 \pm 2^{-23}`, and of :math:`1 \pm 2^{-26}` in root
mean square. Over a thousand updates of a million entries each this adds less than 0.002 to ε, except with probability
:math:`10^{-12}`. Laplace noise adds at most :math:`2^{-23}` to the ε of each number. Magnitudes end at 13 σ, or 87
scales of Laplace noise, beyond which the ideal has a probability below :math:`2^{-120}`; where the ideal has one below
:math:`2^{-70}`, draws are coarser than the grid. None of these terms is in the budgets shown.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradveil.secret_stream import SecretStream

_FINENESS = 20
"""The scale of the noise is at least 2^20 steps: far finer than a typical entry, and not finer than needed."""
_CHUNK = 2**15
"""Numbers that get noise together; more do not fit a processor's cache."""
_MOST_STEPS = 32
"""A bounded contribution is at most 2^33 steps, so that a million of them have an exact sum."""


def grid_of(scale: float, bound: float = 0.0) -> float:
    """Return the step for noise of this scale on contributions of at most ``bound`` (0: they are not added up).

    Example:
        >>> grid_of(1.0) == grid_of(1.9) == 2.0**-20, grid_of(1e-9, bound=1.0) == 2.0**-32
        (True, True)
    """
    return max(_power(scale, -_FINENESS), _power(bound, -_MOST_STEPS))


def in_steps(numbers: Tensor, grid: float) -> Tensor:
    """Return numbers as whole steps, rounded toward zero; the type stays the same, and the result is exact.

    Example:
        >>> in_steps(torch.tensor([0.7, -0.7, 0.2]), 0.25)
        tensor([ 2., -2.,  0.])
    """
    return (numbers / grid).trunc_()


def toward_zero(numbers: Tensor) -> Tensor:
    """Return finite numbers below 2^62, rounded toward zero, as int64: several times faster than `torch.trunc`.

    Example:
        >>> toward_zero(torch.tensor([2.9, -2.9, 0.2]))
        tensor([ 2, -2,  0])
    """
    return numbers.to(torch.int64)


def add_gaussian(tensor: Tensor, std: float, rng: SecretStream) -> Tensor:
    """Round to the grid toward zero and add Gaussian noise; computed on the CPU, of the same type and device."""
    return _added(tensor, std, rng.normal) if std else tensor.clone()


def add_laplace(tensor: Tensor, scale: float, rng: SecretStream) -> Tensor:
    """Round to the grid toward zero and add Laplace noise; computed on the CPU, of the same type and device."""
    return _added(tensor, scale, rng.laplace) if scale else tensor.clone()


def gaussian_steps(like: Tensor, std: float, grid: float, rng: SecretStream) -> Tensor:
    """Return Gaussian noise as whole steps in float64, with the shape and device of ``like``."""
    return rng.normal(like.shape, torch.float64, std / grid).round_().to(like.device)


def _added(tensor: Tensor, scale: float, draw: Callable[[Sequence[int], torch.dtype, float], Tensor]) -> Tensor:
    """Add noise chunk by chunk; ``draw`` makes numbers of a shape, type and scale."""
    grid, numbers = grid_of(scale), tensor.detach().cpu().reshape(-1)
    noisy = torch.empty_like(numbers)
    for start in range(0, len(numbers), _CHUNK):
        part = numbers[start : start + _CHUNK]
        noise = draw(part.shape, torch.float64, scale / grid).round_()
        noisy[start : start + _CHUNK] = noise.add_(in_steps(part.double(), grid)).mul_(grid)
    return noisy.view(tensor.shape).to(tensor.device)


def _power(number: float, exponent: int) -> float:
    """Return the largest power of two that is at most the number, times 2 to the exponent; 0 for 0."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1 + exponent) if number else 0.0
