"""Find images that have given features, which are the input of a layer, with total variation as a prior."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import BatchedAdam, Closure, LearningRate
from gradveil.attacks.parts.priors import total_variation
from gradveil.attacks.parts.starts import begin
from gradveil.networks.space import Space
from gradveil.networks.watch import inputs_of
from gradveil.progress import part, tell
from gradveil.threat import Observation

_TOGETHER = 64
"""Searches evaluated at once; more do not fit a CPU's cache."""
_CONVERGED = 0.02
"""A search has converged at this share of a mid-grey image's loss, which is itself small for positive features."""


class Inverted(NamedTuple):
    """Images found for N features.

    Attributes:
        images: (N, C, H, W) in [0, 1].
        loss: (N,) distance of their features, and the prior.
        converged: (N,) whether the loss is small beside that of a grey image.
        iterates: (K, N, C, H, W), best images during the search.
    """

    images: Tensor
    loss: Tensor
    converged: Tensor
    iterates: Tensor


@dataclass(frozen=True)
class FeatureSearch:
    r"""Minimise a distance of features and total variation with Adam, inside the box of pixels.

    .. math:: \arg\min_{x \in [0,1]} d(f(x), z) + \alpha\,TV(x)

    ``cosine`` takes :math:`d = 1 - \cos(f(x), z)`, for features of unknown length; ``l2`` the squared distance, divided
    by that of a grey image.

    Attributes:
        iterations: steps of Adam.
        lr: Adam's learning rate, which decays by half a cosine.
        tv: weight of total variation (mean absolute difference, in normalised units).
        restarts: searches from different starts; the one with the least loss is kept.
        keep: iterates kept for the report, in addition to the start.
        distance: cosine or l2.
        start: where searches begin: normal (noise) or grey.
    """

    iterations: int
    lr: float
    tv: float
    restarts: int = 1
    keep: int = 0
    distance: str = "cosine"
    start: str = "normal"

    def __call__(self, seen: Observation, layer: str, aims: Tensor, rng: torch.Generator) -> Inverted:
        """Return an image for each of the features (N, D) at the input of a layer."""
        chunks, found = torch.split(aims, max(1, _TOGETHER // self.restarts)), []
        for number, some in enumerate(chunks):
            with part(number, len(chunks)):
                found.append(self._search(seen, layer, some, rng))
        together = (torch.cat(each, -4 if each[0].dim() > 1 else 0) for each in zip(*found, strict=True))
        return Inverted(*together)

    def _search(self, seen: Observation, layer: str, aims: Tensor, rng: torch.Generator) -> Inverted:
        """Search one chunk."""
        space = Space(seen.network, seen.shape, aims)
        every = aims.repeat_interleave(self.restarts, 0)
        start = begin(self.start, seen, None, len(every), 1, space, rng).to(aims)
        best = start, torch.full((len(every),), torch.inf).to(aims)
        shown = []
        frames = {round(i * self.iterations / self.keep) for i in range(self.keep + 1)} if self.keep else set()
        grey = begin("grey", seen, None, len(every), 1, space, rng).to(aims)
        closure = self._closure(seen, layer, every, space, grey)
        for number, (flat, loss) in enumerate(self._descend(start, closure, space)):
            better = loss < best[1]
            best = torch.where(better[:, None], flat, best[0]), torch.where(better, loss, best[1])
            tell(number / self.iterations)
            if number in frames:
                shown.append(best[0])
        chosen = best[1].view(-1, self.restarts).argmin(1) + torch.arange(len(aims)).to(aims.device) * self.restarts

        def pictures(flat: Tensor) -> Tensor:
            return space.to_pixels(flat[chosen].view(-1, *seen.shape)).clamp(0, 1)

        images = pictures(best[0])
        iterates = torch.stack([pictures(each) for each in shown]) if shown else images.new_empty(0, *images.shape)
        blank = closure(grey)[0]
        return Inverted(images, best[1][chosen], (best[1] <= _CONVERGED * blank)[chosen], iterates)

    def _descend(self, start: Tensor, closure: Closure, space: Space) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all iterates with their losses, beginning with the start."""
        optimiser = BatchedAdam(start, LearningRate(self.lr, self.iterations, "cosine"), project=space.box)
        for _ in range(self.iterations):
            before = optimiser.variables
            yield before, optimiser.step(closure)
        yield optimiser.variables, closure(optimiser.variables)[0]

    def _closure(self, seen: Observation, layer: str, aims: Tensor, space: Space, grey: Tensor) -> Closure:
        """Return the function for loss and gradient of flat guesses, one per feature vector."""
        distance, wanted = Objective(self.distance), {"features": aims}

        def apart(images: Tensor) -> Tensor:
            with inputs_of(seen.network, [layer]) as reached:
                seen.network(space.to_pixels(images))
            return distance({"features": reached[layer]}, wanted)

        with torch.no_grad():
            unit = apart(grey.view(-1, *seen.shape)).clamp_min(1e-30) if self.distance == "l2" else 1.0

        def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
            leaf = flat.detach().requires_grad_()
            images = leaf.view(-1, *seen.shape)
            loss = apart(images) / unit + self.tv * total_variation(images)
            return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

        return evaluate
