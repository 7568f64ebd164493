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
    set_rows,
    set_shift,
    strong,
    two_linears,
)
from gradveil.attacks.parts.undoing import undone_rows
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of

QUERIES = ("linear", "dct", "random")
DISTRIBUTIONS = ("auto", "normal", "laplace", "empirical")
FORMS = ("ladder", "sparse", "one-shot")


@dataclass(frozen=True)
class Imprint(Attack):
    r"""Measure every image by one linear query, and activate row i for images above the i-th quantile.

    .. math:: x = \frac{\Delta W_i - \Delta W_{i+1}}{\Delta b_i - \Delta b_{i+1}}, \qquad
        W_i = g\,q, \quad b_i = -g\,c_i, \quad c_1 < \dots < c_k

    An image in bin i, with :math:`c_i < \langle q, x \rangle \le c_{i+1}`, contributes equally to rows 1 to i, because
    all rows have the same outgoing weights after the ReLU. So neighbouring rows differ by the images of one bin: a
    single image is recovered exactly up to rounding, several are mixed. Of B images in k equally likely bins, a share
    of :math:`(1 - 1/k)^{B-1}` is alone in its bin: 61 % of 64 images in 128 bins.

    That is the form ``ladder``. In the form ``sparse`` a ramp from 0 to 1 over bin i replaces the ReLU, constant below
    and above, so that row i itself changes by the images of bin i alone. ``one-shot`` is the sparse form with a single
    row, for the bin above the median: it wants one image of a batch, and gets it if exactly one is in the bin (37 % of
    the batches if there are as many bins as images). In a network's own first layer it is two rows, one for each end of
    the bin, with opposite outgoing weights; all other rows stay as they are.

    Needs: the number of examples, and to alter the model. If public data are granted, the bins fit real images.
    Fails: for images that share a bin; for answers outside the assumed distribution (digits without public data);
    if each image's gradient is clipped and noise is added (dp-sgd). Noise alone does not stop it: the gradient of the
    rows grows as 1 / ``gain``, and the network behind them notices nothing. Several local steps are treated as one:
    the images of the first step are read, which silences the rows; with ``gain=1`` those of later steps too, but
    roughly.
    Adapts: knowing the defence, it first undoes what was done to the rows (`gradveil.attacks.parts.undoing`).
    Reference: Fowl et al. 2022 (Robbing the Fed), https://arxiv.org/abs/2110.13057, Section 4, and the authors' code.
    DCS2's experiments take ``bins=10,query=dct,mode=0,distribution=laplace``.
    Differs from the paper: the block adds its output to the image as a slight, centred shift of brightness, so that the
    network after it keeps working, where the paper passes on nothing else; rows are 1e5 times smaller than the
    authors' (1e-3), and what multiplies their output larger, so that more noise is needed to hide them; without public
    data the bins come from smooth noise with the mean and contrast of the model's normalisation.

    Attributes:
        form: ladder, sparse or one-shot.
        bins: the number of bins, and of rows unless the form is one-shot; at least as many as images.
        query: the linear query: linear (mean brightness), dct (a cosine over the flattened image) or random.
        mode: frequency of the cosine, for dct.
        distribution: assumed distribution of the answers: normal, laplace, empirical (of public images), or auto, which
            is empirical if public data are granted, else laplace for dct and normal for the others.
        gain: size of the rows. What follows multiplies their output by as much as they are smaller: the network sees
            the same images, but the gradient of the rows grows as 1 / ``gain``, and with it what noise, rounding and
            other parts of the update leave of the images. DCS2's experiments have 1e-3.
        where: inserted (before the network) or first (in its own first Linear layer, which then passes on only the
            answers).
        shift: contrast added to the image, as a share of the image's own contrast.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.ALTERS_MODEL})
    adapts: ClassVar[bool] = True

    form: str = "ladder"
    bins: int = 128
    query: str = "linear"
    mode: int = 32
    distribution: str = "auto"
    gain: float = 1e-8
    where: str = "inserted"
    shift: float = 0.05

    def __post_init__(self) -> None:
        one_of("form", self.form, FORMS)
        in_range("bins", self.bins, 2)
        one_of("query", self.query, QUERIES)
        in_range("mode", self.mode, 0)
        one_of("distribution", self.distribution, DISTRIBUTIONS)
        in_range("gain", self.gain, 0, open_low=True)
        one_of("where", self.where, WHERE)
        in_range("shift", self.shift, 0, open_low=True)
        if self.form == "sparse" and self.where == "first":
            raise ConfigError(
                "The form sparse needs a ramp in place of the ReLU, got where=first. Use where=inserted or form=ladder."
            )
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
            if first.out_features < 2:
                raise ConfigError(
                    f"The first layer must have at least 2 rows, got {first.out_features}. Use where=inserted."
                )
            ladder = self.form == "ladder"
            ends = self._ends(answers, first.out_features if ladder else self.bins, seen)
            write = self._write_ladder if ladder else self._write_pair
            write(first, after, question, ends, space)
            return network
        block = self._block(question, self._ends(answers, self.bins, seen), space)
        columns = torch.ones(space.size, block.rows.out_features)
        set_shift(block, columns, space.from_pixels(pictures).flatten(1), self.shift)
        return insert(network, block)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return what single bins changed: differences of neighbouring rows, or rows as they are."""
        undone = undone_rows(seen, self._layer(seen), seen.num_examples)
        rows = undone.rows
        apart = Rows(*map(self._apart, rows))
        images = ratios(apart, Space(seen.network, seen.shape, rows.bias))
        found = [strong(*pair) for pair in zip(images, apart.bias.abs(), strict=True)]
        return undone.told(collect(seen, found, "mixtures of images in one bin"))

    def _apart(self, rows: Tensor) -> Tensor:
        """Return the part of each bin in the change (T, rows, ...) of the rows."""
        if self.form == "ladder":
            return _differences(rows)
        return rows if self.where == "inserted" else rows[:, :1] + rows[:, 1:2]

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

    def _ends(self, answers: Tensor, bins: int, seen: Scene) -> Tensor:
        """Return the ends (bins + 1,) of the bins; the first and the last are far outside."""
        kind, public = self.distribution, public_images(seen) is not None
        if kind == "auto":
            kind = "empirical" if public else "laplace" if self.query == "dct" else "normal"
        if kind == "empirical" and not public:
            raise ConfigError(
                "distribution=empirical needs at least 20 public images, got fewer. "
                "Add public-data to --knows, or use distribution=normal or distribution=laplace."
            )
        lower = quantiles(answers, bins, kind)
        return torch.cat([lower, lower[-1:] + (lower[1] - lower[0])])

    def _block(self, question: Tensor, ends: Tensor, space: Space) -> Block:
        """Return a block whose rows become active at the lower end of their bin, or only within it."""
        lower, upper = ends[:-1], ends[1:]
        if self.form == "one-shot":
            at = slice(self.bins // 2, self.bins // 2 + 1)
            lower, upper = lower[at], upper[at]
        scale = self.gain / (upper - lower if self.form != "ladder" else torch.ones_like(lower))  # (rows,)
        block = Block(len(lower), space.shape, None if self.form == "ladder" else self.gain)
        set_rows(block.rows, scale[:, None] * question, scale * lower, space)
        return block

    def _write_ladder(self, first: nn.Linear, after: nn.Linear, question: Tensor, ends: Tensor, space: Space) -> None:
        """Write a row per bin, and the mean column of the next layer for all of them."""
        rows = question.expand(first.out_features, -1)
        set_rows(first, self.gain * rows, self.gain * ends[:-1], space)
        with torch.no_grad():
            after.weight.copy_(after.weight.mean(1, keepdim=True).expand_as(after.weight))
            after.weight.div_(self.gain)

    def _write_pair(self, first: nn.Linear, after: nn.Linear, question: Tensor, ends: Tensor, space: Space) -> None:
        """Write two rows for the ends of the bin above the median, with opposite columns in the next layer."""
        low, high = ends[self.bins // 2 : self.bins // 2 + 2]
        pair = nn.Linear(space.size, 2, device="meta").to_empty(device="cpu")  # no random draw
        set_rows(pair, self.gain * question.expand(2, -1), self.gain * torch.stack([low, high]), space)
        with torch.no_grad():
            first.weight[:2], first.bias[:2] = pair.weight.to(first.weight), pair.bias.to(first.bias)
            column = after.weight[:, 0] / (self.gain * float(high - low))
            after.weight[:, :2] = torch.stack([column, -column], 1)


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
