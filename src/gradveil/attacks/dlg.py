"""Deep Leakage from Gradients (DLG): images and labels together, by L-BFGS."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradveil.attacks.base import Attack
from gradveil.attacks.matching import Search, match_gradients
from gradveil.attacks.parts.objectives import Objective
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Dlg(Attack):
    r"""Find images and soft labels whose gradient is the seen one.

    .. math:: \arg\min_{x, y'} \|\nabla L(x, \text{softmax}(y')) - g\|_2^2

    Needs: the number of examples. Labels are searched with the images even where they are granted.
    Fails: where the network is not twice differentiable (ReLU), on large batches, and often from a bad start: restarts
    help.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Algorithm 1, and the authors' code (L-BFGS with
    rate 1, history 100, 20 inner iterations, 300 steps, both variables from N(0, 1), no box).
    Differs from the paper: the best iterate by the attacker's loss is kept, not the last.

    Attributes:
        iterations: steps of L-BFGS, of up to 20 inner iterations.
        lr: L-BFGS's rate.
        restarts: searches from different starts, chosen by the loss.
        stop_below: a loss at which a target counts as found.
        chunk: targets taken together.
        keep: iterates kept for the report.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})

    iterations: int = 300
    lr: float = 1.0
    restarts: int = 1
    stop_below: float = 1e-6
    chunk: int = 32
    keep: int = 0

    def __post_init__(self) -> None:
        in_range("iterations", self.iterations, 1)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("restarts", self.restarts, 1)
        in_range("stop_below", self.stop_below, 0)
        in_range("chunk", self.chunk, 1)
        in_range("keep", self.keep, 0)

    def search(self) -> Search:
        """The search that these settings describe."""
        return Search(
            self.iterations,
            optimiser="lbfgs",
            lr=self.lr,
            boxed=False,
            restarts=self.restarts,
            stop_below=self.stop_below,
            chunk=self.chunk,
            keep=self.keep,
            objective=Objective("l2"),
        )

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Search all targets side by side."""
        return match_gradients(seen, seen.num_examples, None, self.search(), rng)
