"""What an attacker knows about images before it sees any update: how they vary, learned from public images."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.generators.covariance import normal_images
from gradveil.types import Batch

MOST = 2000
"""Public images to learn from, at most."""
FEWEST = 16
"""Public images that a covariance needs at least."""
OWN_MEAN = 10
"""Public images of a class from which on the class has a mean image of its own."""


@dataclass(frozen=True)
class ImagePrior:
    """Two normal distributions of images with d = C H W numbers, for attackers who know the labels.

    Attributes:
        white: the variance (d,) of pixels around the mean of their channel; neighbouring pixels are independent.
        covariance: the covariance (d, d) of images around the mean image of their class, or None if there are too few
            public images to learn it.
    """

    white: Tensor
    covariance: Tensor | None

    def __post_init__(self) -> None:
        if not bool((self.white > 0).all()):
            raise ConfigError(
                "A score needs public images whose pixels vary, got a channel in which all are equal. "
                "Check the test images."
            )

    @property
    def named(self) -> dict[str, Tensor]:
        """The distributions by name, as far as there are any."""
        found = {"white": self.white, "covariance": self.covariance}
        return {name: prior for name, prior in found.items() if prior is not None}


def image_prior(public: Batch) -> ImagePrior:
    """Return what public images tell about images of the same kind.

    The covariance is that within classes, the same for all classes, after Ledoit and Wolf (`normal_images`). Classes
    with few public images share a mean image.
    """
    if not len(public):
        raise ConfigError(
            "A score needs public images, to know how much images vary, got none: all test images are also training "
            "images. Add other test images, or --aux."
        )
    images = public.images.cpu().double()
    channels = images.var((0, 2, 3), correction=0)
    white = channels.repeat_interleave(images[0, 0].numel())
    if len(images) < FEWEST:
        return ImagePrior(white, None)
    return ImagePrior(white, normal_images(_within_classes(images, public.labels.cpu())).covariance())


def _within_classes(images: Tensor, labels: Tensor) -> Tensor:
    """Return the deviations of images from the mean of their class, scaled to have the variance of new images."""
    counts = torch.bincount(labels)
    groups = torch.where(counts[labels] >= OWN_MEAN, labels, -1)
    apart, means = torch.empty_like(images), torch.unique(groups)
    for group in means:
        some = groups == group
        apart[some] = images[some] - images[some].mean(0)
    scale = math.sqrt(len(images) / max(len(images) - len(means), 1))
    return apart * scale
