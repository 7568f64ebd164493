"""Centre, scale and whiten features by their statistics on public pictures, so that a head learns in few steps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.randomness import stream

SEEN = 2_000
"""Public pictures whose features are looked at, at most."""
LEAST = 0.01
"""Smallest deviation by which a feature is divided, in units of the mean one: some never change on public pictures."""
LARGEST, FEATURE_STEP, DIRECTION_STEP = 64.0, 2.0**-12, 2.0**-20
"""Bound on a scaled feature, and steps to which features and directions are rounded: sums of products are then exact in
float64, so that the features of an image never depend on the images beside it."""


class PublicScaling(nn.Module):
    """A fixed map of features (N, D), learned from the features of public pictures; no private image has a part in it.

    Args:
        seen: features of public pictures.
        whiten: variance that is added to each direction, in units of the mean variance; large values do not whiten.
    """

    mean: Tensor
    std: Tensor
    directions: Tensor
    shrinkage: Tensor

    def __init__(self, seen: Tensor, whiten: float) -> None:
        super().__init__()
        self.register_buffer("mean", seen.mean(0))
        std = seen.std(0)
        self.register_buffer("std", std.clamp_min(max(1e-6, LEAST * float(std.mean()))))
        directions, shrinkage = whitening((seen - self.mean) / self.std, whiten)
        self.register_buffer("directions", directions)
        self.register_buffer("shrinkage", shrinkage)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features scaled and whitened, each image's by themselves."""
        scaled = ((features - self.mean) / self.std).clamp(-LARGEST, LARGEST).double()
        scaled, directions = _in_steps(scaled, FEATURE_STEP), self.directions.double()
        common = _in_steps(scaled @ directions.T * self.shrinkage, FEATURE_STEP)
        return (scaled - common @ directions).to(features.dtype)


def some_of(pictures: Tensor) -> Tensor:
    """Return at most `SEEN` pictures, drawn from a fixed seed."""
    return pictures[torch.randperm(len(pictures), generator=stream(0, "patches", "seen"))[:SEEN]]


def whitening(features: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    r"""Return directions V (r, D) and shrinkage c (r,) that whiten features (N, D), each scaled to norm 1.

    A vector z becomes :math:`z - V^T \text{diag}(c) V z`. In the direction of an eigenvector of the covariance, with
    the eigenvalue :math:`\lambda`, that is a factor :math:`(1 + \lambda / \rho)^{-1/2}`, and 1 in all directions that
    the features do not reach; :math:`\rho` is ``ridge`` times the mean eigenvalue.
    """
    unit = F.normalize(features.double())
    centred = unit - unit.mean(0)
    values, vectors = torch.linalg.eigh(centred @ centred.T / len(centred))  # N x N: N is smaller than D as a rule
    kept = values > 1e-9 * values.max()
    values, vectors = values[kept], vectors[:, kept]
    directions = (centred.T @ vectors / (values * len(centred)).sqrt()).T
    shrinkage = 1 - (1 + values / (ridge * values.sum() / features.shape[1])).rsqrt()
    return _in_steps(directions, DIRECTION_STEP).float(), shrinkage.float()


def _in_steps(values: Tensor, step: float) -> Tensor:
    """Return the nearest multiples of a step, with the slope of the values themselves."""
    return values + ((values / step).round() * step - values).detach()
