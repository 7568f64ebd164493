"""The space in which attacks search images: normalised pixels, as the network's first layer sees them."""

import torch
from torch import Tensor, nn

from gradveil.models.base import Normalisation, normalisation_of


class Space:
    """Conversion between flat normalised guesses (rows, B * C * H * W) and images in [0, 1]."""

    def __init__(self, network: nn.Module, shape: tuple[int, int, int], like: Tensor) -> None:
        normalisation = normalisation_of(network) or Normalisation((0.0,) * shape[0], (1.0,) * shape[0])
        self.shape = shape
        self.size = shape[0] * shape[1] * shape[2]
        self._mean = like.new_tensor(normalisation.mean).view(-1, 1, 1)
        self._std = like.new_tensor(normalisation.std).view(-1, 1, 1)
        corners = (self.from_pixels(torch.full(shape, edge)).flatten() for edge in (0.0, 1.0))
        self._low, self._high = corners

    def to_pixels(self, images: Tensor) -> Tensor:
        """Return images in [0, 1] from normalised ones (..., C, H, W)."""
        return images * self._std + self._mean

    def from_pixels(self, images: Tensor) -> Tensor:
        """Return normalised images from images in [0, 1], the inverse of `to_pixels`."""
        return (images.to(self._mean) - self._mean) / self._std

    def box(self, flat: Tensor) -> Tensor:
        """Clamp flat normalised images to the range that pixels in [0, 1] have."""
        return flat.view(-1, self.size).clamp(self._low, self._high).view_as(flat)
