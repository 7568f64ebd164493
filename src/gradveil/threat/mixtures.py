"""The coefficients of mixtures, computed behind the door: from the mixtures and the private images in them."""

import torch
from torch import Tensor

_EXPLAINED = 1e-3
"""Coefficients count as found if the mixtures they give differ by at most this much, in root mean square."""


def mixing_of(encodings: Tensor, images: Tensor) -> Tensor | None:
    r"""Return the share (B, N) of each image (N, C, H, W) in each encoding (B, C, H, W), or None if others are in them.

    Encodings are sums of the images, with pixels scaled to [-1, 1], or such sums with some signs flipped. Shares of
    plain sums are a least-squares problem. The square of a sum does not show its signs and is linear in the products of
    two shares,

    .. math:: e_d^2 = \sum_{ij} m_i m_j x_{id} x_{jd}

    so the shares are the roots of the products with i = j. This takes as many pixels as there are products.

    Example:
        >>> images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        >>> mixing_of(0.25 * images[:1] + 0.75 * images[1:], images).round(decimals=3)
        tensor([[0.2500, 0.7500]])
    """
    wanted, parts = (2 * pixels.detach().cpu().double().flatten(1) - 1 for pixels in (encodings, images))
    shares: Tensor = torch.linalg.lstsq(parts.T, wanted.T).solution.T
    if _misfit(shares @ parts, wanted) <= _EXPLAINED:
        return shares.float().clamp_min(0)
    first, second = torch.triu_indices(len(parts), len(parts))
    if len(first) > parts.shape[1]:
        return None
    products = torch.linalg.lstsq((parts[first] * parts[second]).T, wanted.square().T).solution  # (pairs, B)
    shares = products[first == second].clamp_min(0).sqrt().T
    return shares.float() if _misfit((shares @ parts).abs(), wanted.abs()) <= _EXPLAINED else None


def _misfit(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt())
