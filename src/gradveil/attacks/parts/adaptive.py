"""An attacker who knows the defence: its search is adapted to what the defence leaves."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from gradveil.attacks.parts.countermoves import countermove, countermoves
from gradveil.attacks.parts.learned_priors import LearnedPrior
from gradveil.attacks.parts.search import Priors, Search
from gradveil.attacks.parts.separation import KEEP, OWN, PROJECT, Told, projected, stacked, told_apart
from gradveil.defences.countermove import Countermove
from gradveil.models.base import normalisation_of
from gradveil.threat import Observation
from gradveil.types import Tensors

ROUGHNESS = 0.2
"""Expected scale of the differences of neighbouring pixels in [0, 1].

Three times the mean of MNIST (0.067) and CIFAR-10 (0.057): with the mean itself, the likeliest picture is too smooth.
"""


class Answer(NamedTuple):
    """The countermove played against some targets, with its name, or None."""

    name: str
    targets: list[int]
    move: Countermove | None
    separates: bool = False


def answers(seen: Observation, choice: str = "") -> list[Answer]:
    """Return which countermove to play against which targets: the named one ("" is the first), or none for ``none``.

    If the countermove first separates decoys, targets for which that fails are searched with their decoys (``joint``).
    """
    everyone = list(range(seen.num_targets))
    move = countermove(seen, choice)
    if move is None:
        return [Answer("", everyone, None)]
    name = choice or next(iter(countermoves(seen)))
    if not move.separate:
        return [Answer(name, everyone, move)]
    gradients = seen.mean_gradients if move.look is None else move.look(seen.mean_gradients)
    told = dict(enumerate(told_apart(seen, gradients, move.own_label, spares=move.decoys < 1, gaps=move.zeroes)))
    apart = {target: each for target, each in told.items() if each is not None}
    own = partial(_with_own, move) if move.zeroes else _separating
    found = [Answer(name, list(apart), own(gradients, apart), separates=True)] if apart else []
    rest = [target for target in everyone if target not in apart]
    return [*found, Answer("joint", rest, replace(move, separate=False))] if rest else found


def turned(search: Search, seen: Observation, move: Countermove | None) -> Search:
    r"""Return the search adapted to a countermove, or the search itself if ``move`` is None.

    Under noise of standard deviation :math:`\sigma_l` the likeliest picture has the least

    .. math:: \sum_l \frac{\|g_l - \hat g_l\|_2^2}{2 \sigma_l^2} + \frac{1}{b} \sum_{ij} |x_i - x_j|

    (an absolute value times :math:`\sqrt 2 / \sigma_l` for Laplace noise), assuming that neighbouring pixels differ by
    Laplace noise of scale b, `ROUGHNESS`; both terms are divided by the number of pixels. A generator that was trained
    on images replaces the second term. A search from noise would often end where all gradients vanish, so this one
    starts from the result of a search with the attack's own distance. If the search learns priors from public images,
    each of them replaces the second term in turn, and the first of them finds the start.

    Args:
        search: the attack's own search.
        seen: what the server saw.
        move: the countermove.
    """
    if move is None:
        return search
    objective = replace(search.objective, kind=move.distance or search.objective.kind, weights=move.weights)
    if not move.noise:
        own = replace(search, objective=replace(search.objective, weights=move.weights), move=replace(move, sent=None))
        first = own if move.distance and move.distance != search.objective.kind and move.distance != "cosine" else None
        return replace(search, objective=objective, move=move, first=first)
    pixels = seen.num_examples * math.prod(seen.shape)
    weights = {
        name: move.weights.get(name, 1.0) * (math.sqrt(2) / std if objective.kind == "l1" else 0.5 / std**2) / pixels
        for name, std in move.noise.items()
    }
    likeliest = replace(
        search,
        objective=replace(objective, weights=weights, relative=False),
        residual=sum(
            weight
            * _numel(seen, name)
            * (move.noise[name] / math.sqrt(2) if objective.kind == "l1" else move.noise[name] ** 2)
            for name, weight in weights.items()
        ),
        priors=_smooth(search, seen),
        move=move,
        first=replace(search, move=move, objective=replace(search.objective, weights=move.weights)),
    )
    return likeliest if search.learn is None else _learned(likeliest, search.learn(), _spread(seen))


def _learned(search: Search, priors: Sequence[LearnedPrior], spread: float) -> Search:
    """Return a search with each of the priors in turn; ``spread`` is what pixels are normalised by."""
    found = None
    for prior in priors:
        alone = replace(search.priors, tv=0.0, learned=prior.penalty)
        found = replace(
            search,
            priors=alone,
            first=found,
            optimiser="adam",
            sign="none",
            schedule="constant",
            lr=prior.rate / spread,
        )
    return search if found is None else found


def _smooth(search: Search, seen: Observation) -> Priors:
    if search.maker is not None and search.maker.knows_images:
        return search.priors
    return replace(search.priors, tv=max(search.priors.tv, _spread(seen) / ROUGHNESS))


def _separating(gradients: Tensors, told: Mapping[int, Told]) -> Countermove:
    """Return the countermove that compares the separated gradients of these targets."""
    found = stacked({name: tensor[list(told)] for name, tensor in gradients.items()}, list(told.values()))
    sizes = {name: float(tensor.flatten(1).square().sum(1).mean()) for name, tensor in found.items()}
    counts = {name: size > 0 and not name.startswith((KEEP, PROJECT)) for name, size in sizes.items()}
    weights = {name: 1 / size if counts[name] else 0.0 for name, size in sizes.items()}  # all tensors have equal weight
    return Countermove(projected, weights=weights, look=lambda _: found)


def _with_own(move: Countermove, gradients: Tensors, told: Mapping[int, Told]) -> Countermove:
    """Return the countermove that searches decoys too, and compares what is left of the sum and what was separated."""
    mine = {name: tensor[list(told)] for name, tensor in gradients.items()}
    found = stacked(mine, list(told.values()))
    names = [name for name in mine if bool(found[KEEP + name].any())]
    own = {OWN + name: found[name] for name in names}
    keeps = {OWN + name: found[KEEP + name] for name in names}

    def sent(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
        apart = {name: guess[name] * seen[KEEP + name] for name in own}
        whole = {name: guess[name] for name in mine}
        left = whole if move.sent is None else move.sent(whole, {name: seen[name] for name in mine})
        return {**left, **apart, **{name: seen[name] for name in beside}}

    beside = {KEEP + name: keep for name, keep in keeps.items()}
    wanted = {**mine, **own, **beside}
    return replace(move, sent=sent, look=lambda _: wanted, weights=dict.fromkeys(beside, 0.0), separate=False)


def _numel(seen: Observation, name: str) -> int:
    return seen.updates[name][0].numel()


def _spread(seen: Observation) -> float:
    """Return the standard deviation that pixels are normalised by; priors are in normalised units."""
    normalisation = normalisation_of(seen.network)
    return statistics.fmean(normalisation.std) if normalisation else 1.0
