r"""Make estimates of a batch exact, using that ReLU turns neurons off.

The gradient of a Linear layer is :math:`A V` with :math:`[X\ 1] = P V` and errors :math:`A Q`, :math:`Q = P^{-1}`
(`gradveil.attacks.parts.exact_batches`). An estimate of image j tells which neurons are surely off for it, namely those
with the most negative input. Their rows of A are orthogonal to column j of Q, and r + 4 of them determine it exactly.
It is right if it makes about as many neurons zero as are off for the estimate: a direction for two images at once
makes only those zero that are off for both, and noise hides which are zero.

Columns that are known tell something about all other images: their rows of P are orthogonal to these columns. So the
rest is separated again, from fewer mixtures and therefore better, and gives more columns, until all are known.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gradveil.attacks.parts.exact_batches import Factors, ReluLayer, independent
from gradveil.attacks.parts.sparse_columns import inverse_step

_MORE = 4
"""Rows more than unknowns that a column is solved from, at least."""
_SHARE = 32
"""The unknowns are divided by this for the number of such rows in large batches."""
_AGREE = 0.25
"""Share by which the number of neurons that a right column makes zero may differ from that of the estimate."""
_INVERSE = 3
"""Steps of inverse iteration."""
_TOGETHER = 16
"""Columns that are solved at once."""


def completed(
    parts: Factors, layer: ReluLayer, estimate: Tensor, separate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return better rows P (r, r), and which of them belong to known columns of Q; if all do, they are exact.

    Args:
        parts: the layer's gradient.
        layer: the layer, followed by a ReLU.
        estimate: (r, r), a row per image, of which ``estimate @ parts.basis`` is [x, 1] up to a factor.
        separate: returns such rows (k, k) for k mixtures (k, D + 1).
    """
    columns, known = torch.zeros_like(estimate), torch.full((len(estimate),), parts.rank == 1)
    while not bool(known.all()):
        estimate = estimate / _safe(estimate @ parts.basis[:, -1:])
        found, right = _columns(parts, layer, estimate, known)
        gained = _new(found, right, columns, known, parts)
        if not bool(gained.any()):
            break
        columns, known = torch.where(gained, found, columns), known | gained
        estimate = _corrected(estimate, columns, known)
        rest = torch.linalg.qr(columns[:, known], mode="complete").Q[:, int(known.sum()) :]  # (r, k)
        if rest.shape[1]:
            estimate[~known] = separate(rest.T @ parts.basis) @ rest.T
    return estimate, known


def _safe(values: Tensor) -> Tensor:
    """Return the values with a small number in place of zeros."""
    return torch.where(values.abs() < 1e-300, 1e-300, values)


def _columns(parts: Factors, layer: ReluLayer, estimate: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return a column (r, r) per image that is not known, and which of them are right."""
    rank = parts.rank
    live = torch.linalg.vector_norm(parts.rows, dim=1) > 2 * parts.tolerance
    rows, lengths = parts.rows[live], torch.linalg.vector_norm(parts.rows, dim=0)
    points = normalize(rows / lengths, dim=1)
    inputs = layer.weight[live] @ (estimate @ parts.basis[:, :-1]).T + layer.bias[live][:, None]  # (m, r)
    least = rank + max(_MORE, rank // _SHARE)
    off = (inputs < 0).sum(0)
    found, right = torch.zeros_like(estimate), torch.zeros_like(known)
    for some in torch.split(torch.nonzero(~known & (off >= least)).flatten(), _TOGETHER):
        wanted = torch.maximum(off[some] // 2, torch.tensor(least))  # rows from which each is solved
        used = (inputs[:, some].argsort(0).argsort(0) < wanted).to(points)  # (m, K)
        square = (points.T * used.T[:, None, :]) @ points  # (K, r, r)
        vectors = normalize(torch.ones(len(some), rank, dtype=points.dtype), dim=1)
        for _ in range(_INVERSE):
            vectors = inverse_step(square, vectors)
        vectors = normalize(vectors / lengths, dim=1)
        zeros = ((rows @ vectors.T).abs() < parts.tolerance).sum(0)
        found[:, some] = vectors.T
        right[some] = (zeros >= rank + _MORE // 2) & ((zeros - off[some]).abs() <= _AGREE * off[some])
    return found, right


def _new(found: Tensor, right: Tensor, columns: Tensor, known: Tensor, parts: Factors) -> Tensor:
    """Return which right columns are not in the span of others: an image found twice counts once."""
    lengths = torch.linalg.vector_norm(parts.rows, dim=0)[:, None]
    order = torch.cat([torch.nonzero(known).flatten(), torch.nonzero(right).flatten()])
    both = torch.cat([columns[:, known], found[:, right]], 1)
    gained = torch.zeros_like(known)
    gained[order[independent((both * lengths).T)]] = True
    return gained & ~known


def _corrected(estimate: Tensor, columns: Tensor, known: Tensor) -> Tensor:
    """Return the rows nearest to the estimate with products 1 or 0 with all known columns."""
    some = columns[:, known]
    some = some / _safe((estimate[known] * some.T).sum(1))
    frame = torch.linalg.qr(some).Q
    result: Tensor = estimate - estimate @ frame @ frame.T
    result[known] += torch.linalg.pinv(some)
    return result
