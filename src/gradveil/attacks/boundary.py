"""The boundary attack: training images lie farther from a network's decision boundary than others."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.base import MembershipAttack
from gradveil.attacks.parts.boundary_search import FEWEST, find_boundary
from gradveil.attacks.parts.subspace import SUBSPACES, Subspace
from gradveil.types import Batch
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Boundary(MembershipAttack):
    r"""Tell training images from others by how far they are from the decision boundary, from labels alone.

    .. math:: s(x, y) = \min_{x'} \|x' - x\|_2 \text{ over the points } x' \in [0, 1]^d \text{ found with }
        \arg\max f(x') \ne y; \qquad s = 0 \text{ where } \arg\max f(x) \ne y

    Needs: a client's model, which the server has from its update, to ask for labels; images with their labels to ask
    about.
    Fails: where the network does no better on its training images than on others; its distances are upper bounds, which
    few queries leave loose.
    Reference: Li and Zhang 2021, https://arxiv.org/abs/2007.15528, Section 4.2; the search is QEBA, Li et al. 2020,
    https://arxiv.org/abs/2005.14137, that is HopSkipJump, Chen et al. 2020, https://arxiv.org/abs/1904.02144, with
    directions from a subspace; ``full`` is HopSkipJump itself.
    Differs from the paper: a search starts from the nearest candidate that is labelled differently, and takes back
    rounds that end farther away; images that are classified wrongly count, at a distance of 0, where the paper tries
    right ones only; pca is of the candidate images, not of a reference model's gradients.

    Attributes:
        every: rounds between two local models that are attacked.
        images: members that are tried on each of them at most, and as many others.
        queries: labels that may be asked for each image.
        subspace: where random directions come from: full, resized (enlarged small noise), dct (low frequencies) or pca.
        reduction: by how much the sides of that small noise are shorter; pca has as many components.
        estimates: random directions of the first round; later ones have more, by the root of their number.
    """

    queries: int = 1000
    subspace: str = "resized"
    reduction: int = 4
    estimates: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("queries", self.queries, FEWEST)
        one_of("subspace", self.subspace, SUBSPACES)
        in_range("reduction", self.reduction, 1)
        in_range("estimates", self.estimates, 1)

    def scores(self, network: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        """(N,) the distance of each image to the boundary."""
        subspace = Subspace.of(self.subspace, batch.images, self.reduction)
        found = find_boundary(
            network,
            batch.images,
            batch.labels,
            subspace,
            queries=self.queries,
            estimates=self.estimates,
            rng=rng,
        )
        return found.distances
