"""Priors on images that an attacker learns from public images, for searches under known noise."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.generators.covariance import normal_images
from gradveil.generators.denoiser import Denoiser, train_denoiser

LEARNED = ("normal", "denoiser")
"""The priors: normal with the covariance of public images; that, and then a denoiser."""
LEVELS = (0.3, 0.15, 0.07, 0.03)
"""Noise levels of the denoiser, in pixels of [0, 1], one after the other."""
RATE = 0.05
"""Adam's learning rate under the normal prior and under the first noise level, in pixels of [0, 1]."""


@dataclass(frozen=True)
class LearnedPrior:
    """A penalty on images, and how fast a search with it may move.

    Attributes:
        penalty: from images (N, C, H, W) in [0, 1] to minus the logarithm of their density, (N,), per pixel.
        rate: Adam's learning rate, in pixels of [0, 1].
    """

    penalty: Callable[[Tensor], Tensor]
    rate: float


def learned_priors(kind: str, public: Tensor) -> list[LearnedPrior]:
    r"""Return the priors to search with, one after the other.

    The normal prior has one valley as long as the network is close to linear, which finds a start. With the denoiser
    :math:`D_s`, for falling s, the penalty is

    .. math:: \frac{\|x - D_s(x)\|^2}{2 s^2}

    the squared step that the denoiser would still take, in units of the noise that it expects.

    Args:
        kind: one of `LEARNED`.
        public: (N, C, H, W) in [0, 1].
    """
    found = [LearnedPrior(normal_images(public).penalty, RATE)]
    if kind == "denoiser":
        denoiser = train_denoiser(public).to(public)
        found += [LearnedPrior(_Left(denoiser, level), RATE * (level / LEVELS[0]) ** 0.5) for level in LEVELS]
    return found


@dataclass(frozen=True)
class _Left:
    """What a denoiser for one noise level would still change in an image."""

    denoiser: Denoiser
    level: float

    def __call__(self, images: Tensor) -> Tensor:
        change: Tensor = images - self.denoiser(images, torch.full_like(images[:, 0, 0, 0], self.level))
        return change.square().flatten(1).mean(1) / (2 * self.level**2)
