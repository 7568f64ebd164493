"""Posterior: the best guess under known noise, from public images and all rounds that were seen of one image."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.lti import nothing
from gradveil.attacks.parts.evidence import Evidence, gathered, linear_estimate, posterior_mean
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.types import Batch
from gradveil.validate import in_range

RIDGES = (1e-6, 1e-4, 1e-2, 1.0)
"""Ridge penalties that are tried beside that of known noise, as shares of the mean squared norm of gradients."""
LINEAR, MIXTURE = "linear decoder", "mean of likely images"
HELD_OUT, FEWEST = 0.1, 20
"""Share of the public images on which the way of guessing is chosen, and the fewest images that it takes."""


class Decoding(NamedTuple):
    """A way to guess, with its mean squared error on public images that were held out."""

    name: str
    ridge: float
    error: float


@dataclass(frozen=True)
class Posterior(Attack):
    r"""Ask which public images explain the updates of one image, and return their likeliest mixture.

    .. math:: \hat x = \sum_j \frac{p(u \mid x_j)}{\sum_k p(u \mid x_k)} x_j, \qquad
        \log p(u \mid x) = -\sum_t \frac{\|u_t - g_t(x)\|^2}{2 \sigma_t^2} + c

    :math:`g_t(x)` is the gradient of x in round t, as the defence leaves it but for its noise. That is the guess with
    the least mean squared error if images were drawn from the public ones. The other way is the best linear decoder,
    which can leave the public images (``parts.evidence.linear_estimate``). The attack plays the way that is better on
    public images that were held out, with noise of the same law. It uses all tapped rounds of a client together, so
    that noise averages out as far as it does.

    A client with one image is also what remains of any client for an attacker who knows all of its other images and
    subtracts their part, so this is the strongest attacker that differential privacy allows for.

    Needs: updates of a single image and a single step, and public images. Known labels narrow the public images down,
    else those that the first round reveals do. Knowing the defence it knows the noise, else it takes it to be zero.
    Fails: if public images are few or of another kind. It knows no other images than the public ones and their linear
    mixtures, so that searches win if there is no noise.
    Reference: the posterior mean minimises the mean squared error: Robbins 1956, An Empirical Bayes Approach to
    Statistics. Bounds for such an attacker: Balle et al. 2022, https://arxiv.org/abs/2201.04845.
    Differs from the paper: public images stand for the prior; what is returned is a guess, not a bound.

    Attributes:
        samples: public images that are compared, at most; of the label, if it is known.
        together: whether an audit gives the attack all tapped rounds of a client at once; they must be of the same
            image.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA})
    most_images: ClassVar[int] = 1
    fewest_public: ClassVar[int] = FEWEST
    adapts: ClassVar[bool] = True
    weighs_knowledge: ClassVar[bool] = True

    samples: int = 1000
    together: bool = True

    def __post_init__(self) -> None:
        in_range("samples", self.samples, FEWEST, 100_000)

    def too_large(self, images: int, local_steps: int) -> str:
        """Return that the attack needs single images and single steps, or ""."""
        if local_steps > 1:
            return f"can explain updates of one local step, got {local_steps:,}"
        return super().too_large(images, local_steps)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Guess the images of all targets, those with the same label together."""
        labels = known_or_recovered(seen)
        if not seen.single_step or seen.num_examples != 1 or seen.clients != 1:
            return nothing(seen, labels, "updates must be of a single image and a single step")
        if len(seen.public_data) < FEWEST:
            return nothing(seen, labels, f"at least {FEWEST} public images are needed")
        images = seen.public_data.images.new_full((seen.num_targets, *seen.shape), torch.nan)
        loss, why = labels.new_full((seen.num_targets,), torch.nan, dtype=torch.float64), [""] * seen.num_targets
        converged = torch.zeros_like(loss, dtype=torch.bool)
        for label in sorted(set(labels[:, 0].tolist())):
            own = (labels[:, 0] == label).nonzero().flatten().tolist()
            public = self._candidates(seen.public_data, label, rng)
            evidence = gathered(seen.only(own), public)
            ways, blind = rehearsed(evidence, public.images, rng)
            way = min(ways, key=lambda each: each.error)
            images[own] = guessed(evidence, public.images, way).view(-1, *seen.shape).to(images)
            loss[own], converged[own] = way.error, way.error <= 0.5 * blind
            for target in own:
                why[target] = f"{way.name}; {-10 * _log10(way.error):.1f} dB on public images that were held out"
        return Reconstruction(images[:, None], labels, loss, converged, why=tuple(why))

    def _candidates(self, public: Batch, label: int, rng: torch.Generator) -> Batch:
        """Return random public images of a label, or of any if there are too few of it."""
        same = (public.labels == label).nonzero().flatten() if public.labels.dim() == 1 else torch.arange(0)
        chosen = same if len(same) >= FEWEST else torch.arange(len(public), device=public.labels.device)
        return public[chosen[torch.randperm(len(chosen), generator=rng)[: self.samples].to(chosen.device)]]


def rehearsed(evidence: Evidence, images: Tensor, rng: torch.Generator) -> tuple[list[Decoding], float]:
    """Return all ways with their error on held-out candidates, and the error of the others' mean image.

    What would be seen of held-out images is drawn with new noise.
    """
    held = torch.arange(len(images)) < max(1, round(HELD_OUT * len(images)))
    known, apart = (~held).nonzero().flatten(), held.nonzero().flatten()
    drawn = evidence.of_candidates(apart, 1, rng)
    played = replace(evidence, cross=drawn).only(known)
    truth, mine = images[apart].flatten(1).double(), images[known]
    scale = float(evidence.gram.diagonal().mean()) / len(images)
    ways = [(LINEAR, ridge) for ridge in (*([1.0] if evidence.noisy else []), *(scale * r for r in RIDGES))]
    tried = [
        Decoding(name, ridge, _error(guessed(played, mine, Decoding(name, ridge, 0.0)), truth))
        for name, ridge in [*ways, (MIXTURE, 0.0)]
    ]
    return tried, _error(mine.flatten(1).double().mean(0), truth)


def guessed(evidence: Evidence, images: Tensor, way: Decoding) -> Tensor:
    """Return the guesses (T, pixels) of a way, from the images of all candidates."""
    if way.name == LINEAR:
        return linear_estimate(evidence, images, way.ridge).clamp(0, 1)
    return posterior_mean(evidence, images)


def _error(guess: Tensor, truth: Tensor) -> float:
    return float((guess - truth).square().mean())


def _log10(value: float) -> float:
    return float(torch.tensor(max(value, 1e-12)).log10())
