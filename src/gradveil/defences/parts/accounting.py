"""Privacy cost of training with clipped gradients and Gaussian noise, computed by the accountants of Opacus."""

import functools
import math
import warnings
from typing import NamedTuple

from gradveil.errors import ConfigError
from gradveil.validate import in_range, one_of

_EXTRA_ORDERS = (11, 11.5, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rényi orders in addition to those of Opacus, which have a gap and end too low for small budgets."""


class Releases(NamedTuple):
    """What one client releases over a whole training, for the accounting of differential privacy.

    Attributes:
        num_examples: images of the client.
        batch_size: images per step (the expected number if batches are sampled).
        steps: local steps in all rounds together.
        uses: the number of steps that one image can be part of if batches are not sampled: one per epoch, or one per
            round with FedSGD.
        rounds: number of updates sent.
        entries: numbers in an update of the model; 0 if unknown.
    """

    num_examples: int
    batch_size: int
    steps: int
    uses: int
    rounds: int = 1
    entries: int = 0


class Budget(NamedTuple):
    """A guarantee of differential privacy for each image of a client; the defence defines neighbouring data sets.

    Attributes:
        epsilon: of (ε, δ)-differential privacy.
        delta: of the same.
        mu: of Gaussian differential privacy, if the guarantee is that, else None.
    """

    epsilon: float
    delta: float
    mu: float | None = None


@functools.cache
def epsilon(noise: float, rate: float, steps: int, delta: float, accountant: str = "rdp") -> float:
    r"""Return the ε of (ε, δ)-differential privacy after ``steps`` sampled Gaussian mechanisms.

    Neighbouring data sets differ by adding or removing one image. Each step releases
    :math:`\sum_{i \in S} g_i + N(0, (\text{noise} \cdot C)^2)` with :math:`\|g_i\| \le C`. Each image is in S with
    probability ``rate``, independently of the others (Poisson sampling); with rate 1 this is the plain Gaussian
    mechanism. Both accountants give upper bounds, and ``prv`` is never above ``rdp``.

    Reference: Mironov et al. 2019, https://arxiv.org/abs/1908.10530 (``rdp``, converted to ε by Theorem 21 of
    https://arxiv.org/abs/1905.09982); Gopi et al. 2021, https://arxiv.org/abs/2106.02848 (``prv``).

    Args:
        noise: noise multiplier; with 0 the result is infinite.
        rate: probability that an image takes part in a step; with 0 the result is 0.
        steps: number of steps that are composed; with 0 the result is 0.
        delta: δ, in (0, 1).
        accountant: ``rdp``, or ``prv``, which is tighter and slower.

    Example:
        >>> round(epsilon(1.0, 0.01, 1000, 1e-5), 2)
        2.1
        >>> epsilon(0.0, 0.01, 1000, 1e-5)
        inf
    """
    in_range("noise", noise, 0)
    in_range("rate", rate, 0, 1)
    in_range("steps", steps, 0)
    in_range("delta", delta, 0, 1, open_low=True, open_high=True)
    one_of("accountant", accountant, ["rdp", "prv"])
    if not isinstance(steps, int):
        raise ConfigError(f"steps must be a whole number, got {steps}. Round it to one.")
    if steps == 0 or rate == 0:
        return 0.0
    if noise == 0:
        return float("inf")
    from opacus.accountants import PRVAccountant, RDPAccountant  # takes seconds to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "the best order is the last one": the bound still holds
        by_orders = RDPAccountant()
        by_orders.history = [(noise, rate, steps)]
        orders = [*RDPAccountant.DEFAULT_ALPHAS, *_EXTRA_ORDERS]
        bound = max(0.0, float(by_orders.get_epsilon(delta, alphas=orders)))
        if accountant == "rdp":
            return bound
        by_convolution = PRVAccountant()
        by_convolution.history = [(noise, rate, steps)]
        error = 0.01 * max(1.0, bound)  # a finer mesh takes more memory, and an error of 1 % is small enough
        try:
            return min(bound, max(0.0, float(by_convolution.get_epsilon(delta, eps_error=error))))
        except RuntimeError:  # the convolution fails for an ε of thousands and more
            return bound


@functools.cache
def poisson_noise(wanted: float, rate: float, steps: int, delta: float) -> float:
    """Return the smallest noise multiplier, within 0.1 %, whose ε after ``steps`` sampled steps is at most ``wanted``.

    Example:
        >>> noise = poisson_noise(4.0, 0.1, 60, 1e-5)
        >>> epsilon(noise, 0.1, 60, 1e-5) <= 4 < epsilon(noise * 0.99, 0.1, 60, 1e-5)
        True
    """
    low, high = 1e-3, 1.0
    while epsilon(high, rate, steps, delta) > wanted:
        high *= 2
        if high > 1e9:
            raise ConfigError(f"epsilon must be large enough for noise that can be drawn, got {wanted:g}. Raise mu.")
    while high > low * 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle, rate, steps, delta) <= wanted else (middle, high)
    return high
