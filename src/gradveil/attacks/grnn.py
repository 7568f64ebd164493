"""GRNN: train a generator for each target whose image and label give the gradient that was seen."""

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
    r"""Search the weights of an untrained generator whose image and label have the seen gradient.

    .. math:: \arg\min_\theta \|\hat g - g\|_2^2 + W(\hat g, g) + \lambda\,TV(\hat x), \quad
        (\hat x, \hat y) = G_\theta(z), \; \hat g = \nabla L(\hat x, \hat y)

    with a noise vector z that stays as it is. The generator is no prior that was learned anywhere; its convolutions
    make smooth images easy and noise hard. All targets' generators are searched side by side.

    Needs: the number of examples, and after several local steps how clients train. Labels are searched with the images
    even where they are granted.
    Fails: where the gradient says little of the image, as other matching does; on large batches.
    Reference: Ren et al. 2022, https://arxiv.org/abs/2105.00529, Eqs. 4-8, and the authors' code (z of 128 numbers, 32
    channels, RMSprop with rate 1e-4 and momentum 0.99, TV 1e-3 for LeNet and 1e-6 for ResNet, 1,000 iterations; FedKL's
    experiments take ``noise=1024,tv=1e-6,iterations=20000``). Its LeNet is ``lenet5:activation=sigmoid,init=uniform``.
    Differs from the paper: each image of a batch has a generator of its own, where the authors' makes all of them from
    as many noise vectors; images have the channels and the size of the data, cut from the next power of two, where
    theirs are 32 x 32 in colour; z is the same in all runs, as the weights behind it are not; the best iterate by the
    attacker's loss is kept, not the last. What the authors' code calls a Wasserstein distance is the norm of the
    difference, and the default here; a true one, over sorted projections, is ``wasserstein=sliced``.

    Attributes:
        iterations: steps of RMSprop.
        restarts: searches from different weights, chosen by the loss.
        start: normal only; a generator begins with random weights.
        local: how several local steps are played again: unroll, line or once.
        stop_below: a share of a zero guess's loss at which a target counts as found.
        chunk: searches taken together.
        keep: iterates kept for the report, beside the start.
        compile: on, off or auto.
        adapt: which countermove to a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear.
        wasserstein: norm (published), sliced, or none.
        tv: weight of the mean square difference of neighbouring pixels, twice.
        lr: RMSprop's rate.
        schedule: of the rate: constant (published), steps or cosine.
        noise: length of z.
        width: channels of the generator's last hidden map.
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
            raise ConfigError(f"start of grnn must be normal, as its generators' weights are random, got {self.start}.")
        one_of("wasserstein", self.wasserstein, DISTANCES)
        in_range("tv", self.tv, 0)
        in_range("lr", self.lr, 0, open_low=True)
        one_of("schedule", self.schedule, SCHEDULES)
        in_range("noise", self.noise, 1)
        in_range("width", self.width, 1)

    def search(self, seen: Observation) -> Search:
        """RMSprop on the weights of a generator for each image."""
        return Search(
            Objective(DISTANCES[self.wasserstein]),
            optimiser="rmsprop",
            lr=self.lr,
            schedule=self.schedule,
            boxed=False,
            maker=FreshGenerators(seen.shape, seen.num_examples, noise=self.noise, width=self.width, roughness=self.tv),
        )

    def labels_of(self, seen: Observation) -> Tensor | None:
        """None: soft labels are searched."""
        return None
