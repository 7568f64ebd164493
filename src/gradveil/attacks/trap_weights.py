"""Trap weights: rows that few images activate, so that some rows see a single image."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.base import Attack, Scene
from gradveil.attacks.parts.analytic import (
    INSERTED,
    WHERE,
    Block,
    collect,
    first_linear,
    insert,
    likely_pictures,
    ratios,
    set_rows,
    set_shift,
    strong,
    supported,
    two_linears,
)
from gradveil.attacks.parts.undoing import undone_rows
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class TrapWeights(Attack):
    r"""Give each row a random half of negative weights, and slightly smaller positive ones for the other half.

    .. math:: W_{ij} = \begin{cases} -|n_j| & j \in N_i \\ s\,|n_{\pi(j)}| & \text{else} \end{cases}, \quad
        n \sim \mathcal N(0, \sigma^2), \qquad x = \frac{\Delta W_i}{\Delta b_i}

    With s slightly below 1 most images give a negative value, which the ReLU blocks. A row that a single image
    activates reveals it; such rows are recognised by whole 8-bit values or by two rows that agree. The weights do not
    depend on what images look like.

    Needs: the number of examples, and to alter the model.
    Fails: for images that are alone in no row, so for dark images among bright ones and for large batches; if each
    image's gradient is clipped and noise is added (dp-sgd). Several local steps are treated as one, although rows
    change in between; this was not measured.
    Adapts: knowing the defence, it first undoes what was done to the rows (`gradveil.attacks.parts.undoing`).
    Reference: Boenisch et al. 2021, https://arxiv.org/abs/2112.02918, Section 5 and Algorithm 1 (sigma 0.5, scale
    0.95).
    Differs from the paper: rows are in a block before the network (or in its own first Linear layer), which adds its
    output to the image as a slight shift in a pattern per row, so that the network keeps working; all rows are scaled
    by ``gain`` and what follows by its inverse, which changes neither which images activate them nor what the network
    computes, but makes their gradient larger than noise; pure rows are found without looking at the private images.
    Convolutional traps are missing.

    Attributes:
        rows: rows of the inserted block; more rows catch more images.
        sigma: standard deviation of the weights before the gain.
        scale: ratio of positive to negative weights; with a lower one fewer images activate a row.
        gain: size of the rows; their gradient grows as 1 / ``gain``.
        where: inserted (before the network) or first (in its own first Linear layer).
        shift: contrast added to the image, as a share of the image's own contrast.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.ALTERS_MODEL})
    adapts: ClassVar[bool] = True

    rows: int = 1000
    sigma: float = 0.5
    scale: float = 0.95
    gain: float = 1e-8
    where: str = "inserted"
    shift: float = 0.05

    def __post_init__(self) -> None:
        in_range("rows", self.rows, 1)
        in_range("sigma", self.sigma, 0, open_low=True)
        in_range("scale", self.scale, 0, open_low=True)
        in_range("gain", self.gain, 0, open_low=True)
        one_of("where", self.where, WHERE)
        in_range("shift", self.shift, 0, open_low=True)

    def alter(self, network: nn.Module, seen: Scene, rng: torch.Generator) -> nn.Module:
        """Insert the block before the network, or write the rows into its first layer."""
        space = Space(network, seen.shape, torch.zeros(()))
        if self.where == "first":
            first, after = two_linears(network, seen.shape)
            self._set(first, space, rng)
            with torch.no_grad():
                after.weight.div_(self.gain)
            return network
        block = Block(self.rows, seen.shape)
        self._set(block.rows, space, rng)
        pictures = space.from_pixels(likely_pictures(network, seen, rng)).flatten(1)
        set_shift(block, _patterns(self.rows, seen.shape, rng), pictures, self.shift)
        return insert(network, block)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return the ratios of rows, those that saw one image first."""
        layer = f"{INSERTED}.rows" if self.where == "inserted" else first_linear(seen.network, seen.shape)
        undone = undone_rows(seen, layer, seen.num_examples)
        rows = undone.rows
        images = ratios(rows, Space(seen.network, seen.shape, rows.bias))
        found = [supported(strong(*pair)) for pair in zip(images, rows.bias.abs(), strict=True)]
        return undone.told(collect(seen, found, "mixtures of those that passed a row together"))

    def _set(self, layer: nn.Linear, space: Space, rng: torch.Generator) -> None:
        rows = trap_rows(layer.out_features, space.size, self.sigma, self.scale, rng)
        set_rows(layer, self.gain * rows, torch.zeros(layer.out_features), space)


def trap_rows(rows: int, size: int, sigma: float, scale: float, rng: torch.Generator) -> Tensor:
    """Return trap weights (rows, size): half of each row is -|N(0, sigma)|, the rest minus ``scale`` times those.

    The halves are drawn at random. If the number of pixels is odd, one has no partner and gets 0.
    """
    half = size // 2
    magnitudes = sigma * torch.randn(rows, half, generator=rng).abs()
    paired = torch.cat([-magnitudes, scale * magnitudes], 1)
    order = torch.rand(rows, size, generator=rng).argsort(1)[:, : 2 * half]
    return torch.zeros(rows, size).scatter_(1, order, paired)


def _patterns(rows: int, shape: tuple[int, int, int], rng: torch.Generator) -> Tensor:
    """Return a smooth random picture per row, (D, rows), so that each row shifts the image differently."""
    coarse = torch.randn(rows, shape[0], 4, 4, generator=rng)
    grown = F.interpolate(coarse, shape[1:], mode="bilinear")
    return grown.reshape(rows, math.prod(shape)).T
