"""Random directions for probing a decision boundary: from all images, or from a subspace."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SUBSPACES = ("full", "resized", "dct", "pca")


@dataclass(frozen=True)
class Subspace:
    """A linear subspace of images from which random directions are drawn.

    Attributes:
        kind: full (all images), resized (small images, upsampled bilinearly), dct (low frequencies) or pca (principal
            components of given images).
        shape: (C, H, W) of an image.
        reduction: factor by which the sides of a small image, or of the block of low frequencies, are shorter; pca has
            as many components as a small image has pixels.
        components: (dimension, C * H * W), orthonormal; only for pca.
    """

    kind: str
    shape: tuple[int, int, int]
    reduction: int = 1
    components: Tensor | None = None

    @staticmethod
    def of(kind: str, images: Tensor, reduction: int) -> "Subspace":
        """Return the subspace for images (N, C, H, W), whose principal components pca uses."""
        channels, height, width = images.shape[1:]
        space = Subspace(kind, (channels, height, width), reduction)
        if kind != "pca":
            return space
        flat = images.flatten(1)
        _, sizes, components = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
        real = max(1, int((sizes > sizes.amax() * 1e-5).sum()))
        return Subspace(kind, space.shape, reduction, components[: min(real, channels * math.prod(space.small))])

    @property
    def small(self) -> tuple[int, int]:
        """(H, W) of a small image."""
        height, width = (-(-side // self.reduction) for side in self.shape[1:])
        return height, width

    @property
    def dimension(self) -> int:
        """The number of independent directions."""
        if self.components is not None:
            return len(self.components)
        return self.shape[0] * math.prod(self.shape[1:] if self.kind == "full" else self.small)

    def directions(self, count: int, rng: torch.Generator) -> Tensor:
        """Return random images (count, C, H, W) of the subspace, each of length 1; ``rng`` is a CPU generator."""
        channels, height, width = self.shape
        if self.components is not None:
            draws = torch.randn(count, len(self.components), generator=rng)
            images = draws.to(self.components) @ self.components
        elif self.kind == "full":
            images = torch.randn(count, *self.shape, generator=rng)
        else:
            draws = torch.randn(count, channels, *self.small, generator=rng)
            if self.kind == "resized":
                images = F.interpolate(draws, size=(height, width), mode="bilinear", align_corners=False)
            else:
                images = cosines(height)[: self.small[0]].T @ draws @ cosines(width)[: self.small[1]]
        flat = images.reshape(count, -1)
        lengths: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        return (flat / lengths.clamp_min(1e-12)).view(count, *self.shape)


def cosines(size: int) -> Tensor:
    r"""Return the orthonormal DCT-II (size, size), one frequency per row, low ones first.

    .. math:: A_{kn} = \sqrt{\tfrac{2 - [k = 0]}{N}} \cos\frac{\pi k (2n + 1)}{2N}

    Example:
        >>> bool(torch.allclose(cosines(5) @ cosines(5).T, torch.eye(5), atol=1e-6))
        True
    """
    order = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi / (2 * size) * order[:, None] * (2 * order + 1))
    lengths = torch.full((size, 1), math.sqrt(2 / size), dtype=torch.float64)
    lengths[0] = math.sqrt(1 / size)
    return (lengths * waves).float()
