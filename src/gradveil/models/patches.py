"""Patches: frozen features from patches of public pictures, and a linear head."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.data.pixels import to_bytes, to_unit
from gradveil.errors import ConfigError
from gradveil.models.base import Model
from gradveil.models.photographs import photographs
from gradveil.models.public_scaling import PublicScaling, some_of
from gradveil.models.trunk import CHUNK, FeatureNetwork, Trunk, fingerprint_of, require_fingerprint
from gradveil.randomness import stream
from gradveil.validate import in_range

SAMPLED = 100_000
"""Patches from which the whitening is estimated."""
CONTRAST, REGULAR = 0.01, 0.1
"""Added to the variance of a patch before dividing by it, and to the eigenvalues of the covariance of patches."""
FLOOR = 1e-3
"""Added to a pooled response before its square root, so that the slope of the root is bounded."""
COLOUR_FILTERS, GREY_FILTERS = 400, 150
COLOUR_GRID, GREY_GRID = 2, 3


@dataclass(frozen=True)
class Patches(Model):
    r"""Compare each patch of an image with patches of public pictures, pool, and train a linear head on the result.

    A patch p of ``size`` x ``size`` pixels loses its mean, is divided by its contrast, and is whitened by the
    covariance of public patches (W, mean m). It meets K filters, which are whitened public patches themselves:

    .. math:: r_k = d_k^T W \Big(\frac{p - \bar p}{\sqrt{\text{var}(p) + 0.01}} - m\Big), \qquad
        (\max(0, r_k - \tau), \max(0, -r_k - \tau))

    Square roots of the means over the cells of a ``grid`` x ``grid`` are centred, scaled and whitened by their
    statistics on public pictures; then each image's features are scaled to norm 1. Whitening makes a head learn in
    few steps, and few steps are what a privacy budget pays for. Only the head is trained and sent; all else is frozen.
    Public pictures are those of ``--aux``, or two photographs that come with scikit-learn. ``activation`` changes
    nothing.

    Reference: Coates and Ng 2012, https://doi.org/10.1007/978-3-642-35289-8_30, Sections 2 to 4 (patches, whitening,
        two-sided threshold); Tramer and Boneh 2021, https://arxiv.org/abs/2011.11660 (private heads on fixed features).
    Differs from the paper: filters are random patches, not k-means; pooled responses are rooted and whitened, chosen
        on SVHN and PneumoniaMNIST; all statistics are of public pictures, not of the private images, whose statistics
        would cost privacy.

    Attributes:
        filters: K; 0 is 150 for grey images and 400 for colours.
        size: height and width of a patch.
        grid: cells of the pooling along each axis; 0 is 3 for grey images and 2 for colours.
        threshold: :math:`\tau`.
        whiten: variance that whitening adds to each direction of the features, in units of their mean variance; large
            values leave them as they are.
        sha256: fingerprint that the frozen part must have, or its beginning; empty takes any.
    """

    filters: int = 0
    size: int = 6
    grid: int = 0
    threshold: float = 0.25
    whiten: float = 0.01
    sha256: str = ""

    smallest: ClassVar[int] = 8
    uses_aux: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("filters", self.filters, 0, 10_000)
        in_range("size", self.size, 2, self.smallest)
        in_range("grid", self.grid, 0)
        in_range("threshold", self.threshold, 0)
        in_range("whiten", self.whiten, 0, open_low=True)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build the frozen features from the photographs, and a head of zeros."""
        return self.build_from(shape, num_classes, None)

    def build_from(self, shape: tuple[int, int, int], num_classes: int, public: Tensor | None) -> nn.Module:
        """Build the frozen features from public pictures, or from the photographs, and a head of zeros."""
        count, grid = self._size_for(shape)
        if min(shape[1:]) - self.size + 1 < grid:
            raise ConfigError(f"grid must be at most {min(shape[1:]) - self.size + 1} for such images, got {grid}.")
        facts = (count, self.size, grid, self.threshold, self.whiten)
        if public is not None and len(public):
            trunk = PatchTrunk(to_unit(public), *facts)
        else:
            trunk = _usual_trunk(shape, *facts)
        require_fingerprint(trunk, self.sha256)
        return FeatureNetwork(copy.deepcopy(trunk), 2 * count * grid**2, num_classes, takes_pixels=True)

    def num_numbers(self, shape: tuple[int, int, int], num_classes: int) -> int:
        """Return the number of entries of filters and head."""
        count, grid = self._size_for(shape)
        return count * shape[0] * self.size**2 + (2 * count * grid**2 + 1) * num_classes

    def _size_for(self, shape: tuple[int, int, int]) -> tuple[int, int]:
        """Return the number of filters and the cells along each axis for images of this shape."""
        grey = shape[0] == 1
        return self.filters or (GREY_FILTERS if grey else COLOUR_FILTERS), self.grid or (
            GREY_GRID if grey else COLOUR_GRID
        )


class PatchTrunk(Trunk):
    """The frozen features of `Patches`."""

    kernels: Tensor
    offsets: Tensor

    def __init__(self, pictures: Tensor, count: int, size: int, grid: int, threshold: float, whiten: float) -> None:
        super().__init__(fingerprint_of("patches 2", count, size, grid, threshold, whiten, to_bytes(pictures)))
        self._size, self._grid, self._threshold = size, grid, threshold
        kernels, offsets = whitened_filters(pictures, count, size)
        self.register_buffer("kernels", kernels)
        self.register_buffer("offsets", offsets)
        seen = torch.cat([self._rooted(chunk) for chunk in torch.split(some_of(pictures), CHUNK)])
        self.scaling = PublicScaling(seen, whiten)

    def features(self, images: Tensor) -> Tensor:
        """Return the rooted responses, centred, scaled and whitened by those of public pictures."""
        found: Tensor = self.scaling(self._rooted(images))
        return found

    def _rooted(self, images: Tensor) -> Tensor:
        return (self._pooled(images) + FLOOR).sqrt()

    def _pooled(self, images: Tensor) -> Tensor:
        grey = images.mean(1, keepdim=True)  # a patch's mean and variance are over all its channels
        mean = F.avg_pool2d(grey, self._size, stride=1)
        square = F.avg_pool2d(images.square().mean(1, keepdim=True), self._size, stride=1)
        contrast = ((square - mean.square()).clamp_min(0) + CONTRAST).sqrt()
        sums = self.kernels.sum((1, 2, 3))[:, None, None]
        response = (F.conv2d(images, self.kernels) - mean * sums) / contrast - self.offsets[:, None, None]
        sides = [(response - self._threshold).relu(), (-response - self._threshold).relu()]
        return F.adaptive_avg_pool2d(torch.cat(sides, 1), self._grid).flatten(1)


@cache
def _usual_trunk(
    shape: tuple[int, int, int], count: int, size: int, grid: int, threshold: float, whiten: float
) -> PatchTrunk:
    """Return the trunk of the photographs; cached, since a run builds its network several times."""
    return PatchTrunk(photographs(shape), count, size, grid, threshold, whiten)


def whitened_filters(pictures: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Return kernels (count, C, size, size) and offsets (count,) with which contrast-normalised patches are compared.

    The response of a patch p is the sum of kernel * p minus the offset. Everything is drawn from a fixed seed.
    """
    rng = stream(0, "patches")
    patches = _sampled_patches(pictures, size, rng).double()
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches / (patches.var(1, keepdim=True, unbiased=False) + CONTRAST).sqrt()
    mean = patches.mean(0)
    centred = patches - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    whiten = vectors @ torch.diag((values.clamp_min(0) + REGULAR).rsqrt()) @ vectors.T
    chosen = centred[torch.randperm(len(centred), generator=rng)[:count]] @ whiten  # (K, C * size * size)
    if len(chosen) < count:
        raise ConfigError(f"filters must be at most the {len(chosen)} patches of the public pictures, got {count}.")
    kernels = F.normalize(chosen) @ whiten
    channels = pictures.shape[1]
    return kernels.float().view(count, channels, size, size), (kernels @ mean).float()


def _sampled_patches(pictures: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Return random patches (at most `SAMPLED`, C * size * size) of pictures."""
    count, channels, height, width = pictures.shape
    rows, columns = height - size + 1, width - size + 1
    chosen = torch.randperm(count * rows * columns, generator=rng)[:SAMPLED]
    windows = pictures.unfold(2, size, 1).unfold(3, size, 1)  # (N, C, rows, columns, size, size)
    picture, place = chosen // (rows * columns), chosen % (rows * columns)
    return windows[picture, :, place // columns, place % columns].reshape(len(chosen), channels * size * size)
