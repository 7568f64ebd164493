"""Inverting Gradients (GS): match the direction of the gradient with signed Adam and total variation."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.attacks.parts.learned_priors import LEARNED, learned_priors
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import SCHEDULES, SIGNS
from gradveil.attacks.parts.search import Priors, Search
from gradveil.threat import Knowledge, Observation
from gradveil.validate import in_range, one_of

SMOOTH = "smooth"


@dataclass(frozen=True)
class Gs(Matching):
    r"""Find images whose gradient points in the direction of the one seen.

    .. math:: \arg\min_{x \in [0,1]} 1 - \frac{\langle \nabla L(x), g \rangle}{\|\nabla L(x)\| \|g\|} + \alpha\,TV(x)

    Needs: the number of examples and, for several local steps, how clients train; public data for
    ``prior=normal|denoiser``. Labels that are not granted are recovered from the last layer.
    Fails: on well-trained networks, and on sigmoid networks with default initialisation, whose gradients carry too
    little of the image.
    Reference: Geiping et al. 2020, https://arxiv.org/abs/2003.14053, Eq. 4, and the authors' code (sign of the gradient
    before Adam, learning rate 0.1, times 0.1 after 3/8, 5/8 and 7/8 of the steps, start N(0, 1) in normalised space).
    DCS2's experiments take ``sign=none,boxed=false,iterations=10000``.
    Differs from the paper: keeps the best iterate by the attacker's loss, not the last; recovers the labels of several
    local steps, which the paper grants; ``prior`` is not in the paper: under known noise it adds to the likelihood a
    penalty learned from public images (after plug-and-play priors, https://arxiv.org/abs/2008.13751).

    Attributes:
        iterations: steps of Adam; the authors' demonstration takes 24,000.
        restarts: searches from different starts; the one with the least loss is kept.
        start: where a search begins: normal, uniform, patterned, grey, class-average, public, lti
            (the guess of learned inversion) or the path of a picture.
        local: how several local steps are simulated: unroll, line or once.
        stop_below: a target is done when its loss is below this share of a zero guess's loss.
        chunk: searches evaluated at once.
        keep: iterates kept for the report, in addition to the start.
        compile: on, off or auto.
        adapt: which countermove to play against a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear.
        together: whether all tapped rounds of a client are attacked at once.
        tv: weight of total variation (mean absolute difference, in normalised units).
        lr: Adam's learning rate.
        schedule: schedule of the learning rate: steps (published), cosine or constant.
        sign: how the gradient is transformed before Adam: hard (its sign, published), soft or none.
        boxed: whether images are kept inside [0, 1].
        prior: what is known about images if an update has noise of known strength: smooth (neighbouring pixels are
            alike), normal (the mean and the covariance of public images) or denoiser (a small network trained on
            public images, which takes about a minute).
    """

    iterations: int = 24_000
    tv: float = 1e-4
    lr: float = 0.1
    schedule: str = "steps"
    sign: str = "hard"
    boxed: bool = True
    prior: str = SMOOTH

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("tv", self.tv, 0)
        in_range("lr", self.lr, 0, open_low=True)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("sign", self.sign, SIGNS)
        one_of("prior", self.prior, [SMOOTH, *LEARNED])
        if self.prior != SMOOTH:
            object.__setattr__(self, "needs", self.needs | {Knowledge.PUBLIC_DATA})

    def search(self, seen: Observation) -> Search:
        """Return a search by Adam on the cosine distance."""
        return Search(
            Objective("cosine"),
            Priors(tv=self.tv),
            lr=self.lr,
            schedule=self.schedule,
            sign=self.sign,
            boxed=self.boxed,
            learn=None if self.prior == SMOOTH else lambda: learned_priors(self.prior, _public(seen)),
        )

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Return the granted labels, or recovered ones."""
        return known_or_recovered(seen)


def _public(seen: Observation) -> Tensor:
    return seen.public_data.images.to(next(iter(seen.updates.values())))
