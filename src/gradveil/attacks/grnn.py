"""GRNN: train a generator per target until its image and label have the gradient that was seen."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.fresh_generators import FreshGenerators
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import SCHEDULES
from gradveil.attacks.parts.search import Search
from gradveil.errors import ConfigError
from gradveil.threat import Observation
from gradveil.validate import in_range, one_of

DISTANCES = {"norm": "l2+norm", "sliced": "l2+sliced", "none": "l2"}


@dataclass(frozen=True)
class Grnn(Matching):
    r"""Search the weights of an untrained generator whose image and label have the gradient that was seen.

    .. math:: \arg\min_\theta \|\hat g - g\|_2^2 + W(\hat g, g) + \lambda\,TV(\hat x), \quad
        (\hat x, \hat y) = G_\theta(z), \; \hat g = \nabla L(\hat x, \hat y)

    with a fixed noise vector z. The generator is not trained on any images; its convolutions favour smooth images over
    noise. The generators of all targets are searched in parallel.

    Needs: the number of examples and, for several local steps, how clients train. Labels are searched with the images
    even if they are granted.
    Fails: if the gradient carries little of the image, as for all gradient matching; on large batches.
    Reference: Ren et al. 2022, https://arxiv.org/abs/2105.00529, Eqs. 4-8, and the authors' code (z of 128 numbers, 32
    channels, RMSprop with learning rate 1e-4 and momentum 0.99, TV 1e-3 for LeNet and 1e-6 for ResNet, 1,000
    iterations; FedKL's experiments take ``noise=1024,tv=1e-6,iterations=20000``). Its LeNet is
    ``lenet5:activation=sigmoid,init=uniform``.
    Differs from the paper: each image of a batch has its own generator, where one generator of the authors makes all
    of them, from one noise vector each; images have the channels and size of the data, cropped from the next power of
    two, where theirs are 32 x 32 in colour; z is the same in all runs, only the initial weights differ; keeps the best
    iterate by the attacker's loss, not the last. What the authors' code calls a Wasserstein distance is the norm of the
    difference, which is the default here; a true one, over sorted projections, is ``wasserstein=sliced``.

    Attributes:
        iterations: steps of RMSprop.
        restarts: searches from different weights; the one with the least loss is kept.
        start: normal only; a generator begins with random weights.
        local: how several local steps are simulated: unroll, line or once.
        stop_below: a target is done when its loss is below this share of a zero guess's loss.
        chunk: searches evaluated at once.
        keep: iterates kept for the report, in addition to the start.
        compile: on, off or auto.
        adapt: which countermove to play against a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear.
        together: whether all tapped rounds of a client are attacked at once.
        wasserstein: norm (published), sliced, or none.
        tv: half the weight of the mean squared difference of neighbouring pixels, as in the authors' code.
        lr: RMSprop's learning rate.
        schedule: schedule of the learning rate: constant (published), steps or cosine.
        noise: length of z.
        width: channels of the generator's last hidden layer.
    """

    iterations: int = 2000
    chunk: int = 8
    compile: str = "off"
    wasserstein: str = "norm"
    tv: float = 1e-3
    lr: float = 1e-4
    schedule: str = "constant"
    noise: int = 128
    width: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "normal":
            raise ConfigError(
                f"start of grnn must be normal: it starts from random weights, got {self.start}. Use start=normal."
            )
        one_of("wasserstein", self.wasserstein, DISTANCES)
        in_range("tv", self.tv, 0)
        in_range("lr", self.lr, 0, open_low=True)
        one_of("schedule", self.schedule, SCHEDULES)
        in_range("noise", self.noise, 1)
        in_range("width", self.width, 1)

    def search(self, seen: Observation) -> Search:
        """Return a search by RMSprop for the weights of one generator per image."""
        return Search(
            Objective(DISTANCES[self.wasserstein]),
            optimiser="rmsprop",
            lr=self.lr,
            schedule=self.schedule,
            boxed=False,
            maker=FreshGenerators(seen.shape, seen.num_examples, noise=self.noise, width=self.width, roughness=self.tv),
        )

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Return None: soft labels are searched."""
        return None
