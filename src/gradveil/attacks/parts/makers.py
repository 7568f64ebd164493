"""Searching the inputs or weights of a generator instead of pixels."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradveil.generators import Latent


class Maker(ABC):
    """Base of functions from rows of numbers (rows, size) to images; rows never mix.

    Attributes:
        size: numbers per row.
        label_rate: factor on the learning rate for the logits of searched labels.
        knows_images: whether it makes only likely images, so that a search under noise needs no other prior.
    """

    size: int
    label_rate: float = 1.0
    knows_images: bool = False

    @abstractmethod
    def begin(self, rows: int, rng: torch.Generator) -> Tensor:
        """Return the first numbers (rows, size), on the CPU."""

    @abstractmethod
    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """Return images (rows * B, C, H, W) in [0, 1]; ``labels`` are (rows, B), or soft ones (rows, B, classes)."""

    def penalty(self, flat: Tensor, pictures: Tensor) -> Tensor:
        """Return the penalty (rows,) that is added to the loss."""
        return flat.new_zeros(len(flat))

    def rates(self) -> Tensor:
        """Return factors (size,) on the learning rate."""
        return torch.ones(self.size)


class Latents(Maker):
    r"""The latents of a trained generator, B per row.

    The penalty is the divergence of a normal distribution with the mean m and the variance v of an image's latents from
    N(0, 1), as in the code of GGL: :math:`\frac{1}{2} (m^2 + v - 1 - \log v)`.

    Args:
        generator: frozen, in evaluation mode.
        batch_size: B.
        squash: whether latents pass through tanh first, which keeps them inside (-1, 1).
        divergence: weight of the penalty, averaged over the images of a row.
    """

    knows_images = True

    def __init__(self, generator: Latent, batch_size: int, *, squash: bool, divergence: float) -> None:
        self._generator, self._squash, self._divergence = generator, squash, divergence
        self.size = batch_size * generator.latent

    def begin(self, rows: int, rng: torch.Generator) -> Tensor:
        """Draw latents from N(0, 1)."""
        return torch.randn(rows, self.size, generator=rng)

    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """Return the generator's images for the latents, and for the labels if it uses them."""
        images: Tensor = self._generator(self._latents(flat), None if labels is None else labels.flatten(0, 1))
        return images

    def penalty(self, flat: Tensor, pictures: Tensor) -> Tensor:
        """Return how unlikely the latents are."""
        if not self._divergence or self._squash:
            return super().penalty(flat, pictures)
        variance, mean = torch.var_mean(self._latents(flat), 1, correction=0)
        apart = (mean.square() + variance - 1 - (variance + _TINY).log()) / 2
        return self._divergence * apart.view(len(flat), -1).mean(1)

    def _latents(self, flat: Tensor) -> Tensor:
        latents = flat.reshape(-1, self._generator.latent)
        return latents.tanh() if self._squash else latents


_TINY = 1e-10
