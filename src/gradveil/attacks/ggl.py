"""GGL: search the latents of a trained generator for an image whose gradient equals the one seen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.attacks.parts.makers import Latents
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Priors, Search
from gradveil.defences.countermove import Countermove
from gradveil.errors import ConfigError
from gradveil.generators import Latent, load_generator, principal_components
from gradveil.threat import Knowledge, Observation
from gradveil.types import Tensors
from gradveil.validate import in_range, one_of

PRINCIPAL = "principal"
OPTIMISERS = ("cma", "adam")
DISTANCES = ("l2", "l1", "cosine")
ESTIMATES = ("none", "clip", "compression", "columns")


@dataclass(frozen=True)
class Ggl(Matching):
    r"""Search the latents z of a generator G for images whose gradient equals the one seen.

    .. math:: \arg\min_z D(T(\nabla L(G(z), \hat y)), g) + \lambda R(z)

    G was trained on public images, so every guess looks like one. If a defence leaves little of the gradient, the guess
    is therefore plausible rather than correct. R is the divergence of the latents from N(0, 1); T is the defence. An
    attacker who knows the defence plays its countermove (``adapt``). One who does not can ``estimate`` T from the
    update alone, as published: clipping to the norm of the update, compression to its share of non-zero entries, and
    Soteria's mask from columns of zeros.

    Needs: the number of examples, and public data, which the generator was trained on. Labels that are not granted are
    recovered from the last layer, and given to a class-conditional generator.
    Fails: for images that the generator cannot make; with cma in many dimensions (batches).
    Reference: Li et al. 2022, https://arxiv.org/abs/2203.15696, Eqs. 2-7, and the authors' code (CMA-ES with 50
    candidates and 500 rounds; Adam with learning rate 0.1 and 2,500 steps). That code has squared differences, mean
    over layers, with a divergence weight of 0.1, and states 1e-4 for the cosine. The objective here is that of DCS2's
    experiments with GGL, https://arxiv.org/abs/2209.05724, by their code: cosine, total variation 1e-4, divergence
    1e-4. ``distance=l2,tv=0,kl=0.1`` is the former.
    Differs from the paper: divides l2 and l1 by the distance of a zero guess, so that the weight ``kl`` does not depend
    on the model; leaves ``squash`` off, because our generators are trained on all of N(0, 1), theirs on a truncated
    one; keeps the best candidate by the attacker's loss, not the strategy's mean; under known noise the countermove is
    the likelihood, where the authors ignore the noise or add noise of their own.

    Attributes:
        iterations: rounds of cma, or steps of adam.
        restarts: searches from different latents; the one with the least loss is kept.
        start: normal only; latents begin from N(0, 1).
        local: how several local steps are simulated: unroll, line or once.
        stop_below: a target is done when its loss is below this share of a zero guess's loss.
        chunk: candidates or searches evaluated at once.
        keep: iterates kept for the report, in addition to the start.
        compile: on, off or auto.
        adapt: which countermove to play against a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear.
        together: whether all tapped rounds of a client are attacked at once.
        generator: a file made by ``gradveil train-generator``, your own file.py:factory, or ``principal``: the
            principal components of the public images, which need no training.
        latent: components that ``principal`` keeps.
        optimiser: cma (published, needs no gradient of G) or adam.
        population: candidates per round of cma.
        lr: initial standard deviation of cma, or adam's learning rate.
        distance: cosine, l2 or l1; the first two are published.
        kl: weight of the latents' divergence from N(0, 1); published are 1e-4 for cosine and 0.1 for l2.
        tv: weight of total variation, in normalised units.
        squash: whether latents pass through tanh first; then ``kl`` is ignored.
        estimate: which defence to estimate from the update if none is known: none, clip (changes nothing for cosine),
            compression or columns.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA})

    iterations: int = 500
    chunk: int = 64
    compile: str = "off"
    generator: str = PRINCIPAL
    latent: int = 64
    optimiser: str = "cma"
    population: int = 50
    lr: float = 0.1
    distance: str = "cosine"
    kl: float = 1e-4
    tv: float = 1e-4
    squash: bool = False
    estimate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "normal":
            raise ConfigError(
                f"start of ggl must be normal, as it begins from random latents, got {self.start}. Use start=normal."
            )
        one_of("optimiser", self.optimiser, OPTIMISERS)
        one_of("distance", self.distance, DISTANCES)
        one_of("estimate", self.estimate, ESTIMATES)
        in_range("latent", self.latent, 1)
        in_range("population", self.population, 4)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("kl", self.kl, 0)
        in_range("tv", self.tv, 0)

    def prepared_on(self, shape: tuple[int, int, int], num_classes: int) -> frozenset[int]:
        """Return the keys of the images that the generator was trained on, if its file has them."""
        return frozenset() if self.generator == PRINCIPAL else load_generator(self.generator, shape, num_classes).keys

    def search(self, seen: Observation) -> Search:
        """Return a search of latents by CMA-ES or Adam."""
        latents = Latents(self._network(seen), seen.num_examples, squash=self.squash, divergence=self.kl)
        return Search(
            Objective(self.distance, relative=True),
            Priors(tv=self.tv),
            optimiser=self.optimiser,
            lr=self.lr,
            schedule="cosine",
            sign="none",
            boxed=False,
            move=estimated(self.estimate),
            maker=latents,
            population=self.population,
        )

    def labels_of(self, seen: Observation) -> Tensor | None:
        """Return the granted labels, or recovered ones."""
        return known_or_recovered(seen)

    def _network(self, seen: Observation) -> Latent:
        like = next(iter(seen.updates.values()))
        if self.generator == PRINCIPAL:
            return principal_components(seen.public_data.images.to(like), self.latent)
        return load_generator(self.generator, seen.shape, seen.num_classes).to(like.device, like.dtype)


def estimated(what: str) -> Countermove:
    """Return the countermove of an attacker who estimates the defence's strength from the update itself."""
    return Countermove({"none": None, "clip": _clipped, "compression": _compressed, "columns": _columns}[what])


def _clipped(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Scale each guess down to the norm of the update seen, if it is longer."""
    ours, theirs = (
        torch.stack([tensor.reshape(len(tensor), -1).square().sum(1) for tensor in tensors.values()]).sum(0).sqrt()
        for tensors in (guess, seen)
    )
    factors = (theirs / ours.clamp_min(torch.finfo(ours.dtype).tiny)).clamp_max(1)
    return {name: tensor * factors.view(-1, *[1] * (tensor.dim() - 1)) for name, tensor in guess.items()}


def _compressed(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Keep the same share of entries in each tensor of the guess as is non-zero in the whole update seen."""
    rows = len(next(iter(seen.values())))
    flat = torch.cat([(tensor == 0).reshape(rows, -1) for tensor in seen.values()], 1)
    shares = flat.double().mean(1)
    return {name: _largest(tensor, shares) for name, tensor in guess.items()}


def _largest(tensor: Tensor, shares: Tensor) -> Tensor:
    """Zero the smallest entries of each row, by the given shares (T,)."""
    rows = tensor.reshape(len(tensor), -1)
    dropped = (shares * rows.shape[1]).long()
    ranks = rows.detach().abs().argsort(1).argsort(1)
    return (rows * (ranks >= dropped[:, None])).view_as(tensor)


def _columns(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Zero the columns of linear weights that are zero in the update seen."""
    kept: Mapping[str, Tensor] = {name: (t != 0).any(1, keepdim=True) for name, t in seen.items() if t.dim() == 3}
    return {name: tensor * kept[name] if name in kept else tensor for name, tensor in guess.items()}
