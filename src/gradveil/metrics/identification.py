"""Identification: whether a guess is closer to the true image than to any of many others."""

import torch
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.metrics.base import check_images, is_guess, unit

ROUNDING = 1e-12
"""Mean squared errors that differ by less count as equal; a difference of one in one byte is far more."""


def identified(truth: Tensor, guess: Tensor, others: Tensor) -> Tensor:
    """Return for each guess whether it picks the true image out of ``others`` by the least mean squared error.

    A picture can be poor and still give its owner away, or be smooth and look like any other. Someone who guesses picks
    the right one of K + 1 images with chance 1 / (K + 1). The true image must be strictly closer than every other one.

    Edge cases: a guess that is not finite picks nothing. Without other images every guess picks the true one.

    Args:
        truth: (N, C, H, W) in [0, 1], finite.
        guess: the same shape, in the same order (see `gradveil.metrics.align`).
        others: (K, C, H, W) in [0, 1]: images that none of the guesses is about.

    Returns:
        (N,) bool, on the CPU.

    Example:
        >>> truth, others = torch.tensor([0.2, 0.8]).view(2, 1, 1, 1), torch.tensor([0.5]).view(1, 1, 1, 1)
        >>> identified(truth, torch.tensor([0.3, 0.6]).view(2, 1, 1, 1), others)
        tensor([ True, False])
    """
    check_images(truth, guess)
    if len(truth) != len(guess) or others.shape[1:] != truth.shape[1:]:
        shapes = ", ".join(str(tuple(images.shape)) for images in (truth, guess, others))
        raise ConfigError(
            f"truth, guess and others must be images of one size, one guess per true image, got {shapes}."
        )
    picked = is_guess(guess)
    if not len(others) or not bool(picked.any()):
        return picked
    true, mine, there = (
        unit(images, torch.device("cpu")).flatten(1) for images in (truth[picked], guess[picked], others)
    )
    own = (true - mine).square().sum(1)
    squares = mine.square().sum(1)[:, None] + there.square().sum(1) - 2 * mine @ there.T  # (N, K), of each other image
    picked[picked.clone()] = own < squares.min(1).values - ROUNDING * true.shape[1]
    return picked
