"""Match guesses with true images: an attack returns a batch in any order."""

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.metrics.base import check_images, is_guess, unit

NO_GUESS = 2.0
"""Cost of a guess that is not finite: more than any MSE of images in [0, 1]."""


def match(truth: Tensor, guess: Tensor) -> Tensor:
    """Return the index of each true image's guess, so that the sum of all mean squared errors is smallest.

    This is the Hungarian assignment on the MSE of all pairs, clamped to [0, 1]; each guess is used at most once.
    Guesses that are not finite are used only if no others are left. If there are too few guesses, some indices are -1;
    if there are too many, the worst are left out.

    Args:
        truth: (N, C, H, W), floating point, finite.
        guess: (M, C, H, W), with any M.

    Returns:
        (N,) int64, on the CPU: ``guess[match(truth, guess)]`` is in the order of ``truth`` if M >= N.

    Example:
        >>> truth = torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1, 1)
        >>> match(truth, truth[[2, 0, 1]])
        tensor([1, 2, 0])
        >>> match(truth, truth[[2]])
        tensor([-1, -1,  0])

    Reference: Kuhn 1955, https://doi.org/10.1002/nav.3800020109, by scipy.optimize.linear_sum_assignment.
    """
    check_images(truth, guess)
    order = torch.full((len(truth),), -1, dtype=torch.int64)
    if len(truth) and len(guess):
        usable = is_guess(guess)
        one, other = unit(truth, truth.device).flatten(1), unit(guess, truth.device).nan_to_num(0).flatten(1)
        distance = torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")  # (N, M), exact for equal ones
        cost = (distance.square() / one.shape[1]).cpu()
        cost[:, ~usable] = NO_GUESS
        rows, columns = linear_sum_assignment(cost.numpy())
        order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return order


def align(truth: Tensor, guess: Tensor) -> Tensor:
    """Return the guesses in the order of the truth, matched by `match`; an image without a guess is NaN.

    Args:
        truth: (N, C, H, W), floating point, finite.
        guess: (M, C, H, W), with any M.

    Returns:
        A copy (N, C, H, W), with the guesses' type and device.

    Example:
        >>> truth = torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1, 1)
        >>> align(truth, truth[[2, 0]]).flatten()
        tensor([0.1000,    nan, 0.9000])
    """
    order = match(truth, guess)
    aligned = guess.new_full((len(truth), *guess.shape[1:]), math.nan)
    found = order >= 0
    aligned[found.to(guess.device)] = guess.detach()[order[found].to(guess.device)]
    return aligned
