"""A generator that needs no training: the principal components of public images."""

import torch
from torch import Tensor

from gradveil.generators.base import Latent


class _Principal(Latent):
    def __init__(self, mean: Tensor, directions: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(len(directions))
        self.mean, self.directions, self.shape = mean, directions, shape

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        images = self.mean + latents @ self.directions  # (N, pixels)
        return images.clamp(0, 1).view(-1, *self.shape)


def principal_components(images: Tensor, latent: int) -> Latent:
    r"""Return the linear generator whose images have the mean and approximately the covariance of the given ones.

    .. math:: G(z) = \mu + \sum_k z_k \sigma_k v_k, \quad z \sim N(0, 1)

    with the directions :math:`v_k` of greatest variance :math:`\sigma_k^2`, clamped to [0, 1].

    Args:
        images: (N, C, H, W) in [0, 1].
        latent: number of directions kept; limited by the number of images and of pixels.
    """
    flat = images.flatten(1).double()
    mean = flat.mean(0)
    _, scales, directions = torch.linalg.svd((flat - mean) / max(len(flat) - 1, 1) ** 0.5, full_matrices=False)
    kept = (scales[:latent, None] * directions[:latent]).to(images)
    return _Principal(mean.to(images), kept, tuple(images.shape[1:])).eval()
