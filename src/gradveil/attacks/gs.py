"""Inverting Gradients (GS): match the direction of the gradient with signed Adam and total variation."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from gradveil.attacks.base import Attack
from gradveil.attacks.matching import Search, match_gradients
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.attacks.parts.objectives import Objective
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Gs(Attack):
    r"""Find images whose gradient points where the seen one points.

    .. math:: \arg\min_{x \in [0,1]} 1 - \frac{\langle \nabla L(x), g \rangle}{\|\nabla L(x)\| \|g\|} + \alpha\,TV(x)

    Needs: the number of examples; labels are recovered from the last layer where they are not granted.
    Fails: on well-trained networks and after several local steps (match updates instead); default-initialised sigmoid
    networks carry too little of the image.
    Reference: Geiping et al. 2020, https://arxiv.org/abs/2003.14053, Eq. 4, and the authors' code (sign of the gradient
    before Adam, rate 0.1 times 0.1 at 3/8, 5/8 and 7/8 of the steps, start N(0, 1) in normalised space).
    Differs from the paper: the best iterate by the attacker's loss is kept, not the last.

    Attributes:
        iterations: steps; the authors' demonstration takes 24,000.
        tv: weight of total variation (mean absolute difference, in normalised units).
        lr: Adam's rate.
        restarts: searches from different starts, chosen by the loss.
        sign: hard (published), soft or none.
        boxed: keep images inside [0, 1].
        chunk: targets taken together.
        keep: iterates kept for the report.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})

    iterations: int = 24_000
    tv: float = 1e-4
    lr: float = 0.1
    restarts: int = 1
    sign: str = "hard"
    boxed: bool = True
    chunk: int = 32
    keep: int = 0

    def __post_init__(self) -> None:
        in_range("iterations", self.iterations, 1)
        in_range("tv", self.tv, 0)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("restarts", self.restarts, 1)
        in_range("chunk", self.chunk, 1)
        in_range("keep", self.keep, 0)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Search all targets side by side."""
        search = Search(
            self.iterations,
            lr=self.lr,
            sign=self.sign,
            boxed=self.boxed,
            tv=self.tv,
            restarts=self.restarts,
            chunk=self.chunk,
            keep=self.keep,
            objective=Objective("cosine"),
        )
        return match_gradients(seen, seen.num_examples, known_or_recovered(seen), search, rng)
