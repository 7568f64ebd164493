"""The share of a batch's labels that was recovered."""

import math
from collections import Counter

import torch
from torch import Tensor

from gradveil.errors import ConfigError

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def label_accuracy(truth: Tensor, guess: Tensor) -> float:
    r"""Return the share of a batch's labels that the guess contains, each as often as it occurs, in any order.

    .. math:: \frac{\sum_c \min(n_c, \hat n_c)}{\max(N, \hat N)}

    with the number of times each class c occurs in truth and guess, and the number of labels in each. A guess that is
    longer than the truth is divided by its own length, so that naming every class gains nothing.

    Range: 0 to 1. Edge cases: NaN if both are empty.
    Reference: the label extraction accuracy of Yin et al. 2021 (GradInversion), https://arxiv.org/abs/2104.07586,
    with repeated labels counted.

    Args:
        truth: (N,) class indices, an integer type.
        guess: (M,) class indices, an integer type; a negative index stands for a label not guessed.

    Example:
        By hand: of the batch 3, 3, 3, 5 both guesses have 3 twice and 5 once; their fourth label earns nothing.

        >>> label_accuracy(torch.tensor([3, 5, 3, 3]), torch.tensor([5, 3, 5, 3]))
        0.75
        >>> label_accuracy(torch.tensor([3, 5, 3, 3]), torch.tensor([5, -1, 3, 3]))
        0.75
        >>> label_accuracy(torch.tensor([3]), torch.arange(10))
        0.1
    """
    for name, labels in (("truth", truth), ("guess", guess)):
        if labels.ndim != 1 or labels.dtype not in WHOLE:
            raise ConfigError(
                f"{name} must be class indices (N,) of an integer type, got shape {tuple(labels.shape)} of "
                f"{labels.dtype}. Take the argmax of probabilities first."
            )
    longest = max(len(truth), len(guess))
    if longest == 0:
        return math.nan
    common = Counter(truth.tolist()) & Counter(label for label in guess.tolist() if label >= 0)
    return common.total() / longest
