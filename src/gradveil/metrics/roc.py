"""The ROC curve of membership scores, and numbers derived from it.

Members are images that were trained on, others are images that were not; a higher score claims membership.
"""

import torch
from scipy.special import ndtri
from torch import Tensor

FALSE_ALARMS = 0.01
"""False positive rate at which the true positive rate is reported."""
FALSE_RATES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""False positive rates at which a row stores its ROC curve."""


def rates(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the false and the true positive rates (K,) of all thresholds: the ROC curve from (0, 0) to (1, 1).

    Equal scores count as one threshold.

    Example:
        >>> [rate.tolist() for rate in rates(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))]
        [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    thresholds = torch.unique(torch.cat([members, others])).flip(0)
    both = [
        torch.searchsorted(-scores.sort(descending=True).values, -thresholds, right=True).double() / len(scores)
        for scores in (others, members)
    ]
    false, true = (torch.cat([rate.new_zeros(1), rate]) for rate in both)
    return false, true


def area(members: Tensor, others: Tensor) -> float:
    """Return the area under the ROC curve: how often a member scores higher than another image; ties count half.

    Example:
        >>> area(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))
        0.875
    """
    false, true = rates(members, others)
    return float(torch.trapezoid(true, false))


def area_interval(members: Tensor, others: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    r"""Return the interval of the area for other images of the same kind, by DeLong's standard error.

    .. math:: \hat A \pm z \sqrt{\frac{S^2_{members}}{M} + \frac{S^2_{others}}{N}}

    S are the standard deviations of how often each member exceeds the others, and each other image lies below the
    members. The interval never leaves [0, 1], and is all of it if fewer than two of either were scored. It does not
    cover the chance of the training.

    Reference: DeLong et al. 1988, https://doi.org/10.2307/2531595.

    Example:
        By hand: the members' shares are 1 and 3/4, the others' 3/4 and 1, so both variances are 1/32.

        >>> [round(end, 4) for end in area_interval(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))]
        [0.5285, 1.0]
    """
    if min(len(members), len(others)) < 2:
        return 0.0, 1.0
    above = (members[:, None] > others).double() + (members[:, None] == others).double() / 2  # (M, N)
    variance = above.mean(1).var() / len(members) + above.mean(0).var() / len(others)
    half = float(ndtri((1 + confidence) / 2)) * float(variance.sqrt())
    middle = float(above.mean())
    return max(0.0, middle - half), min(1.0, middle + half)


def found_at(members: Tensor, others: Tensor, false_alarms: float = FALSE_ALARMS) -> float:
    """Return the largest true positive rate at a false positive rate of at most ``false_alarms``."""
    false, true = rates(members, others)
    return float(true[false <= false_alarms].max())


def curve(members: Tensor, others: Tensor) -> list[float]:
    """Return the true positive rates at `FALSE_RATES`.

    The curve is linear between its points, as in `area`; at a step upwards the highest value counts.

    Example:
        >>> curve(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))[-8:]
        [0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    false, true = rates(members, others)
    wanted = false.new_tensor(FALSE_RATES)
    before = torch.searchsorted(false, wanted, right=True) - 1
    after = (before + 1).clamp_max(len(false) - 1)
    share = ((wanted - false[before]) / (false[after] - false[before]).clamp_min(1e-12)).clamp(0, 1)
    return [round(rate, 6) for rate in torch.lerp(true[before], true[after], share).tolist()]


def advantage(members: Tensor, others: Tensor) -> float:
    """Return the largest difference between the true and the false positive rate over all thresholds."""
    false, true = rates(members, others)
    return float((true - false).max())
