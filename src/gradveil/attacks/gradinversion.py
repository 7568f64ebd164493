"""GradInversion: batches with BatchNorm's statistics as a prior, and several searches that hold each other."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.labels import distinct, known_or_recovered, last_layer
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Priors, Search
from gradveil.attacks.parts.statistics import likely_statistics
from gradveil.threat import Knowledge, Observation
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Gradinversion(Matching):
    r"""Match gradients of a batch under a prior of BatchNorm statistics; several seeds are drawn to their mean.

    .. math:: \arg\min_{x} \alpha_G \|\nabla L(x, \hat y) - g\|_2^2 + R_{TV} + R_{l2} + R_{BN} + R_{group}

    Needs: the number of examples, and after several local steps how clients train. Labels are recovered by the least
    entry of each class's row where they are not granted. BatchNorm's statistics are those granted, those that sent
    running statistics give away, or the network's own.
    Fails: where labels repeat and ``labels=distinct`` is kept; without BatchNorm the prior is gone; the group holds
    only pictures that are in the same place.
    Reference: Yin et al. 2021, https://arxiv.org/abs/2104.07586, Eqs. 1-12 and section 4 (Adam with a cosine schedule
    after 50 steps of warm-up, 20,000 steps, noise in every step).
    Differs from the paper: the consensus image is the pixel-wise mean of the seeds (theirs are first registered by
    RANSAC flow); the least total loss decides among seeds; the update's distance is relative to its size,
    :math:`\|\nabla L - g\|^2 / \|g\|^2`, and priors are means over pixels, so that weights, which hence are not
    theirs, depend neither on the model nor on the picture's size.

    Attributes:
        iterations: steps of Adam.
        restarts: the seeds of the group.
        start: where a search begins: normal, uniform, patterned, grey, class-average, public or a picture's path.
        local: how several local steps are played again: unroll, line or once.
        stop_below: a share of a zero guess's loss at which a target counts as found.
        chunk: searches taken together.
        keep: iterates kept for the report, beside the start.
        compile: on, off or auto.
        adapt: which countermove to a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear.
        labels: distinct (published), or counted for batches in which labels repeat.
        lr: Adam's rate.
        tv: weight of total variation.
        l2: weight of the mean square.
        batch_norm: weight of the statistics' distance.
        group: weight of the distance to the seeds' mean.
        noise: standard deviation of each step's noise, times the rate.
    """

    iterations: int = 20_000
    restarts: int = 4
    labels: str = "distinct"
    lr: float = 0.1
    tv: float = 1e-4
    l2: float = 1e-6
    batch_norm: float = 0.1
    group: float = 0.01
    noise: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("labels", self.labels, ["distinct", "counted"])
        in_range("lr", self.lr, 0, open_low=True)
        for name in ("tv", "l2", "batch_norm", "group", "noise"):
            in_range(name, getattr(self, name), 0)

    def search(self, seen: Observation) -> Search:
        """Adam on the relative squared distance, with all priors."""
        statistics = likely_statistics(seen) if self.batch_norm else {}
        return Search(
            Objective("l2", relative=True),
            Priors(self.tv, self.l2, self.batch_norm, self.group, statistics),
            lr=self.lr,
            schedule="cosine",
            sign="none",
            noise=self.noise,
            boxed=True,
        )

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Those granted, or recovered ones by the published rule or by counting."""
        if seen.knows(Knowledge.LABELS) or self.labels == "counted" or seen.num_examples > seen.num_classes:
            return known_or_recovered(seen)
        return distinct(last_layer(seen, seen.mean_gradients)[0], seen.num_examples)
