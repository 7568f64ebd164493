"""Imprint (Robbing the Fed): a layer that sorts images into bins, so that neighbouring rows differ by one image."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Attack, Scene
from gradveil.attacks.parts.analytic import (
    INSERTED,
    WHERE,
    Block,
    Rows,
    collect,
    first_linear,
    insert,
    likely_pictures,
    public_images,
    ratios,
    rows_of,
    set_rows,
    set_shift,
    strong,
    two_linears,
)
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of

QUERIES = ("linear", "dct", "random")
DISTRIBUTIONS = ("auto", "normal", "laplace", "empirical")


@dataclass(frozen=True)
class Imprint(Attack):
    r"""Measure every image by one linear query, and activate row i for images above the i-th quantile.

    .. math:: x = \frac{\Delta W_i - \Delta W_{i+1}}{\Delta b_i - \Delta b_{i+1}}, \qquad
        W_i = g\,q, \quad b_i = -g\,c_i, \quad c_1 < \dots < c_k

    An image in bin i, with :math:`c_i < \langle q, x \rangle \le c_{i+1}`, contributes equally to rows 1 to i, because
    all rows have the same outgoing weights after the ReLU. So neighbouring rows differ by the images of one bin: a
    single image is recovered exactly up to rounding, several are mixed. Of B images in k equally likely bins, a share
    of :math:`(1 - 1/k)^{B-1}` is alone in its bin: 61 % of 64 images in 128 bins.

    Needs: the number of examples, and to alter the model. If public data are granted, the bins fit real images.
    Fails: under noise, which hides differences of rows first; for images that share a bin; for answers outside the
    assumed distribution (digits without public data). Several local steps are treated as one, which works
    approximately with ``gain=1``: the first step overwrites smaller rows, and larger ones lose precision to rounding.
    Reference: Fowl et al. 2022 (Robbing the Fed), https://arxiv.org/abs/2110.13057, Section 4, and the authors' code.
    DCS2's experiments take ``bins=10,query=dct,mode=0,distribution=laplace``.
    Differs from the paper: the block adds its output to the image as a slight, centred shift of brightness, so that the
    network after it keeps working, where the paper passes on nothing else; the sparse variant for several local steps
    is missing; without public data the bins come from smooth noise with the mean and contrast of the model's
    normalisation.

    Attributes:
        bins: the number of bins and rows; at least as many as images.
        query: the linear query: linear (mean brightness), dct (a cosine over the flattened image) or random.
        mode: frequency of the cosine, for dct.
        distribution: assumed distribution of the answers: normal, laplace, empirical (of public images), or auto, which
            is empirical if public data are granted, else laplace for dct and normal for the others.
        gain: size of the rows. Smaller rows lose less to the rounding of weights, because the step is large in
            comparison.
        where: inserted (before the network) or first (in its own first Linear layer, which then passes on only the
            answers).
        shift: contrast added to the image, as a share of the image's own contrast.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.ALTERS_MODEL})

    bins: int = 128
    query: str = "linear"
    mode: int = 32
    distribution: str = "auto"
    gain: float = 1e-3
    where: str = "inserted"
    shift: float = 0.05

    def __post_init__(self) -> None:
        in_range("bins", self.bins, 2)
        one_of("query", self.query, QUERIES)
        in_range("mode", self.mode, 0)
        one_of("distribution", self.distribution, DISTRIBUTIONS)
        in_range("gain", self.gain, 0, open_low=True)
        one_of("where", self.where, WHERE)
        in_range("shift", self.shift, 0, open_low=True)
        if self.distribution == "empirical":
            object.__setattr__(self, "needs", self.needs | {Knowledge.PUBLIC_DATA})

    def alter(self, network: nn.Module, seen: Scene, rng: torch.Generator) -> nn.Module:
        """Insert the block before the network, or write rows into its first layer and equal columns into the next."""
        pictures = likely_pictures(network, seen, rng)
        question = self._question(math.prod(seen.shape), rng)
        answers = pictures.double().flatten(1) @ question
        space = Space(network, seen.shape, torch.zeros(()))
        if self.where == "first":
            first, after = two_linears(network, seen.shape)
            self._ask(first, question, answers, seen, space)
            with torch.no_grad():
                after.weight.copy_(after.weight.mean(1, keepdim=True).expand_as(after.weight))
                after.weight.div_(self.gain)
            return network
        block = Block(self.bins, seen.shape)
        self._ask(block.rows, question, answers, seen, space)
        columns = torch.ones(space.size, self.bins)
        set_shift(block, columns, space.from_pixels(pictures).flatten(1), self.shift)
        return insert(network, block)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return the ratios of differences of neighbouring rows; the last row is used as it is."""
        rows = rows_of(seen, self._layer(seen))
        apart = Rows(_differences(rows.weight), _differences(rows.bias))
        images = ratios(apart, Space(seen.network, seen.shape, rows.bias))
        found = [strong(*pair) for pair in zip(images, apart.bias.abs(), strict=True)]
        return collect(seen, found, "mixtures of images in one bin")

    def _layer(self, seen: Observation) -> str:
        return f"{INSERTED}.rows" if self.where == "inserted" else first_linear(seen.network, seen.shape)

    def _question(self, size: int, rng: torch.Generator) -> Tensor:
        """Return the query (D,) that an image is multiplied by; the magnitudes of its entries sum to 1."""
        if self.query == "linear":
            question = torch.ones(size, dtype=torch.float64)
        elif self.query == "dct":
            question = torch.cos(math.pi / size * (torch.arange(size, dtype=torch.float64) + 0.5) * self.mode)
        else:
            question = torch.randn(size, generator=rng, dtype=torch.float64)
        return question / question.abs().sum()

    def _ask(self, layer: nn.Linear, question: Tensor, answers: Tensor, seen: Scene, space: Space) -> None:
        """Write the rows, which differ only in their thresholds."""
        if layer.out_features < 2:
            raise ConfigError(
                f"The first layer must have at least 2 rows, got {layer.out_features}. Use where=inserted."
            )
        kind, public = self.distribution, public_images(seen) is not None
        if kind == "auto":
            kind = "empirical" if public else "laplace" if self.query == "dct" else "normal"
        if kind == "empirical" and not public:
            raise ConfigError(
                "distribution=empirical needs at least 20 public images, got fewer. "
                "Add public-data to --knows, or use distribution=normal or distribution=laplace."
            )
        thresholds = quantiles(answers, layer.out_features, kind)
        rows = question.expand(layer.out_features, -1)
        set_rows(layer, self.gain * rows, self.gain * thresholds, space)


def quantiles(answers: Tensor, bins: int, kind: str) -> Tensor:
    """Return the lower ends (bins,) of equally likely bins for numbers like ``answers`` (N,); the first is below all.

    Example:
        >>> quantiles(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), 2, "empirical")
        tensor([-15.8114,   2.0000], dtype=torch.float64)
    """
    answers = answers.double()
    mean, spread = float(answers.mean()), float(answers.std()) or 1.0
    chances = [number / bins for number in range(1, bins)]
    if kind == "empirical":
        inner = torch.quantile(answers, torch.tensor(chances, dtype=torch.float64)).tolist()
    elif kind == "normal":
        inner = [NormalDist(mean, spread).inv_cdf(chance) for chance in chances]
    else:
        scale = spread / 2**0.5
        inner = [mean + scale * math.copysign(math.log(1 - 2 * abs(p - 0.5)), p - 0.5) for p in chances]
    lowest = min(float(answers.min()), inner[0], mean) - _BELOW * spread
    return torch.tensor([lowest, *inner], dtype=torch.float64)


_BELOW = 10.0
"""Standard deviations between the first threshold and the lowest number."""


def _differences(values: Tensor) -> Tensor:
    """Return each row (T, rows, ...) minus the next."""
    return torch.cat([values[:, :-1] - values[:, 1:], values[:, -1:]], 1)
