"""Deep Leakage from Gradients (DLG): search images and labels together by L-BFGS."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Search
from gradveil.threat import Observation
from gradveil.validate import in_range


@dataclass(frozen=True)
class Dlg(Matching):
    r"""Find images and soft labels whose gradient equals the one seen.

    .. math:: \arg\min_{x, y'} \|\nabla L(x, \text{softmax}(y')) - g\|_2^2

    Needs: the number of examples and, for several local steps, how clients train. Labels are searched with the images
    even if they are granted.
    Fails: on networks that are not twice differentiable (ReLU), on large batches, and often from a bad start: restarts
    help.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Algorithm 1, and the authors' code (L-BFGS with
    learning rate 1, history 100, 20 inner iterations, 300 steps, both variables from N(0, 1), no box).
    Differs from the paper: keeps the best iterate by the attacker's loss, not the last; matches updates of several
    local steps as mean gradients.

    Attributes:
        iterations: steps of L-BFGS, of up to 20 inner iterations.
        restarts: searches from different starts; the one with the least loss is kept.
        start: where a search begins: normal, uniform, patterned, grey, public or the path of a picture.
        local: how several local steps are simulated: unroll, line or once.
        stop_below: a target is done when its loss is below this share of a zero guess's loss.
        chunk: searches evaluated at once.
        keep: iterates kept for the report, in addition to the start.
        compile: on, off or auto.
        adapt: which countermove to play against a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear (WG, CLG and Rep in Soteria's Figure 3).
        together: whether all tapped rounds of a client are attacked at once.
        lr: L-BFGS's learning rate.
    """

    iterations: int = 300
    stop_below: float = 1e-9
    lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("lr", self.lr, 0, open_low=True)

    def search(self, seen: Observation) -> Search:
        """Return a search by L-BFGS without a box."""
        return Search(Objective("l2"), optimiser="lbfgs", lr=self.lr, boxed=False)

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Return None: soft labels are searched."""
        return None
