"""Representation inference: recover the input of fully connected layers per class, and images that have it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.feature_inversion import FeatureSearch
from gradveil.attacks.parts.representations import ROWS, class_representations, linear_chain
from gradveil.errors import UnknownNameError
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
        search = FeatureSearch(self.iterations, self.lr, self.tv, self.restarts, self.keep)
        images, loss, close, iterates = search(seen, layer, aims, rng)

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
