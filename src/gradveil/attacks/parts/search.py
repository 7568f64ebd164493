"""How a search by gradient matching is described: objective, priors, optimiser, and the answer to a known defence.

`gradveil.attacks.matching` has the loop; `gradveil.attacks.parts.search_step` computes the loss.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradveil.attacks.parts.learned_priors import LearnedPrior
from gradveil.attacks.parts.makers import Maker
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.statistics import Statistics
from gradveil.defences.countermove import Countermove
from gradveil.errors import ConfigError

PARTS = ("all", "convolutions", "linear")
"""Which tensors of an update can be matched."""


@dataclass(frozen=True)
class Priors:
    """Weights of the penalties on implausible images, in normalised units; see `gradveil.attacks.parts.priors`.

    Attributes:
        tv: weight of total variation.
        l2: weight of the mean square of the pixels.
        batch_norm: weight of the distance between the guess's BatchNorm statistics and ``statistics``.
        group: weight of the distance between each restart's guess and the mean of the target's restarts.
        statistics: the BatchNorm statistics that a guess should have.
        learned: a penalty (N,) on images (N, C, H, W) in [0, 1], or None; see `gradveil.attacks.parts.learned_priors`.
    """

    tv: float = 0.0
    l2: float = 0.0
    batch_norm: float = 0.0
    group: float = 0.0
    statistics: Statistics = field(default_factory=dict)
    learned: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Search:
    """How guesses are searched; the attacks have the published settings.

    Attributes:
        objective: the distance between a guess's update and the one seen.
        priors: penalties on the guess itself.
        optimiser: adam, lbfgs, rmsprop or cma.
        lr: learning rate; for cma the initial standard deviation.
        schedule: schedule of the learning rate: constant, steps or cosine (adam, rmsprop).
        sign: how adam's gradient is transformed first: none, hard or soft.
        noise: standard deviation of the noise added to each step of adam, as a multiple of the learning rate.
        boxed: whether guesses are kept inside [0, 1].
        move: the countermove to a defence that the attacker knows.
        first: a search that runs before this one, for as many steps; this one starts from its best guesses.
        residual: the distance that the true images are expected to have, because of noise.
        maker: makes images from the searched numbers; None searches pixels.
        population: candidates per step (cma).
        learn: returns the priors with which a search under known noise proceeds, in place of total variation; None
            learns none.
    """

    objective: Objective = field(default_factory=Objective)
    priors: Priors = field(default_factory=Priors)
    optimiser: str = "adam"
    lr: float = 0.1
    schedule: str = "steps"
    sign: str = "hard"
    noise: float = 0.0
    boxed: bool = True
    move: Countermove = field(default_factory=Countermove)
    first: "Search | None" = None
    residual: float = 0.0
    maker: Maker | None = None
    population: int = 1
    learn: Callable[[], Sequence[LearnedPrior]] | None = None

    @property
    def phases(self) -> "list[Search]":
        """The searches to run one after the other; this one is the last."""
        return [self] if self.first is None else [*self.first.phases, self]


def restricted(search: Search, parts: str, network: nn.Module, names: Iterable[str]) -> Search:
    """Return the search that matches only the tensors of some layers, in all its phases.

    Args:
        search: the search for all tensors; a tensor that it leaves out stays out.
        parts: one of `PARTS`; ``convolutions`` and ``linear`` select the weights and biases of these layers.
        network: the network that has the layers.
        names: the names of all tensors in the update.
    """
    if parts == "all":
        return search
    kind = nn.Linear if parts == "linear" else _ConvNd
    kept = {
        f"{name}.{key}" if name else key
        for name, layer in network.named_modules()
        if isinstance(layer, kind)
        for key, _ in layer.named_parameters(recurse=False)
    }
    return _keeping(search, kept, parts, list(names))


def _keeping(search: Search, kept: Container[str], parts: str, names: Sequence[str]) -> Search:
    weights = {name: search.objective.weights.get(name, 1.0) if name in kept else 0.0 for name in names}
    if not any(weights.values()):
        raise ConfigError(f"parts={parts} must leave some tensor to match, got none in this network. Use parts=all.")
    first = None if search.first is None else _keeping(search.first, kept, parts, names)
    everything = {**search.objective.weights, **weights}  # entries that a countermove adds beside the tensors stay
    return replace(search, objective=replace(search.objective, weights=everything), first=first)
