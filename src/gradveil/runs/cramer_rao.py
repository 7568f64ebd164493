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

    The bound is exact if f is linear and everything is normal. An attacker who knows more about images than their
    variance can do better, and if f is strongly curved, no first-order figure holds. It is computed by orthogonal
    transformations of J itself, because forming :math:`J^T J` would lose half of the digits.

    Args:
        jacobian: (P, D + K), derivatives by the D numbers of the image, then by K unknown numbers u.
        noise: (P,) standard deviation of each number; infinite if the number reveals nothing.
        prior: (D,) prior variance of each of the image's numbers.
        nuisance: (K,) prior variance of u.

    Reference: Gill and Levit 1995; for gradients https://arxiv.org/abs/2411.03746; the last figure is that of Hannun et
        al. 2021, https://arxiv.org/abs/2102.11673.

    Example:
        >>> round(leak(torch.tensor([[1.0, 0.0]]), torch.tensor([0.1]), torch.tensor([0.01, 0.01])).mse, 6)
        0.0075
    """
    size = len(prior)
    variances = prior if nuisance is None else torch.cat([prior, nuisance])
    scaled = (jacobian / noise[:, None]).double()
    spread = variances.double().sqrt()
    root = torch.linalg.qr(scaled * spread, mode="r").R  # what is known about x and u, in units of the prior
    whole = torch.linalg.qr(torch.cat([root, torch.eye(len(variances), dtype=root.dtype)]), mode="r").R
    inverse = torch.linalg.solve_triangular(whole, torch.eye(len(whole), dtype=whole.dtype), upper=True)
    left = inverse[:size] @ inverse[:size].T  # (D, D) covariance that is left, in units of the prior
    shares = torch.linalg.eigvalsh(left).clamp(torch.finfo(left.dtype).eps, 1.0)
    return Leak(
        mse=float((left.diagonal() * prior.double()).mean()),
        seen=int((shares < 0.5).sum()),
        bits=float(-0.5 * shares.log2().sum()),
        fisher_loss=float(torch.linalg.matrix_norm(root[:, :size] / spread[:size], 2)),
    )
