"""Representation inference: recover the input of fully connected layers per class, and images that have it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import BatchedAdam, Closure, LearningRate
from gradveil.attacks.parts.priors import total_variation
from gradveil.attacks.parts.representations import ROWS, class_representations, linear_chain
from gradveil.attacks.parts.starts import begin
from gradveil.errors import UnknownNameError
from gradveil.networks.space import Space
from gradveil.networks.watch import inputs_of
from gradveil.progress import part, tell
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Representations(Attack):
    r"""Read each class's representation off the update, and find an image that has it.

    .. math:: \arg\min_{x \in [0,1]} 1 - \frac{\langle f(x), \hat r_i \rangle}{\|f(x)\| \|\hat r_i\|} + \alpha\,TV(x)

    with the network f up to a Linear layer, and the representation :math:`\hat r_i` of class i at its input
    (`gradveil.attacks.parts.representations`). It is the mean over the class's images, so for several images of a class
    the attack finds what they share: one image per class, and no guess for the rest of the batch.

    Needs: the number of examples, which is the number of images to return; nothing about local training. If labels are
    not granted, the classes are inferred.
    Fails: if clients hold images of many classes, whose representations mix; if earlier layers pool away the details
    of an image. Does not adapt to a known defence.
    Reference: Sun et al. 2021 (Soteria), https://arxiv.org/abs/2012.06043, Sections 3.2 and 3.3.
    Differs from the paper: the paper uses inferred representations in DLG, in a way described in an appendix that the
    published version lacks; here they are matched alone, by direction because their length is not known, with a total
    variation prior. DLG on the gradients of Linear layers alone is ``dlg:parts=linear``. Before the last layer, a
    class's rows are found by its error, not by elements of the next representation, which hardly differ by class.

    Attributes:
        iterations: steps of Adam.
        lr: Adam's learning rate, which decays by half a cosine.
        tv: weight of total variation (mean absolute difference, in normalised units).
        layer: the name of the Linear layer whose input is matched; by default the first.
        rows: how a class's rows are found: errors, or elements (published).
        restarts: searches from different starts; the one with the least loss is kept for each class.
        keep: iterates kept for the report, in addition to the start.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})

    iterations: int = 2000
    lr: float = 0.3
    tv: float = 1e-3
    layer: str = ""
    rows: str = "errors"
    restarts: int = 1
    keep: int = 0

    def __post_init__(self) -> None:
        in_range("iterations", self.iterations, 1)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("tv", self.tv, 0)
        one_of("rows", self.rows, ROWS)
        in_range("restarts", self.restarts, 1)
        in_range("keep", self.keep, 0)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Infer representations, then search one image per class of each target."""
        chain = linear_chain(seen)
        if self.layer and self.layer not in chain:
            raise UnknownNameError("layer", self.layer, chain)
        layer = self.layer or chain[0]
        known = _classes_of(seen.labels, seen.num_classes) if seen.knows(Knowledge.LABELS) else None
        wanted = class_representations(seen, known, self.rows)[layer]  # (T, classes, features)
        labels = _chosen(wanted, seen.updates[f"{chain[-1]}.weight"], seen.num_examples)
        targets, slots = torch.nonzero(labels >= 0, as_tuple=True)  # one row per image to find
        aims = wanted[targets, labels[targets, slots]]
        if not len(aims):
            return _nothing(seen, self.keep)
        chunks, found = torch.split(aims, max(1, _TOGETHER // self.restarts)), []
        for number, some in enumerate(chunks):
            with part(number, len(chunks)):
                found.append(self._invert(seen, layer, some, rng))
        images, loss, close, iterates = (
            torch.cat(each, -4 if each[0].dim() > 1 else 0) for each in zip(*found, strict=True)
        )

        def placed(rows: Tensor) -> Tensor:  # (rows, ...) to (T, B, ...), NaN without a guess
            whole = rows.new_full((*labels.shape, *rows.shape[1:]), torch.nan)
            whole[targets, slots] = rows
            return whole

        return Reconstruction(
            images=placed(images),
            labels=labels,
            loss=placed(loss).nanmean(1),
            converged=placed(close.to(loss)).nanmean(1) == 1,
            why=tuple("" if some else _NO_CLASS for some in (labels >= 0).any(1).tolist()),
            iterates=torch.stack([placed(each) for each in iterates]) if self.keep else images.new_empty(0),
        )

    def _invert(
        self, seen: Observation, layer: str, aims: Tensor, rng: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images (rows, C, H, W) in [0, 1] for representations, and their loss, convergence and iterates."""
        space = Space(seen.network, seen.shape, aims)
        every = aims.repeat_interleave(self.restarts, 0)
        start = begin("normal", seen, None, len(every), 1, space, rng).to(aims)
        best = start, torch.full((len(every),), torch.inf).to(aims)
        shown = []
        frames = {round(i * self.iterations / self.keep) for i in range(self.keep + 1)} if self.keep else set()
        closure = _closure(seen, layer, every, space, self.tv)
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
        blank = closure(begin("grey", seen, None, len(every), 1, space, rng).to(aims))[0]
        return images, best[1][chosen], (best[1] <= _CONVERGED * blank)[chosen], iterates

    def _descend(self, start: Tensor, closure: Closure, space: Space) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all iterates with their losses, beginning with the start."""
        optimiser = BatchedAdam(start, LearningRate(self.lr, self.iterations, "cosine"), project=space.box)
        for _ in range(self.iterations):
            before = optimiser.variables
            yield before, optimiser.step(closure)
        yield optimiser.variables, closure(optimiser.variables)[0]


_TOGETHER = 64
"""Searches evaluated at once; more do not fit a CPU's cache."""
_CONVERGED = 0.02
"""A search has converged at this share of a mid-grey image's loss, which is itself small for positive features."""


def _nothing(seen: Observation, keep: int) -> Reconstruction:
    """Return no guess, if no class was found for any target."""
    like = next(iter(seen.updates.values()))
    images = like.new_full((seen.num_targets, seen.num_examples, *seen.shape), torch.nan)
    none = torch.full(images.shape[:2], -1, device=like.device)
    return Reconstruction(
        images=images,
        labels=none,
        loss=images[:, 0, 0, 0, 0],
        converged=none[:, 0] >= 0,
        why=(_NO_CLASS,) * seen.num_targets,
        iterates=images.expand(keep + 1, *images.shape) if keep else like.new_empty(0),
    )


_NO_CLASS = "no class was found in the last layer"


def _classes_of(labels: Tensor, num_classes: int) -> Tensor:
    """Return a mask (T, classes) of the classes among labels (T, B) or soft labels (T, B, classes)."""
    return torch.nn.functional.one_hot(labels, num_classes).any(1) if labels.dim() == 2 else labels.gt(0).any(1)


def _chosen(wanted: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return labels (T, count) of the classes found, those with the largest rows; sorted, and -1 for the rest."""
    found = wanted.isfinite().all(2)
    size = torch.where(found, weight.norm(dim=2), -torch.inf)
    order = size.argsort(1, descending=True)[:, :count]
    absent = wanted.shape[1]
    labels = torch.where(found.gather(1, order), order, absent).sort(1).values
    labels = torch.where(labels == absent, -1, labels)
    return torch.nn.functional.pad(labels, (0, count - labels.shape[1]), value=-1)


def _closure(seen: Observation, layer: str, aims: Tensor, space: Space, tv: float) -> Closure:
    """Return the function for loss and gradient of flat guesses, one per representation."""
    distance, wanted = Objective("cosine"), {"representation": aims}

    def evaluate(flat: Tensor) -> tuple[Tensor, Tensor]:
        leaf = flat.detach().requires_grad_()
        images = leaf.view(-1, *seen.shape)
        with inputs_of(seen.network, [layer]) as reached:
            seen.network(space.to_pixels(images))
        loss = distance({"representation": reached[layer]}, wanted) + tv * total_variation(images)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    return evaluate
