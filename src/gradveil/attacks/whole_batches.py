"""Attacks that factor the gradient of a Linear layer into the images of a whole batch."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.analytic import nothing, outside
from gradveil.attacks.parts.attacked_layer import AttackedLayer, attacked_layer
from gradveil.attacks.parts.exact_batches import Factors, factors
from gradveil.attacks.parts.undoing import COMPLETED, Undone, completed_weight, concealed, undone_rows
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction

WITHOUT = "concealed samples found too, and left out"
_ENLARGED = 100.0
"""Factor by which completing a gradient enlarges the errors of its entries, at most; chosen on drawn leaves."""


class Layers(NamedTuple):
    """What is known of the attacked layer's gradient.

    Attributes:
        entry: the layer.
        gradients: (T, m, D + 1), in double precision, the bias as last column.
        later: (T) gradient of the next Linear layer's weight, or None if it can't be used.
        images: images behind an update, or None if that is not known.
        parts: images and concealed samples behind an update, or None.
        errors: (T) how much larger errors may be than what the rank of a gradient leaves: completed entries repeat
            the errors of others, enlarged, and stay within the rank.
    """

    entry: AttackedLayer
    gradients: Tensor
    later: list[Tensor | None]
    images: int | None
    parts: int | None
    errors: list[float]

    def factors(self, target: int) -> Factors:
        """Return the parts of a target's gradient that stand out from noise."""
        found = factors(self.gradients[target], self.parts)
        return found._replace(noise=found.noise * self.errors[target])

    @property
    def conceals(self) -> bool:
        """Whether a known defence hides samples beside the images."""
        return self.parts != self.images

    def pictures(self, inputs: Tensor, space: Space) -> Tensor:
        """Return which inputs (k, D) leave the range of pixels least, as many as there are images, best first.

        Concealed samples are far outside.
        """
        pixels = space.to_pixels(inputs.view(-1, *space.shape)).flatten(1)
        return outside(pixels).argsort()[: self.images]


@dataclass(frozen=True)
class WholeBatches(Attack):
    """Base of attacks that recover all images of a batch from one Linear layer. A subclass implements `recover`.

    Knowing the defence, the attacker completes removed entries and searches concealed samples together with the
    images. Everything else that it may know adds nothing, and rows say so.
    """

    adapts: ClassVar[bool] = True

    def too_large(self, images: int, local_steps: int) -> str:
        """Return that several local steps are out of reach, or ""."""
        return f"needs the gradient of a single step, got {local_steps:,} local steps" if local_steps > 1 else ""

    @abstractmethod
    def unfit(self, network: nn.Module, shape: tuple[int, int, int], images: int | None) -> str:
        """Return why batches behind this network are out of reach, or ""."""

    def out_of_reach(self, network: nn.Module, shape: tuple[int, int, int], images: int, local_steps: int) -> str:
        """Return why the updates have too many local steps, or the layer does not fit them, or ""."""
        unfit = self.unfit(network, shape, images).rstrip(".")
        return self.too_large(images, local_steps) or (f"does not fit: {unfit}" if unfit else "")

    @abstractmethod
    def recover(self, seen: Observation, known: Layers, rng: torch.Generator) -> Reconstruction:
        """Recover each target's batch from the layer's gradient."""

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Recover each target's batch; targets out of reach have no guess, and ``why`` says so."""
        count = seen.num_examples if seen.knows(Knowledge.NUM_EXAMPLES) else None
        reason = self.unfit(seen.network, seen.shape, count)
        if not seen.single_step:
            reason = "needs the gradient of a single step, got several local steps"
        if reason:
            return nothing(seen, count or 1, reason)
        entry = attacked_layer(seen.network, seen.shape)
        undone, parts = _undone(seen, entry, count)
        later = completed_weight(seen, f"{entry.after}.weight", None if parts != count else count)
        known = Layers(
            entry,
            -torch.cat([undone.rows.weight, undone.rows.bias[..., None]], 2),
            [None] * seen.num_targets if later is None else list(-later),
            count,
            parts,
            [_ENLARGED if answer == COMPLETED else 1.0 for answer in undone.answers],
        )
        return undone.told(self.recover(seen, known, rng))


def _undone(seen: Observation, entry: AttackedLayer, count: int | None) -> tuple[Undone, int | None]:
    """Return the layer's changes without what a known defence did, and the number of images and concealed samples."""
    width, hidden = len(entry.layer.bias), concealed(seen)
    whole = None if count is None else count + math.ceil(count * hidden)
    if whole is None or whole == count or whole >= width:
        return undone_rows(seen, entry.name, count, truncates=True), count
    plain, nobody = undone_rows(seen, entry.name, None).rows, ("",) * seen.num_targets
    return Undone(plain, (WITHOUT,) * seen.num_targets, nobody), whole
