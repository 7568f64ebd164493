"""Improved DLG (iDLG): the gradient's sign gives the label, and only the image is searched."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.dlg import Dlg
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.threat import Observation


@dataclass(frozen=True)
class Idlg(Dlg):
    """DLG with labels read off the last layer's gradient.

    Needs: the number of examples and, for several local steps, how clients train. Labels that are not granted are
    recovered (exactly, for one example and non-negative features).
    Fails: like DLG, and if the rule for labels fails (`gradveil.attacks.parts.labels`).
    Reference: Zhao et al. 2020, https://arxiv.org/abs/2001.02610, Eq. 4.
    Differs from the paper: if the last layer has a bias, the bias's gradient gives the label, which is exact for any
    features; labels of batches and of several local steps are counted; keeps the best iterate by the attacker's loss.

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
        parts: as in DLG; the label is always read off the last layer.
        together: whether all tapped rounds of a client are attacked at once.
        lr: as in DLG.
    """

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Return the granted labels, or recovered ones."""
        return known_or_recovered(seen)
