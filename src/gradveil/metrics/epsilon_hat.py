"""The epsilon that canaries reveal: from how far the scores of present canaries lie from those of absent ones."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit
from torch import Tensor

from gradveil.defences.parts.gaussian_dp import epsilon_of

CONFIDENCE = 0.99
"""Confidence of the interval: an alarm about a defence that keeps its promise must be rare."""
USUAL_DELTA = 1e-5
"""Delta at which epsilon is estimated for a defence that states none, or zero."""

EXCEEDS = "the canaries measure more than it states"
"""What is said of a defence whose estimated epsilon lies above its stated one, with its whole interval."""
MEASURED = ("canaries", "epsilon_hat", "epsilon_hat_low", "epsilon_hat_high", "delta_hat", "canaries_exceed")
"""The fields of a row that canaries fill, beside the stated epsilon and delta."""


class EpsilonHat(NamedTuple):
    """An estimated epsilon with the ends of its confidence interval."""

    epsilon: float
    low: float
    high: float


def estimate(scores: Tensor, spread: float, delta: float, distance: float = 1.0) -> EpsilonHat:
    r"""Return the epsilon at which canaries that were present can be told from absent ones.

    Scores of absent canaries are Gaussian with mean 0 and standard deviation ``spread``. Those of present ones are
    taken to have the same spread around their mean, so that telling both apart is as hard as telling N(0, 1) from

    .. math:: N(\hat\mu, 1), \qquad \hat\mu = \frac 1{\text{spread}} \cdot \frac 1K \sum_j \text{score}_j

    which is exact for the Gaussian mechanism. The interval is that of a t test of the mean, turned into epsilons.

    Reference: Andrew et al. 2023, https://arxiv.org/abs/2302.03098, Algorithm 2; Dong et al. 2019,
    https://arxiv.org/abs/1905.02383, Corollary 2.13.
    Differs from the paper: it fits a second spread to the present canaries. Of a few canaries, that adds so much
    chance that the estimate would tell nothing.

    Args:
        scores: (K,) of the canaries that were present, two or more.
        spread: standard deviation of the scores of absent ones; 0 if there is no noise.
        delta: delta of the guarantee, in (0, 1).
        distance: of the two worlds, in units of a present canary's mean: 1 if it is absent in the other, 2 if it is
            replaced by its opposite there.

    Example:
        >>> import torch
        >>> [round(end, 2) for end in estimate(torch.tensor([0.5, 1.0, 1.5]), 1.0, 1e-5)]
        [4.38, 0.0, 23.28]
    """
    values = scores.double().cpu().numpy() * distance
    middle = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    wide = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    found = [_ratio(value, spread) for value in (middle, middle - wide, middle + wide)]
    return EpsilonHat(*(epsilon_of(mu, delta) for mu in found))


def exceeding(row: Mapping[str, Any]) -> str:
    """Return the alarm of a row whose canaries exceed the stated epsilon, or "".

    Example:
        >>> exceeding({"canaries_exceed": True, "epsilon_hat_low": 20.0, "epsilon": 4.375})
        'the canaries measure more than it states: at least 20, stated 4.38'
    """
    if not row.get("canaries_exceed"):
        return ""
    return f"{EXCEEDS}: at least {row['epsilon_hat_low']:.3g}, stated {row['epsilon']:.3g}"


def _ratio(value: float, spread: float) -> float:
    return value / spread if spread > 0 else math.inf * value if value else 0.0
