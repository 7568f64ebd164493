"""What is searched in place of pixels: the numbers that a generator makes images from."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradveil.generators import Latent


class Maker(ABC):
    """Turns rows of numbers (rows, size) into images; rows never mix.

    Attributes:
        size: numbers a row.
        label_rate: factor on an optimiser's rate for the logits of searched labels.
        knows_images: whether it makes likely images only, so that under noise nothing else need be believed of them.
    """

    size: int
    label_rate: float = 1.0
    knows_images: bool = False

    @abstractmethod
    def begin(self, rows: int, rng: torch.Generator) -> Tensor:
        """First numbers (rows, size), on the CPU."""

    @abstractmethod
    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """Images (rows * B, C, H, W) in [0, 1]; ``labels`` are (rows, B), or soft ones (rows, B, classes)."""

    def penalty(self, flat: Tensor, pictures: Tensor) -> Tensor:
        """(rows,) what is added to the loss."""
        return flat.new_zeros(len(flat))

    def rates(self) -> Tensor:
        """(size,) factors on an optimiser's rate."""
        return torch.ones(self.size)


class Latents(Maker):
    r"""The latents of a trained generator, B of them a row.

    The penalty is the divergence of a normal distribution with the mean m and the variance v of an image's latents from
    N(0, 1), as in the code of GGL: :math:`\frac{1}{2} (m^2 + v - 1 - \log v)`.

    Args:
        generator: frozen, in evaluation mode.
        batch_size: B.
        squash: whether latents pass tanh first, which keeps them inside (-1, 1).
        divergence: weight of the penalty, of which the mean over a row's images counts.
    """

    knows_images = True

    def __init__(self, generator: Latent, batch_size: int, *, squash: bool, divergence: float) -> None:
        self._generator, self._squash, self._divergence = generator, squash, divergence
        self.size = batch_size * generator.latent

    def begin(self, rows: int, rng: torch.Generator) -> Tensor:
        """From N(0, 1)."""
        return torch.randn(rows, self.size, generator=rng)

    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """What the generator makes of them, and of the labels where it asks for any."""
        images: Tensor = self._generator(self._latents(flat), None if labels is None else labels.flatten(0, 1))
        return images

    def penalty(self, flat: Tensor, pictures: Tensor) -> Tensor:
        """How unlikely the latents are."""
        if not self._divergence or self._squash:
            return super().penalty(flat, pictures)
        variance, mean = torch.var_mean(self._latents(flat), 1, correction=0)
        apart = (mean.square() + variance - 1 - (variance + _TINY).log()) / 2
        return self._divergence * apart.view(len(flat), -1).mean(1)

    def _latents(self, flat: Tensor) -> Tensor:
        latents = flat.reshape(-1, self._generator.latent)
        return latents.tanh() if self._squash else latents


_TINY = 1e-10
