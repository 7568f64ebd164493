"""The ROC curve of scores that tell members from others, and figures read off it."""

import torch
from torch import Tensor

FALSE_ALARMS = 0.01
"""The share of others taken for members at which the share of members found is told."""
FALSE_RATES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The false positive rates at which a row keeps its ROC curve."""


def rates(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The ROC curve: the shares of others and of members whose score reaches a threshold, for all thresholds.

    Both are (K,), from (0, 0) to (1, 1); equal scores are one threshold.

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
    """The area under the ROC curve: how often a member scores higher than another image, ties counted half.

    Example:
        >>> area(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))
        0.875
    """
    false, true = rates(members, others)
    return float(torch.trapezoid(true, false))


def found_at(members: Tensor, others: Tensor, false_alarms: float = FALSE_ALARMS) -> float:
    """The largest share of members found by a threshold that takes at most so many others for members."""
    false, true = rates(members, others)
    return float(true[false <= false_alarms].max())


def curve(members: Tensor, others: Tensor) -> list[float]:
    """The ROC curve at `FALSE_RATES`, straight between its points as `area` has it; the most at a step upwards.

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
    """The largest difference between the shares of members and of others that a threshold takes for members."""
    false, true = rates(members, others)
    return float((true - false).max())
