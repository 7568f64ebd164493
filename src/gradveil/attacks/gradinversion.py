"""GradInversion: rebuild batches with BatchNorm statistics as a prior, by several searches that agree on a mean."""

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
    r"""Match the gradient of a batch with BatchNorm statistics as a prior; several seeds are pulled to their mean.

    .. math:: \arg\min_{x} \alpha_G \|\nabla L(x, \hat y) - g\|_2^2 + R_{TV} + R_{l2} + R_{BN} + R_{group}

    Needs: the number of examples and, for several local steps, how clients train. Labels that are not granted are
    recovered from the least entry of each class's row. BatchNorm statistics are those granted, those that the client's
    running statistics reveal, or the network's own.
    Fails: for repeated labels with ``labels=distinct``; networks without BatchNorm lack the prior; the group term only
    helps if the seeds show the image in the same position.
    Reference: Yin et al. 2021, https://arxiv.org/abs/2104.07586, Eqs. 1-12 and section 4 (Adam with a cosine schedule
    after 50 steps of warm-up, 20,000 steps, noise in every step).
    Differs from the paper: the consensus image is the pixel-wise mean of the seeds (the paper registers them first by
    RANSAC flow); the seed with the least total loss is kept; the distance is relative to the update's size,
    :math:`\|\nabla L - g\|^2 / \|g\|^2`, and priors are means over pixels, so that the weights depend neither on the
    model nor on the image size; they are therefore not the paper's.

    Attributes:
        iterations: steps of Adam.
        restarts: the seeds of the group.
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
        labels: distinct (published), or counted for batches with repeated labels.
        lr: Adam's learning rate.
        tv: weight of total variation.
        l2: weight of the mean square of the pixels.
        batch_norm: weight of the distance between BatchNorm statistics.
        group: weight of the distance from the mean of the seeds.
        noise: standard deviation of the noise in each step, as a multiple of the learning rate.
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
        """Return a search by Adam on the relative squared distance, with all priors."""
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
        """Return the granted labels, or recover them by the published rule or by counting."""
        if seen.knows(Knowledge.LABELS) or self.labels == "counted" or seen.num_examples > seen.num_classes:
            return known_or_recovered(seen)
        return distinct(last_layer(seen, seen.mean_gradients)[0], seen.num_examples)
