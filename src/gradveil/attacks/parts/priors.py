r"""Penalties on implausible images: one number per image.

All take images (N, C, H, W) of any channel count and return (N,).
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def total_variation(images: Tensor, *, isotropic: bool = False) -> Tensor:
    r"""Return the mean absolute difference of neighbouring pixels.

    Anisotropic (GS): :math:`\text{mean}|x_{i+1,j} - x_{ij}| + \text{mean}|x_{i,j+1} - x_{ij}|`; isotropic: the mean of
    :math:`\sqrt{dx^2 + dy^2}` over pixels that have both neighbours.

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor([1.])
    """
    down = images[..., 1:, :] - images[..., :-1, :]
    right = images[..., :, 1:] - images[..., :, :-1]
    if isotropic:
        squares = down[..., :, :-1].square() + right[..., :-1, :].square()
        return _mean((squares + 1e-12).sqrt())
    return _mean(down.abs()) + _mean(right.abs())


def _mean(values: Tensor) -> Tensor:
    """Return the mean of each image, or 0 if it has no neighbours (a height or width of 1)."""
    return values.flatten(1).sum(1) / max(1, values[0].numel())


def squared_norm(images: Tensor) -> Tensor:
    """Return the mean square of the pixels."""
    return images.square().flatten(1).mean(1)


def group_consistency(images: Tensor) -> Tensor:
    r"""Return the squared distance of each seed's guess from the mean of all seeds (GradInversion, Eq. 11).

    Args:
        images: (seeds, N, C, H, W).

    Returns:
        (seeds, N).

    Differs from the paper: the mean is taken pixel by pixel; the paper registers the images first (RANSAC flow).
    """
    mean = images.mean(0, keepdim=True).detach()
    return (images - mean).square().flatten(2).mean(2)


def batch_norm_distance(
    seen: Mapping[str, tuple[Tensor, Tensor]], wanted: Mapping[str, tuple[Tensor, Tensor]]
) -> Tensor:
    r"""Return the distance between batch statistics, summed over layers.

    .. math:: \sum_l \|\mu_l - \hat\mu_l\|_2 + \|\sigma^2_l - \hat\sigma^2_l\|_2

    Args:
        seen: mean and variance (T, channels) of the guesses by layer.
        wanted: the statistics to match, (T, channels) or (channels,).

    Returns:
        (T,).

    Reference: Yin et al. 2021 (GradInversion), https://arxiv.org/abs/2104.07586, Eq. 10.
    """
    terms = [
        (seen[name][0] - mean).norm(dim=-1) + (seen[name][1] - variance).norm(dim=-1)
        for name, (mean, variance) in wanted.items()
    ]
    return torch.stack(terms).sum(0)
