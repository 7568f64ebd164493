r"""What an attacker believes of images before it has seen anything: a penalty, one number an image.

All take images (N, C, H, W) of any channel count and return (N,).
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def total_variation(images: Tensor, *, isotropic: bool = False) -> Tensor:
    r"""Mean absolute difference of neighbours.

    Anisotropic (GS): :math:`\text{mean}|x_{i+1,j} - x_{ij}| + \text{mean}|x_{i,j+1} - x_{ij}|`; isotropic: the mean of
    :math:`\sqrt{dx^2 + dy^2}` where both neighbours exist.

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
    """The mean of each image, 0 where there are no neighbours (a height or width of 1)."""
    return values.flatten(1).sum(1) / max(1, values[0].numel())


def squared_norm(images: Tensor) -> Tensor:
    """Mean square of the pixels."""
    return images.square().flatten(1).mean(1)


def group_consistency(images: Tensor) -> Tensor:
    r"""Squared distance of each of several seeds' guesses from their mean (GradInversion, Eq. 11).

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
    r"""Distance of batch statistics, layer by layer.

    .. math:: \sum_l \|\mu_l - \hat\mu_l\|_2 + \|\sigma^2_l - \hat\sigma^2_l\|_2

    Args:
        seen: mean and variance (T, channels) of the guesses by layer.
        wanted: those to match, (T, channels) or (channels,).

    Returns:
        (T,).

    Reference: Yin et al. 2021 (GradInversion), https://arxiv.org/abs/2104.07586, Eq. 10.
    """
    terms = [
        (seen[name][0] - mean).norm(dim=-1) + (seen[name][1] - variance).norm(dim=-1)
        for name, (mean, variance) in wanted.items()
    ]
    return torch.stack(terms).sum(0)
