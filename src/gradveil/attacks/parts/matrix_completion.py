r"""Complete a matrix of known rank of which only some entries are known, such as a pruned gradient of a Linear layer.

A gradient :math:`\sum_j \delta_j h_j^T` of r images has rank r, so that few entries determine all others. With
:math:`G = U V`, alternating least squares solves for the rows of U, given V, and for the columns of V, given U:

.. math:: \min_{U, V} \sum_{(i, j)\ \text{known}} (G_{ij} - u_i^T v_j)^2

A row or column with fewer than r known entries is not determined and left out. Pruning keeps the largest entries, which
stand in the rows of the classes with the largest errors: these rows and most columns are determined.

Reference: Jain et al. 2013, https://arxiv.org/abs/1212.0467, on alternating minimisation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 200
"""Rounds of alternating least squares at most; a few are enough if each column has one more known entry than needed."""
EXACT = 1e-7
"""Relative misfit of known entries at which it stops, the precision of float32."""
DAMPING = 1e-12


class Completed(NamedTuple):
    """The part of a matrix that its known entries determine.

    Attributes:
        rows: (R,) numbers of the rows.
        columns: (C,) numbers of the columns.
        values: (R, C), all entries there.
        misfit: norm of the misfit of known entries, as a share of their norm.
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    misfit: float


def completed(matrix: Tensor, known: Tensor, rank: int = 2) -> Completed | None:
    """Return the completed part of a matrix (n, m), or None if its known entries (a mask) determine no such part.

    Example:
        >>> whole = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 5.0, 7.0])).double()
        >>> known = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1]]) > 0
        >>> completed(whole * known, known, rank=1).values.round().tolist()
        [[2.0, 5.0, 7.0], [4.0, 10.0, 14.0], [6.0, 15.0, 21.0]]
    """
    rows, columns = _determined(known, rank)
    if len(rows) <= rank or len(columns) <= rank:
        return None
    mask = known[rows][:, columns].to(matrix)
    values = matrix[rows][:, columns] * mask
    right = torch.linalg.svd(values, full_matrices=False).Vh[:rank]  # (rank, C)
    size = values.norm()
    for _ in range(STEPS):
        left = _solved(right, values, mask)  # (R, rank)
        right = _solved(left.T, values.T, mask.T).T
        right = torch.linalg.qr(right.T).Q.T  # keeps both factors of one scale
        left = _solved(right, values, mask)
        misfit = float(((left @ right - values) * mask).norm() / size)
        if misfit < EXACT:
            break
    return Completed(rows, columns, left @ right, misfit)


def _determined(known: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows and columns that have ``rank`` known entries or more among each other; rows need one more."""
    rows, columns = known.any(1), known.any(0)
    while True:
        there = known & rows[:, None] & columns
        next_rows, next_columns = there.sum(1) > rank, there.sum(0) >= rank
        if torch.equal(next_rows, rows) and torch.equal(next_columns, columns):
            return rows.nonzero()[:, 0], columns.nonzero()[:, 0]
        rows, columns = rows & next_rows, columns & next_columns


def _solved(basis: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return for each row of ``values`` (n, m) its coordinates (n, rank) in a basis (rank, m), by its known entries."""
    square = torch.einsum("nm,am,bm->nab", mask, basis, basis)
    square = square + DAMPING * square.diagonal(dim1=1, dim2=2).amax() * torch.eye(len(basis)).to(basis)
    found: Tensor = torch.linalg.solve(square, (values * mask) @ basis.T)
    return found
