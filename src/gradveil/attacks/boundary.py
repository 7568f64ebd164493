"""The boundary attack: training images are farther from a network's decision boundary than other images."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.base import MembershipAttack
from gradveil.attacks.parts.boundary_search import FEWEST, find_boundary
from gradveil.attacks.parts.subspace import SUBSPACES, Subspace
from gradveil.types import Batch
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Boundary(MembershipAttack):
    r"""Find training images by their distance to the decision boundary, using predicted labels alone.

    .. math:: s(x, y) = \min_{x'} \|x' - x\|_2 \text{ over the points } x' \in [0, 1]^d \text{ found with }
        \arg\max f(x') \ne y; \qquad s = 0 \text{ where } \arg\max f(x) \ne y

    Needs: a client's model, which the server has from its update, to query for labels; candidate images with labels.
    Fails: if the network is no better on its training images than on others. Distances are upper bounds, which are
    loose with few queries.
    Reference: Li and Zhang 2021, https://arxiv.org/abs/2007.15528, Section 4.2; the search is QEBA, Li et al. 2020,
    https://arxiv.org/abs/2005.14137, that is HopSkipJump, Chen et al. 2020, https://arxiv.org/abs/1904.02144, with
    directions from a subspace; ``full`` is HopSkipJump itself.
    Differs from the paper: a search starts from the nearest candidate with another label, and undoes rounds that end
    farther away; misclassified images count, with distance 0, where the paper tests only correctly classified ones; pca
    uses the candidate images, not a reference model's gradients.

    Attributes:
        every: attack the local models of every n-th round.
        images: at most this many members are tested per model, and as many non-members.
        queries: at most this many labels are queried per image.
        subspace: source of random directions: full, resized (upsampled small noise), dct (low frequencies) or pca.
        reduction: factor by which the sides of the small noise are shorter; pca has as many components.
        estimates: random directions in the first round; later rounds have more, by the square root of their number.
    """

    label_only: ClassVar[bool] = True

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
        """Return the distance (N,) of each image to the boundary."""
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
