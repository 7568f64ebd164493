r"""Recover the batch behind the gradients of a Linear layer with ReLU, and measure how well it explains them.

The gradient of weight and bias is one matrix of rank b, :math:`G = \Delta\,[X^T\ 1] = A V`, with a row per neuron and a
column of :math:`\Delta` per image. Neuron i is off for image j, and :math:`\Delta_{ij} = 0`, wherever
:math:`W_i x_j + \beta_i \le 0`. There are two ways to find the images:

- `by_zeros` looks for directions q with many zeros in :math:`A q`. They are the columns of :math:`Q` in
  :math:`\Delta = A Q`, and :math:`[X^T\ 1] = Q^{-1} V`. All b must be found.
- `by_span` uses the gradient of the next Linear layer, whose rows span the hidden representations of all images. It
  looks for combinations p of the rows of V whose image :math:`x` has :math:`\mathrm{relu}(W x + \beta)` in this span.
  Each image is found by itself, however many neurons are on.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gradveil.attacks.parts.sparse_columns import Directions, different, inverse_step, sparse_directions
from gradveil.progress import tell

_ABOVE = 1.5
"""A singular value must exceed the largest one of the noise by this factor to be that of an image."""
_SIGMAS = 6.0
"""Standard deviations of the noise below which an entry counts as zero."""
_DEPENDENT = 1e-3
"""A direction whose part outside the span of others is shorter than this adds nothing."""
_SAME = 0.9999
"""Combinations with a larger cosine are of the same image."""
_STEPS, _COOLING = 50, 0.7
"""Steps of a search in the span, and the factor by which the softness of ReLU falls in each."""
_SURE = 1e-3
"""Share of a hidden representation outside the span up to which an image counts as found."""
_TURN = 128
"""Starts between two looks at whether everything is found."""


class ReluLayer(NamedTuple):
    """A Linear layer: weight (m, D) and bias (m,), in double precision."""

    weight: Tensor
    bias: Tensor

    def active(self, inputs: Tensor) -> Tensor:
        """Return whether ReLU passes each neuron, (m, b), for inputs (b, D)."""
        return self.weight @ inputs.T + self.bias[:, None] > 0


class Factors(NamedTuple):
    """The part of a gradient that stands out from noise: ``rows @ basis``.

    Attributes:
        rows: (m, r), orthogonal columns, the strongest first.
        basis: (r, D + 1), orthonormal rows.
        noise: standard deviation of an entry of the rest.
    """

    rows: Tensor
    basis: Tensor
    noise: float

    @property
    def rank(self) -> int:
        """Number of images that stand out."""
        return len(self.basis)

    @property
    def tolerance(self) -> float:
        """Size below which an entry of ``rows`` times a direction is zero."""
        largest = float(self.rows.abs().max()) if self.rows.numel() else 0.0
        return max(_SIGMAS * self.noise, 1e-12 * largest)


def factors(gradient: Tensor, count: int | None) -> Factors:
    """Return the strongest parts of a gradient (m, D): at most ``count``, or as many as stand out from noise.

    If ``count`` is known, the first singular value after that is the largest of the noise. Otherwise a rank ends where
    the next singular value is smallest beside it.
    """
    left, sizes, basis = torch.linalg.svd(gradient, full_matrices=False)
    if not len(sizes) or not sizes[0] > 0:
        return Factors(left[:, :0], basis[:0], 0.0)
    sizes = sizes.clamp_min(1e-14 * float(sizes[0]))
    if count is None:
        count = int((sizes[1:] / sizes[:-1]).argmin()) + 1 if len(sizes) > 1 else 1
    noise = float(sizes[count]) if count < len(sizes) else float(sizes[-1])
    rank = int((sizes[:count] > _ABOVE * noise).sum())
    height, width = gradient.shape
    return Factors(left[:, :rank] * sizes[:rank], basis[:rank], noise / (math.sqrt(height) + math.sqrt(width)))


def by_span(
    parts: Factors, layer: ReluLayer, hidden: Tensor, restarts: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the inputs (k, D) whose hidden representations are closest to a span, and which of them surely are in it.

    Args:
        parts: the layer's gradient.
        layer: the layer.
        hidden: (h, m) orthonormal rows, the span of all hidden representations.
        restarts: random starts at most; the search stops when as many images as ``parts.rank`` are found.
        rng: source of the starts.
    """
    reach = torch.cat([layer.weight, layer.bias[:, None]], 1) @ parts.basis.T  # (m, r): before ReLU, by combination
    scale = parts.basis[:, -1]  # combinations p are [x, 1] times p @ scale
    best = reach.new_empty(0, parts.rank)
    done = 0
    while done < restarts:
        starts = torch.randn(min(_TURN, restarts - done), parts.rank, generator=rng, dtype=torch.float64)
        done += len(starts)
        best = torch.cat([best, _into_span(reach, hidden, _upright(starts, scale), scale)])
        outside = _outside(best, reach, hidden)
        order = outside.argsort(stable=True)
        best, outside = best[order], outside[order]
        first = ~(best @ best.T > _SAME).tril(-1).any(1)
        best, outside = best[first][: parts.rank], outside[first][: parts.rank]
        tell(done / restarts)
        if len(best) == parts.rank and bool((outside < _SURE).all()):
            break
    mixed = best @ parts.basis
    return mixed[:, :-1] / mixed[:, -1:], outside < _SURE


def _upright(combinations: Tensor, scale: Tensor) -> Tensor:
    """Return combinations of length 1 with the sign for which the last entry of [x, 1] is positive."""
    signs = torch.where(combinations @ scale < 0, -1.0, 1.0)
    return normalize(combinations * signs[:, None], dim=1)


def _into_span(reach: Tensor, hidden: Tensor, combinations: Tensor, scale: Tensor) -> Tensor:
    """Return the combinations (K, r) after all steps; ReLU is a smooth mask that becomes sharp."""
    for step in range(_STEPS):
        before = combinations @ reach.T  # (K, m)
        soft = before.abs().mean(1, keepdim=True) * _COOLING**step
        masked = torch.sigmoid(before / soft)[..., None] * reach  # (K, m, r)
        within = hidden @ masked  # (K, h, r)
        combinations = _upright(inverse_step(masked.mT @ masked - within.mT @ within, combinations), scale)
    return combinations


def _outside(combinations: Tensor, reach: Tensor, hidden: Tensor) -> Tensor:
    """Return the share (K,) of each hidden representation's length that is outside the span."""
    shown = normalize((combinations @ reach.T).relu(), dim=1)
    rest = torch.linalg.vector_norm(shown - (shown @ hidden.T) @ hidden, dim=1)
    return torch.where(shown.any(1), rest, 1.0)


def by_zeros(parts: Factors, layer: ReluLayer, restarts: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (r, D) from the directions with the most zeros, and which agree with ReLU everywhere.

    Half of the starts are orthogonal to the directions that are known. If there are too few directions, any others
    stand in for those that were not found.
    """
    lengths = torch.linalg.vector_norm(parts.rows, dim=0)
    known = Directions(parts.rows.new_empty(0, parts.rank), torch.empty(0, dtype=torch.int64))
    done, chosen = 0, known.vectors
    while done < restarts:
        starts = torch.randn(min(_TURN, restarts - done), parts.rank, generator=rng, dtype=torch.float64)
        if 0 < len(chosen) < parts.rank:
            frame = torch.linalg.qr((chosen * lengths).T).Q
            starts[::2] -= starts[::2] @ frame @ frame.T
        done += len(starts)
        found = sparse_directions(parts.rows, normalize(starts, dim=1), parts.tolerance)
        known = different(torch.cat([known.vectors, found.vectors]), parts.rows, parts.tolerance)
        chosen = known.vectors[independent(known.vectors * lengths)]
        inputs, sure = _from_directions(chosen, lengths, parts, layer)
        tell(done / restarts)
        if len(chosen) == parts.rank and bool(sure.all()):
            break
    return inputs, sure


def independent(vectors: Tensor) -> Tensor:
    """Return the numbers of the first vectors (k, b) that are not in the span of those before them, at most b.

    Example:
        >>> independent(torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
        tensor([0, 2])
    """
    frame, kept = vectors.new_empty(0, vectors.shape[1]), list[int]()
    for number, vector in enumerate(normalize(vectors, dim=1)):
        rest = vector - (vector @ frame.T) @ frame
        if torch.linalg.vector_norm(rest) > _DEPENDENT:
            frame = torch.cat([frame, normalize(rest - (rest @ frame.T) @ frame, dim=0)[None]])
            kept.append(number)
    return torch.tensor(kept, dtype=torch.int64)


def _from_directions(chosen: Tensor, lengths: Tensor, parts: Factors, layer: ReluLayer) -> tuple[Tensor, Tensor]:
    """Return the inputs that belong to directions (k, r), and which of them agree with ReLU everywhere."""
    missing = parts.rank - len(chosen)
    if missing:
        known = torch.linalg.qr((chosen * lengths).T, mode="complete").Q if len(chosen) else torch.eye(parts.rank)
        fill = known.to(lengths).T[len(chosen) :]
        chosen = torch.cat([chosen, fill / lengths])
    mixed = torch.linalg.solve(normalize(chosen, dim=1).T, parts.basis)
    inputs = mixed[:, :-1] / mixed[:, -1:]
    zero = (parts.rows @ normalize(chosen, dim=1).T).abs() < parts.tolerance  # (m, r)
    sure = (zero != layer.active(inputs)).all(0)
    return inputs, sure & (torch.arange(parts.rank) < parts.rank - missing)


def misfit(gradient: Tensor, layer: ReluLayer, inputs: Tensor) -> float:
    """Return the relative distance of a gradient (m, D + 1) from the nearest one that inputs (k, D) can cause.

    A neuron's gradient is a combination of the inputs that turn it on, and zero if none does.
    """
    known = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)  # (k, D + 1)
    frame, mixing = torch.linalg.qr(known.T)  # known.T = frame @ mixing
    seen = gradient @ frame  # (m, k)
    on = layer.active(inputs).to(inputs)  # (m, k)
    masked = mixing * on[:, None, :]  # (m, k, k)
    weights = torch.linalg.lstsq(masked, seen[..., None], driver="gelsd").solution
    left = (seen - (masked @ weights)[..., 0]).square().sum()
    outside = (gradient.square().sum() - seen.square().sum()).clamp_min(0)
    return float(((left + outside) / gradient.square().sum()).sqrt())


def unexplained(gradient: Tensor, layer: ReluLayer | None, inputs: Tensor) -> float:
    """Return the relative distance of a gradient (m, D + 1) from one that inputs (k, D) cause.

    Errors are those that fit best without ReLU, and then zero where ReLU, if a layer is given, turns a neuron off: an
    upper bound of `misfit` that takes no longer than a product for large batches.
    """
    known = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)  # (k, D + 1)
    errors = torch.linalg.lstsq(known.T, gradient.T, driver="gelsd").solution.T  # (m, k)
    if layer is not None:
        errors = errors * layer.active(inputs)
    return float(torch.linalg.norm(gradient - errors @ known) / torch.linalg.norm(gradient))


def spans(hidden: Factors, parts: Factors) -> bool:
    """Return whether the next layer's gradient tells representations apart: of full rank, and not the whole space."""
    return hidden.rank >= parts.rank and 2 * parts.rank <= hidden.basis.shape[1]
