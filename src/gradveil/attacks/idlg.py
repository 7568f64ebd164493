"""Improved DLG: the label comes from the gradient's sign, and only the image is searched."""

from dataclasses import dataclass

import torch

from gradveil.attacks.dlg import Dlg
from gradveil.attacks.matching import match_gradients
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.threat import Observation, Reconstruction


@dataclass(frozen=True)
class Idlg(Dlg):
    """DLG with labels read off the last layer's gradient.

    Needs: the number of examples; labels are recovered where they are not granted (exactly so for one example and
    non-negative features).
    Fails: as DLG, and where the label rule fails (`gradveil.attacks.parts.labels`).
    Reference: Zhao et al. 2020, https://arxiv.org/abs/2001.02610, Eq. 4.
    Differs from the paper: batches take counted labels; the best iterate by the attacker's loss is kept.

    Attributes:
        iterations: as in DLG.
        lr: as in DLG.
        restarts: as in DLG.
        stop_below: as in DLG.
        chunk: as in DLG.
        keep: as in DLG.
    """

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Search all targets side by side, with their labels fixed."""
        return match_gradients(seen, seen.num_examples, known_or_recovered(seen), self.search(), rng)
