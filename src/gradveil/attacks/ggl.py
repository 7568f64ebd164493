"""GGL: search the latents of a trained generator for an image whose gradient is the one seen."""

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
    r"""Search the latents z of a generator G for images whose gradient is the seen one.

    .. math:: \arg\min_z D(T(\nabla L(G(z), \hat y)), g) + \lambda R(z)

    G was trained on public images, so that whatever is found looks like one; where a defence leaves little of the
    gradient, the guess is then likely rather than right. R is the divergence of the latents from N(0, 1); T is what the
    defence does. An attacker who knows the defence takes its countermove (``adapt``). Without that knowledge it can
    ``estimate`` T from the update alone, as published: clipping to the norm that arrived, compression to the share of
    entries that are not zero, and Soteria's mask from columns of zeros.

    Needs: the number of examples, and public data, which the generator stands for. Labels that are not granted are
    recovered from the last layer, and told to a generator that draws by class.
    Fails: for images that the generator can't make; with cma in many dimensions (batches).
    Reference: Li et al. 2022, https://arxiv.org/abs/2203.15696, Eqs. 2-7, and the authors' code (CMA-ES with 50
    candidates and 500 rounds; Adam with rate 0.1, 2,500 steps and ``kl=0.1``; squared differences, mean over layers).
    Differs from the paper: the distance is divided by that of a zero guess, and ``kl`` is a weight against that, so
    that it does not depend on the model; ``squash`` is off, for our generators are trained on all of N(0, 1), theirs on
    a cut one; the best candidate by the attacker's loss is kept, not the strategy's mean; under noise the known
    countermove is the likelihood, where the authors ignore it or add noise of their own.

    Attributes:
        iterations: rounds of cma, or steps of adam.
        restarts: searches from different latents, chosen by the loss.
        start: normal only; latents begin from N(0, 1).
        local: how several local steps are played again: unroll, line or once.
        stop_below: a share of a zero guess's loss at which a target counts as found.
        chunk: candidates or searches taken together.
        keep: iterates kept for the report, beside the start.
        compile: on, off or auto.
        adapt: which countermove to a known defence; the first by default, none for none.
        parts: which layers' gradients are matched: all, convolutions or linear.
        generator: a file of ``gradveil train-generator``, one's own file.py:factory, or ``principal``: the principal
            components of the public images, which need no training.
        latent: components that ``principal`` keeps.
        optimiser: cma (published, needs no gradient of G) or adam.
        population: candidates a round of cma.
        lr: first standard deviation of cma, or adam's rate.
        distance: l2 (published), l1 or cosine.
        kl: weight of the latents' divergence from N(0, 1).
        tv: weight of total variation, in normalised units.
        squash: whether latents pass tanh first; then ``kl`` is left out.
        estimate: none, or what defence to estimate from the update, where none is known: clip, compression or columns.
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
    distance: str = "l2"
    kl: float = 1e-3
    tv: float = 0.0
    squash: bool = False
    estimate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "normal":
            raise ConfigError(f"start of ggl must be normal, as it begins from random latents, got {self.start}.")
        one_of("optimiser", self.optimiser, OPTIMISERS)
        one_of("distance", self.distance, DISTANCES)
        one_of("estimate", self.estimate, ESTIMATES)
        in_range("latent", self.latent, 1)
        in_range("population", self.population, 4)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("kl", self.kl, 0)
        in_range("tv", self.tv, 0)

    def prepared_on(self, shape: tuple[int, int, int], num_classes: int) -> frozenset[int]:
        """Keys of the images that the generator was trained on, as far as its file tells."""
        return frozenset() if self.generator == PRINCIPAL else load_generator(self.generator, shape, num_classes).keys

    def search(self, seen: Observation) -> Search:
        """CMA-ES or Adam on latents."""
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
        """Those granted, or recovered ones."""
        return known_or_recovered(seen)

    def _network(self, seen: Observation) -> Latent:
        like = next(iter(seen.updates.values()))
        if self.generator == PRINCIPAL:
            return principal_components(seen.public_data.images.to(like), self.latent)
        return load_generator(self.generator, seen.shape, seen.num_classes).to(like.device, like.dtype)


def estimated(what: str) -> Countermove:
    """What an attacker does to its guess who reads a defence's strength off the update itself."""
    return Countermove({"none": None, "clip": _clipped, "compression": _compressed, "columns": _columns}[what])


def _clipped(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Each target's guess, scaled down to the norm of what was seen of it, where it is longer."""
    ours, theirs = (
        torch.stack([tensor.reshape(len(tensor), -1).square().sum(1) for tensor in tensors.values()]).sum(0).sqrt()
        for tensors in (guess, seen)
    )
    factors = (theirs / ours.clamp_min(torch.finfo(ours.dtype).tiny)).clamp_max(1)
    return {name: tensor * factors.view(-1, *[1] * (tensor.dim() - 1)) for name, tensor in guess.items()}


def _compressed(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Each tensor of the guess with as many entries as survived in all of what was seen of that target, by share."""
    rows = len(next(iter(seen.values())))
    flat = torch.cat([(tensor == 0).reshape(rows, -1) for tensor in seen.values()], 1)
    shares = flat.double().mean(1)
    return {name: _largest(tensor, shares) for name, tensor in guess.items()}


def _largest(tensor: Tensor, shares: Tensor) -> Tensor:
    """Zero the given share (T,) of each row's smallest entries."""
    rows = tensor.reshape(len(tensor), -1)
    dropped = (shares * rows.shape[1]).long()
    ranks = rows.detach().abs().argsort(1).argsort(1)
    return (rows * (ranks >= dropped[:, None])).view_as(tensor)


def _columns(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """The guess without those columns of linear weights that are zero in what was seen."""
    kept: Mapping[str, Tensor] = {name: (t != 0).any(1, keepdim=True) for name, t in seen.items() if t.dim() == 3}
    return {name: tensor * kept[name] if name in kept else tensor for name, tensor in guess.items()}
