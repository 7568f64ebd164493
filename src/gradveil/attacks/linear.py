"""Linear: read images off the gradient of a network's first Linear layer, without any search."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.analytic import collect, first_linear, ratios, strong, supported
from gradveil.attacks.parts.frozen_features import head_of, images_behind
from gradveil.attacks.parts.undoing import undone_rows
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction


@dataclass(frozen=True)
class Linear(Attack):
    r"""Divide the gradient of a row of the first layer by the gradient of its bias.

    .. math:: x = \frac{\partial L / \partial W_i}{\partial L / \partial b_i}

    For a single image every row gives the image exactly, after any number of local steps without weight decay; the row
    with the largest bias gradient is used. For a batch, a row gives a mixture of the images that activate it. With a
    ReLU some rows may see only one image: such rows are recognised by whole 8-bit values or by two rows that agree;
    next come ratios inside [0, 1].

    Behind frozen features (models patches and frozen) the same quotient gives the features of a single image, or a
    mixture of those of a batch; a search then finds one image that has them.

    Needs: the number of examples, which is the number of images to return. The network must begin with a Linear layer
    with bias on the flattened image, such as mlp and logistic, or be a head on frozen features.
    Fails: for most images of a larger batch, which activate all rows alike; under noise; if the bias is not sent. For
    batches and several local steps, rows see more images as training proceeds, and fewer stay pure.
    Adapts: knowing the defence, it completes removed entries, finds the likeliest gradient under noise, or separates a
    concealed sample's part first (`gradveil.attacks.parts.undoing`).
    Reference: Phong et al. 2017, https://eprint.iacr.org/2017/715, Section 3; Geiping et al. 2020,
    https://arxiv.org/abs/2003.14053, Proposition 3.1.
    Differs from the paper: accepts batches, and reports which guesses are mixtures.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})
    adapts: ClassVar[bool] = True

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return the ratio of the strongest row, or the ratios of rows that see one image."""
        head = head_of(seen.network)
        if head is not None:
            return images_behind(seen, head, rng)
        undone = undone_rows(seen, first_linear(seen.network, seen.shape), seen.num_examples)
        rows = undone.rows
        images = ratios(rows, Space(seen.network, seen.shape, rows.bias))
        most = 1 if seen.num_examples == 1 else None
        found = [supported(strong(*pair, most)) for pair in zip(images, rows.bias.abs(), strict=True)]
        return undone.told(collect(seen, found, "mixtures of those that reach a row"))
