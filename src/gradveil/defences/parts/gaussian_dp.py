r"""Gaussian differential privacy: guarantees as one number, mu, that composes exactly.

A mechanism is mu-GDP if telling two neighbouring data sets apart by all that it releases is at least as hard as telling
N(0, 1) from N(mu, 1) by one draw. A sum whose neighbours differ by at most C, with noise of standard deviation
:math:`\sigma C`, is :math:`1 / \sigma`-GDP, and T of them together are exactly :math:`\sqrt T / \sigma`-GDP.

Reference: Dong, Roth and Su 2019, https://arxiv.org/abs/1905.02383 (Corollary 2.13, Theorem 2.7, Corollary 3.3).
"""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

MOST_EPSILON = 1e9
"""Largest epsilon that is reported; it stands for no noise at all."""
CANDIDATES = 1000
"""Images among which the bound on identification lets an attacker choose."""


def epsilon_of(mu: float, delta: float) -> float:
    r"""Return the epsilon of telling N(mu, 1) from N(0, 1), at most `MOST_EPSILON`; 0 if ``mu`` is not positive.

    .. math:: \delta = \Phi\Big(\frac\mu 2 - \frac\varepsilon\mu\Big) -
        e^\varepsilon \, \Phi\Big(-\frac\mu 2 - \frac\varepsilon\mu\Big)

    Example:
        >>> round(epsilon_of(1.0, 1e-5), 2), epsilon_of(1e-9, 1e-5), epsilon_of(math.inf, 1e-5)
        (4.38, 0.0, 1000000000.0)
    """
    if mu <= 0:
        return 0.0
    if mu * mu / 2 >= MOST_EPSILON:
        return MOST_EPSILON
    if _log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    highest = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    found = float(brentq(lambda epsilon: _log_delta(epsilon, mu) - math.log(delta), 0.0, highest))
    return min(found, MOST_EPSILON)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the mu whose epsilon at ``delta`` is this one: the inverse of `epsilon_of`.

    Example:
        >>> round(mu_of(epsilon_of(2.0, 1e-5), 1e-5), 6)
        2.0
    """
    highest = math.sqrt(2 * MOST_EPSILON)
    if epsilon >= MOST_EPSILON:
        return highest
    return float(brentq(lambda mu: epsilon_of(mu, delta) - epsilon, 1e-12, highest, xtol=1e-12))


def identification_bound(mu: float, candidates: int = CANDIDATES) -> float:
    r"""Return the largest chance with which any attacker picks the true image among equally likely candidates.

    Without the image, what is released says nothing about it, and every choice is right with chance 1 / M. By the
    trade-off function of mu-GDP, an event of chance 1 / M then has at most the chance

    .. math:: \Phi\big(\Phi^{-1}(1 / M) + \mu\big)

    Example:
        >>> [round(identification_bound(mu), 3) for mu in (0.0, 1.0, 2.0, 3.0, 5.0)]
        [0.001, 0.018, 0.138, 0.464, 0.972]
    """
    return float(ndtr(ndtri(1 / candidates) + mu))


def _log_delta(epsilon: float, mu: float) -> float:
    """Return the logarithm of delta; differences of logarithms stay exact where probabilities would underflow."""
    first, second = log_ndtr([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
    share = min(float(epsilon + second - first), -1e-300)
    return float(first) + math.log(-math.expm1(share))
