r"""Separate mixtures of images: the components whose details are as sparse and as independent as possible.

Mixtures are :math:`M = C X` with unknown C. Details of images (second differences of neighbouring pixels) are zero
almost everywhere and large at edges, details of mixtures are not. The unmixing matrix W is the maximum-likelihood one
for independent images whose details have a heavy-tailed density, with the energy :math:`e_{in}` of the details of
component i around pixel n, over all G kinds of details:

.. math:: \min_W \frac{G}{2} \sum_i \frac{1}{N} \sum_n \log(e_{in} + \epsilon^2) - G \log |\det W|

The details of the three colours are nearly equal, so all kinds are made uncorrelated first; without that, separation
of more than a few images fails. Each step is a Newton step on the relative gradient, with pairs of components solved
by themselves as in Picard.

Reference: Ablin et al. 2018 (Picard), https://arxiv.org/abs/1706.08171; Zibulevsky and Pearlmutter 2001, sparse
decompositions for source separation, https://doi.org/10.1162/089976601300014385.
Differs from the paper: the density looks at a neighbourhood of 3x3 pixels, and curvature is that of the parabolas that
touch the density from above. The details, the density and its width were chosen on training images of CIFAR-10.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.progress import tell

_STEPS = 150
"""Newton steps at most."""
_SETTLED = 1e-3
"""Largest entry of a step at which the search ends."""
_LONGEST = 0.5
"""Largest entry of a step that is taken."""
_HALVINGS = 6
"""Times that a step is shortened to a third if it does not lower the objective."""
_WIDTH = 0.2
"""Epsilon: the scale below which details count as zero, for details of variance 1."""
_CURVED = 0.05
"""Least determinant of the curvature of a pair of components."""
_WHITEN = 3
"""Turns of making mixtures and kinds of details uncorrelated."""
_TINY = 1e-14
"""Share of the largest eigenvalue below which eigenvalues are rounding errors."""


def details(mixtures: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the details (r, H - 1, W - 1, G) of mixtures (r, D) of images of a shape (C, H, W).

    Two per colour: the Laplacian, and the difference of differences along both axes. Images of fewer than 3 pixels in a
    row, and layers' inputs that are no images, with the shape (D,), are their own details, (r, 1, D, 1).
    """
    if len(shape) != 3 or min(shape[1:]) < 3:
        return mixtures.view(len(mixtures), 1, -1, 1)
    images = mixtures.view(-1, *shape)
    wide = F.pad(images, (1, 1, 1, 1), mode="replicate")
    laplacian = wide[..., 1:-1, 2:] + wide[..., 1:-1, :-2] + wide[..., 2:, 1:-1] + wide[..., :-2, 1:-1] - 4 * images
    across = images[..., 1:, 1:] - images[..., 1:, :-1] - images[..., :-1, 1:] + images[..., :-1, :-1]
    both = torch.stack([laplacian[..., :-1, :-1], across], -1)  # (r, C, H - 1, W - 1, 2)
    return both.permute(0, 2, 3, 1, 4).flatten(3)


def unmix(mixtures: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix W (r, r) whose product with mixtures (r, D) are images up to sign, scale and order.

    Args:
        mixtures: linearly independent combinations of r images or other inputs of a layer, in double precision.
        shape: (C, H, W) of an image, or (D,) for inputs that are no images.
    """
    kinds, unmixing = _whitened(details(mixtures, shape))
    state = _State.of(torch.einsum("ij,jhwg->ihwg", unmixing, kinds).float(), torch.eye(len(mixtures)))
    for step in range(_STEPS):
        tell(step / _STEPS)
        direction = _direction(state)
        longest = float(direction.abs().max())
        if longest < _SETTLED:
            break
        after = _moved(state, direction, min(1.0, _LONGEST / longest))
        if after is None:
            break
        state = after
    return state.unmixing.to(unmixing) @ unmixing


def _whitened(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the details with uncorrelated kinds of equal size, and the matrix (r, r) that whitens the mixtures."""
    for _ in range(_WHITEN):
        rows = kinds.flatten(1)
        unmixing = _inverse_root(rows @ rows.T / rows.shape[1])
        white = torch.einsum("ij,jhwg->ihwg", unmixing, kinds).flatten(0, 2)  # (r * N, G)
        turn = _inverse_root(white.T @ white / len(white))
        kinds = kinds @ turn.T
    rows = kinds.flatten(1)
    return kinds, _inverse_root(rows @ rows.T / rows.shape[1])


def _inverse_root(covariance: Tensor) -> Tensor:
    sizes, vectors = torch.linalg.eigh(covariance)
    least = max(_TINY * float(sizes[-1]), torch.finfo(sizes.dtype).tiny)
    root: Tensor = vectors @ (vectors / sizes.clamp_min(least).sqrt()).T
    return root


class _State(NamedTuple):
    """Components during the search.

    Attributes:
        parts: (r, H, W, G), their details, each component with variance 1.
        weights: (r, H, W), slope of the density over the size of the details.
        cost: sum over components of the objective's first term.
        unmixing: (r, r), from the whitened mixtures to these components.
    """

    parts: Tensor
    weights: Tensor
    cost: float
    unmixing: Tensor

    @staticmethod
    def of(parts: Tensor, unmixing: Tensor) -> "_State":
        """Return the state of components, after scaling each to variance 1."""
        size = parts.flatten(1).square().mean(1).sqrt().clamp_min(1e-30)
        parts, unmixing = parts / size.view(-1, 1, 1, 1), unmixing / size[:, None]
        energy = _around(parts.square().mean(3)) + _WIDTH**2
        cost = 0.5 * parts.shape[3] * float(energy.log().flatten(1).mean(1).double().sum())
        return _State(parts, _around(1 / energy), cost, unmixing)


def _around(values: Tensor) -> Tensor:
    """Return the mean of (r, H, W) over 3x3 pixels, or the values themselves if they are no images."""
    if values.shape[1] == 1:
        return values
    return F.avg_pool2d(values[:, None], 3, 1, padding=1)[:, 0]


def _direction(state: _State) -> Tensor:
    """Return the Newton step (r, r) of the relative gradient; its diagonal is zero, as scales are kept."""
    rows, count = state.parts.flatten(1), state.parts[0].numel()
    slope = (state.parts * state.weights[..., None]).flatten(1) @ rows.T / count  # (r, r)
    curvature = state.weights.flatten(1) @ state.parts.square().mean(3).flatten(1).T / state.weights[0].numel()
    own = slope.diagonal()[:, None].clone()
    slope, curvature = slope / own, curvature / own
    determinant = (curvature * curvature.T - 1).clamp_min(_CURVED)
    return ((curvature.T * slope - slope.T) / determinant).fill_diagonal_(0)


def _moved(state: _State, direction: Tensor, length: float) -> _State | None:
    """Return the components after a step that lowers the objective, or None if none does."""
    kinds = state.parts.shape[3]
    for _ in range(_HALVINGS):
        turn = torch.eye(len(direction)) - length * direction
        parts = (turn @ state.parts.flatten(1)).view_as(state.parts)
        after = _State.of(parts, turn)
        gained = kinds * float(torch.linalg.slogdet(after.unmixing.double()).logabsdet)
        if after.cost - gained < state.cost:
            return after._replace(unmixing=after.unmixing @ state.unmixing)
        length /= 3
    return None
