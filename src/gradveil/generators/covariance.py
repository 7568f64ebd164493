"""The mean and the covariance of public images, shrunk so that it can be inverted: a normal prior."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalImages:
    r"""Images that are distributed normally, :math:`N(\mu, V^T \mathrm{diag}(\lambda) V + \epsilon I)`.

    Attributes:
        mean: (D,).
        directions: (K, D), orthonormal.
        variances: (K,) variance along each direction, without ``floor``.
        floor: the variance that every direction has in addition; positive.
    """

    mean: Tensor
    directions: Tensor
    variances: Tensor
    floor: float

    def penalty(self, images: Tensor) -> Tensor:
        """Return half the squared Mahalanobis distance (N,) of images (N, C, H, W) from the mean, per pixel."""
        apart = images.flatten(1) - self.mean.to(images)
        along = apart @ self.directions.to(images).T  # (N, K)
        less = self.variances / (self.variances + self.floor)  # of what the floor alone would charge
        squares = apart.square().sum(1) - (less.to(images) * along.square()).sum(1)
        return squares / (2 * self.floor * apart.shape[1])

    def covariance(self) -> Tensor:
        """Return the covariance (D, D)."""
        spread = (self.directions.T * self.variances) @ self.directions
        return spread + self.floor * torch.eye(len(spread)).to(spread)


def normal_images(images: Tensor) -> NormalImages:
    r"""Return the normal distribution with the mean and the shrunk covariance of images (N, C, H, W).

    .. math:: P = (1 - \delta) S + \delta \bar\lambda I

    with the sample covariance S, its mean eigenvalue :math:`\bar\lambda`, and the share :math:`\delta` of Ledoit and
    Wolf, which has the least expected squared error as far as the sample tells.

    Reference: Ledoit and Wolf 2004, https://doi.org/10.1016/S0047-259X(03)00096-4, Section 3.
    """
    flat = images.flatten(1).double()
    count, size = flat.shape
    mean = flat.mean(0)
    centred = flat - mean
    _, scales, directions = torch.linalg.svd(centred / count**0.5, full_matrices=False)
    variances = scales.square()
    level, squares = variances.sum() / size, variances.square().sum()
    spread = squares - size * level.square()  # squared distance of S from a multiple of the identity
    doubt = centred.square().sum(1).square().sum() / count**2 - squares / count  # squared error of S, estimated
    share = float((doubt / spread).clamp(0, 1)) if spread > 0 else 1.0
    floor = max(share * float(level), _LEAST)
    return NormalImages(mean, directions, (1 - share) * variances, floor)


_LEAST = 1e-8
"""Smallest variance of a direction, in squared pixels of [0, 1]; rounding to bytes alone gives 1.3e-6."""
