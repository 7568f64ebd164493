"""Deep Leakage from Gradients (DLG): images and labels together, by L-BFGS."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Search
from gradveil.threat import Observation
from gradveil.validate import in_range


@dataclass(frozen=True)
class Dlg(Matching):
    r"""Find images and soft labels whose gradient is the seen one.

    .. math:: \arg\min_{x, y'} \|\nabla L(x, \text{softmax}(y')) - g\|_2^2

    Needs: the number of examples, and after several local steps how clients train. Labels are searched with the images
    even where they are granted.
    Fails: where the network is not twice differentiable (ReLU), on large batches, and often from a bad start: restarts
    help.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Algorithm 1, and the authors' code (L-BFGS with
    rate 1, history 100, 20 inner iterations, 300 steps, both variables from N(0, 1), no box).
    Differs from the paper: the best iterate by the attacker's loss is kept, not the last; updates of several local
    steps are matched as mean gradients.

    Attributes:
        iterations: steps of L-BFGS, of up to 20 inner iterations.
        restarts: searches from different starts, chosen by the loss.
        start: where a search begins: normal, uniform, patterned, grey, public or a picture's path.
        local: how several local steps are played again: unroll, line or once.
        stop_below: a share of a zero guess's loss at which a target counts as found.
        chunk: searches taken together.
        keep: iterates kept for the report, beside the start.
        compile: on, off or auto.
        adapt: which countermove to a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear (WG, CLG and Rep in Soteria's Figure 3).
        lr: L-BFGS's rate.
    """

    iterations: int = 300
    stop_below: float = 1e-9
    lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("lr", self.lr, 0, open_low=True)

    def search(self, seen: Observation) -> Search:
        """L-BFGS without a box."""
        return Search(Objective("l2"), optimiser="lbfgs", lr=self.lr, boxed=False)

    def labels_of(self, seen: Observation) -> Tensor | None:
        """None: soft labels are searched."""
        return None
