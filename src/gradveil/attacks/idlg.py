"""Improved DLG: the label comes from the gradient's sign, and only the image is searched."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.dlg import Dlg
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.threat import Observation


@dataclass(frozen=True)
class Idlg(Dlg):
    """DLG with labels read off the last layer's gradient.

    Needs: the number of examples, and after several local steps how clients train; labels are recovered where they are
    not granted (exactly so for one example and non-negative features).
    Fails: as DLG, and where the label rule fails (`gradveil.attacks.parts.labels`).
    Reference: Zhao et al. 2020, https://arxiv.org/abs/2001.02610, Eq. 4.
    Differs from the paper: where the last layer has a bias its gradient gives the label, which is exact for any
    features; batches and several local steps take counted labels; the best iterate by the attacker's loss is kept.

    Attributes:
        iterations: as in DLG.
        restarts: as in DLG.
        start: as in DLG; also class-average.
        local: as in DLG.
        stop_below: as in DLG.
        chunk: as in DLG.
        keep: as in DLG.
        compile: as in DLG.
        adapt: as in DLG.
        parts: as in DLG; the label is read off the last layer all the same.
        lr: as in DLG.
    """

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Those granted, or recovered ones."""
        return known_or_recovered(seen)
