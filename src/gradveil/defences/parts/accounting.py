"""How much privacy a training with clipped gradients and Gaussian noise has cost: Opacus's accountants, asked once."""

import functools
import warnings

from gradveil.errors import ConfigError
from gradveil.validate import in_range, one_of

_EXTRA_ORDERS = (11, 11.5, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rényi orders beside Opacus's own, which have a gap and end too low for small budgets."""


@functools.cache
def epsilon(noise: float, rate: float, steps: int, delta: float, accountant: str = "rdp") -> float:
    r"""The ε of (ε, δ)-differential privacy (add or remove one image) after ``steps`` sampled Gaussian mechanisms.

    Each step releases :math:`\sum_{i \in S} g_i + N(0, (\text{noise} \cdot C)^2)` with :math:`\|g_i\| \le C`, where an
    image is in S with probability ``rate``, independently (Poisson sampling); rate 1 is the plain Gaussian mechanism.
    Both accountants give upper bounds; ``prv`` is never above ``rdp``.

    Reference: Mironov et al. 2019, https://arxiv.org/abs/1908.10530 (``rdp``, turned into ε by Theorem 21 of
    https://arxiv.org/abs/1905.09982); Gopi et al. 2021, https://arxiv.org/abs/2106.02848 (``prv``).

    Args:
        noise: the noise multiplier; 0 is no privacy, infinity.
        rate: probability that an image takes part in a step; 0 costs nothing.
        steps: how many are composed; 0 costs nothing.
        delta: in (0, 1).
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
        raise ConfigError(f"steps must be a whole number, got {steps}.")
    if steps == 0 or rate == 0:
        return 0.0
    if noise == 0:
        return float("inf")
    from opacus.accountants import PRVAccountant, RDPAccountant  # takes seconds to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the last one: the bound holds all the same
        by_orders = RDPAccountant()
        by_orders.history = [(noise, rate, steps)]
        orders = [*RDPAccountant.DEFAULT_ALPHAS, *_EXTRA_ORDERS]
        bound = max(0.0, float(by_orders.get_epsilon(delta, alphas=orders)))
        if accountant == "rdp":
            return bound
        by_convolution = PRVAccountant()
        by_convolution.history = [(noise, rate, steps)]
        error = 0.01 * max(1.0, bound)  # the finer the mesh, the more memory: an error of 1 % is fine
        try:
            return min(bound, max(0.0, float(by_convolution.get_epsilon(delta, eps_error=error))))
        except RuntimeError:  # budgets of thousands and more, where the convolution finds nothing
            return bound
