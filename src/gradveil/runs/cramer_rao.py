"""How well anyone can know an image from noisy numbers that depend on it: the Bayesian Cramér-Rao bound."""

from typing import NamedTuple

import torch
from torch import Tensor


class Leak(NamedTuple):
    """What numbers reveal about an image, to first order.

    Attributes:
        mse: the least mean squared error of any guess.
        seen: number of directions of the image with less than half of the prior variance left.
        bits: information about the image: half the sum of log2(prior variance / variance left).
        fisher_loss: the largest singular value of J / σ: how far the numbers move, in units of their noise, when the
            image moves by one.
    """

    mse: float
    seen: int
    bits: float
    fisher_loss: float


def leak(jacobian: Tensor, noise: Tensor, prior: Tensor, nuisance: Tensor | None = None) -> Leak:
    r"""Return the van Trees bound for numbers y = f(x, u) + noise, linearised; x and u are normal and independent.

    .. math::
        \mathrm{MSE} \ge \frac1D \,\mathrm{tr}\left[\left(J^T \Sigma^{-1} J + \Lambda^{-1}\right)^{-1}\right]_{xx}

    The bound is exact if f is linear and everything is normal. An attacker who knows more about images than the prior
    can do better, and if f is strongly curved, no first-order figure holds. It is computed by orthogonal
    transformations of J itself, because forming :math:`J^T J` would lose half of the digits.

    Args:
        jacobian: (P, D + K), derivatives by the D numbers of the images, then by K unknown numbers u.
        noise: (P,) standard deviation of each number; infinite if the number reveals nothing.
        prior: (D,) prior variance of each of the images' numbers; or (d, d), the covariance of each image's d numbers,
            where D is a multiple of d and the images are independent.
        nuisance: (K,) prior variance of u.

    Reference: Gill and Levit 1995; for gradients https://arxiv.org/abs/2411.03746; the last figure is that of Hannun et
        al. 2021, https://arxiv.org/abs/2102.11673.

    Example:
        >>> round(leak(torch.tensor([[1.0, 0.0]]), torch.tensor([0.1]), torch.tensor([0.01, 0.01])).mse, 6)
        0.0075
    """
    secrets = 0 if nuisance is None else len(nuisance)
    size = jacobian.shape[1] - secrets
    known = condensed(jacobian, noise)
    spread = _square_root(prior.double())
    own = _times(known[:, :size], spread)
    if nuisance is not None:
        own = torch.cat([own, known[:, size:] * nuisance.double().sqrt()], 1)
    one = torch.eye(size + secrets, dtype=own.dtype)
    whole = torch.linalg.qr(torch.cat([own, one]), mode="r").R  # all that is known, in units of the prior
    inverse = torch.linalg.solve_triangular(whole, one, upper=True)
    left = inverse[:size] @ inverse[:size].T  # (D, D) covariance that is left, in units of the prior
    shares = torch.linalg.eigvalsh(left).clamp(torch.finfo(left.dtype).eps, 1.0)
    return Leak(
        mse=float(_times(inverse[:size].T, spread.t()).square().sum()) / size,
        seen=int((shares < 0.5).sum()),
        bits=float(-0.5 * shares.log2().sum()),
        fisher_loss=float(torch.linalg.eigvalsh(known[:, :size].T @ known[:, :size])[-1].clamp(min=0).sqrt()),
    )


def condensed(jacobian: Tensor, noise: Tensor) -> Tensor:
    r"""Return R (at most D, D) with :math:`R^T R = J^T \Sigma^{-1} J`: as much about x as all P numbers together.

    It serves as the Jacobian of numbers with unit noise.
    """
    found = jacobian.new_empty(0, jacobian.shape[1], dtype=torch.float64)
    for rows, stds in zip(torch.split(jacobian, _ROWS), torch.split(noise, _ROWS), strict=True):
        found = torch.linalg.qr(torch.cat([found, (rows / stds[:, None]).double()]), mode="r").R
    return found


_ROWS = 8192
"""Rows of a Jacobian that are condensed at once, to save memory."""


def _square_root(prior: Tensor) -> Tensor:
    """Return standard deviations (D,) for variances, or A (d, d) with A A^T = C for a covariance C."""
    return prior.sqrt() if prior.dim() == 1 else torch.linalg.cholesky(prior)


def _times(rows: Tensor, spread: Tensor) -> Tensor:
    """Multiply rows (N, D) by standard deviations (D,), or each of their images' parts by a matrix (d, d)."""
    if spread.dim() == 1:
        return rows * spread
    return (rows.reshape(-1, len(spread)) @ spread).view_as(rows)
