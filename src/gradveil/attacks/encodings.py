"""Encodings: the result of a perfect gradient inversion, granted to the attacker."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradveil.attacks.base import Attack
from gradveil.threat import Knowledge, Observation, Reconstruction


@dataclass(frozen=True)
class Encodings(Attack):
    """Take the images as the network saw them; if the defence is known, they are then decoded.

    Measures how well a defence hides images, independently of gradient inversion: without knowledge of the defence, how
    far encoded images are from private ones; with it, how much its decoder recovers.

    Needs: the encodings, and the number of examples.
    Fails: never. It is not an attack that a server could run, but a bound on those that it could.
    Reference: Carlini et al. 2020, https://arxiv.org/abs/2011.05315, whose attack on InstaHide is given encodings.
    Differs from the paper: nothing.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.ENCODINGS, Knowledge.NUM_EXAMPLES})

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return the encodings unchanged."""
        shown, targets = seen.encodings, seen.num_targets
        labels = shown.labels if shown.labels.dim() == 1 else shown.labels.argmax(1)
        loss = torch.zeros(targets, device=shown.images.device)
        images = shown.images.clamp(0, 1).view(targets, -1, *seen.shape)
        return Reconstruction(images, labels.view(targets, -1), loss, loss == 0)
