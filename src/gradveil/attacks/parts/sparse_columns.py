r"""Sparse vectors in a subspace: directions q for which most entries of :math:`A q` are zero.

They are found by minimising a smooth count of the entries that are not zero, from many random starts at once:

.. math:: \min_{|q| = 1} \sum_i \log\cosh \frac{a_i^T q}{\epsilon |a_i|}, \qquad \epsilon \to 0

In each step log cosh is replaced by the parabola that touches it from above at the current q. The weighted sum S of
:math:`a_i a_i^T` is then to be made small, and one step of inverse iteration, :math:`q \leftarrow S^{-1} q`, does it
without leaving the neighbourhood of the start. (The smallest eigenvector of S would be the same for most starts.)
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

_STEPS = 40
"""Steps of one start; the width of log cosh falls by a constant factor from step to step."""
_WIDEST, _NARROWEST = 0.1, 1e-5
"""The width of log cosh in the first step and in the last, for rows of length 1."""
_POLISH = 4
"""Times that a direction is solved anew from the rows that it makes zero."""
_ROOM = 20_000_000
"""Numbers in the largest tensor of a search, which decides how many starts run side by side."""
_SAME = 0.9999
"""Directions with a larger cosine are the same one."""
_TINY = 1e-13
"""Share of the mean eigenvalue that is added to a matrix before it is inverted."""


class Directions(NamedTuple):
    """K directions, the sparsest first.

    Attributes:
        vectors: (K, b) of length 1.
        zeros: (K,) number of rows of A that each makes zero.
    """

    vectors: Tensor
    zeros: Tensor


def sparse_directions(rows: Tensor, starts: Tensor, tolerance: float) -> Directions:
    """Return different directions that make more rows zero than any direction can, each found from some start.

    There is a direction for any b - 1 rows, so at least b + 1 of them must be zero.

    Args:
        rows: (m, b), A, whose columns are orthogonal; an error of equal size in every entry is assumed.
        starts: (K, b) random directions, in coordinates in which all columns of A have length 1.
        tolerance: entries of A q below it count as zero, for q of length 1.
    """
    lengths = torch.linalg.vector_norm(rows, dim=0)  # (b,)
    live = rows[torch.linalg.vector_norm(rows, dim=1) > 2 * tolerance]
    points = normalize(live / lengths, dim=1)
    count = max(1, _ROOM // max(1, points.numel()))
    found = torch.cat([_descend(points, part) for part in torch.split(starts, count)])
    vectors = _polished(live, normalize(found / lengths, dim=1), tolerance)
    return different(vectors, live, tolerance)


def _descend(points: Tensor, directions: Tensor) -> Tensor:
    """Return the directions (K, b) after all steps, for points (m, b) of length 1."""
    shrink = (_NARROWEST / _WIDEST) ** (1 / (_STEPS - 1))
    for step in range(_STEPS):
        scaled = (directions @ points.T).abs() / (_WIDEST * shrink**step)  # (K, m)
        weights = scaled.clamp_min(1e-6).tanh() / scaled.clamp_min(1e-6)
        directions = inverse_step((points.T * weights[:, None, :]) @ points, directions)
    return directions


def inverse_step(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return vectors (K, b), each moved to the small eigenvectors of its matrix (K, b, b), with length 1."""
    size = matrices.shape[1]
    matrices = matrices / matrices.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-300).view(-1, 1, 1)
    matrices = matrices + _TINY * torch.eye(size, dtype=matrices.dtype)
    return normalize(torch.linalg.solve(matrices, vectors[..., None])[..., 0], dim=1)


def _polished(rows: Tensor, vectors: Tensor, tolerance: float) -> Tensor:
    """Return each direction solved exactly from the rows that it makes zero, and at least from the b smallest."""
    size = rows.shape[1]
    limit = 10 * tolerance  # a search ends near the zeros, not on them
    for _ in range(_POLISH):
        reached = (vectors @ rows.T).abs()  # (K, m)
        least = reached.kthvalue(min(size, len(rows)), dim=1).values
        near = (reached <= least.clamp_min(limit)[:, None]).to(rows)
        vectors = torch.linalg.eigh((rows.T * near[:, None, :]) @ rows).eigenvectors[..., 0]
        limit = tolerance
    return vectors


def different(vectors: Tensor, rows: Tensor, tolerance: float) -> Directions:
    """Return the different ones among directions with enough zeros, the sparsest first."""
    reached = vectors @ rows.T  # (K, m)
    zeros = (reached.abs() < tolerance).sum(1)
    order = zeros.argsort(descending=True, stable=True)
    order = order[zeros[order] > rows.shape[1]]
    shapes = normalize(reached[order], dim=1)
    first = ~((shapes @ shapes.T).abs() > _SAME).tril(-1).any(1)  # no earlier direction is the same
    return Directions(vectors[order][first], zeros[order][first])
