"""Standard: the attacks that fit, chosen by a pilot on public images, with no setting to type."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from gradveil.attacks.base import Attack, build_attack
from gradveil.attacks.cpa import Cpa
from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.analytic import first_linear, nothing
from gradveil.attacks.parts.combined import mixed
from gradveil.attacks.pilot import SEARCHES, Choice, Effort, Way, again, choose, spared
from gradveil.attacks.spear import Spear
from gradveil.defences.base import HOOKS, Defence
from gradveil.errors import ConfigError, DefenceError
from gradveil.progress import part
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.threat.rehearsal import unplayable
from gradveil.validate import in_range, one_of

EFFORTS = {"quick": Effort(400, 500, 2), "standard": Effort(1200, 2000, 3), "thorough": Effort(4000, 4000, 4)}
VANISHING = 1e-6
"""Norm of a gradient, for each root of its entries, below which float32 holds little more than rounding errors."""
SPEAR_IMAGES = 64
"""Largest batch that ``spear`` tries here: beyond it, it takes minutes and found no image of digits."""

LEARNED_BEAT_SEARCH = "learned inversion beat gradient matching: a search with better settings may find more"
NOT_CONVERGED = "the search did not converge"
VANISHING_GRADIENT = "the gradient nearly vanishes"


@dataclass(frozen=True)
class Standard(Attack):
    r"""Try the attacks that fit the updates on public images first, and play the best of them on the targets.

    .. math:: a^* = \arg\max_{a} \frac{1}{N} \sum_{x \in public} \mathrm{PSNR}(a(D(\nabla L(x))), x)

    Closed forms come first: targets that ``linear`` (single images), ``cpa`` or ``spear`` (batches) rebuilds exactly
    are done. For all others the attacker plays clients with a few public images under the same protocol and defence.
    Short searches of their updates choose the settings of gradient matching. Then they are attacked in every way that
    fits (gradient matching with these settings, learned inversion, principal components of public images, independent
    components of a batch, likely public images under known noise; knowing the defence or not), and the targets in the
    way that was best on them. Without public images it plays gradient matching alone, and keeps what a search
    explained. Batches that are too large to search meet the closed forms, or ``representations`` (one picture per
    class) if none fits. In the spirit of AutoAttack there is nothing to tune; ``why`` says what was chosen and why, and
    flags say when figures should not be trusted.

    Needs: the number of examples; for several local steps how clients train. Public images make it much stronger.
    Fails: where all its parts do; in batches beyond a few images, unless a Linear layer wider than the batch is early
    in the network.
    Reference: Croce and Hein 2020 (AutoAttack), https://arxiv.org/abs/2003.01690, for the idea of a parameter-free
    suite; the parts name their own.
    Differs from the paper: AutoAttack judges its parts on the targets by the truth; here the attacker does not know
    it, and judges on public images.

    Attributes:
        effort: quick, standard or thorough: steps of the searches, clients that are played, settings that are compared.
        iterations: steps of each search; 0 takes as many as ``effort`` says.
        samples: clients that learned inversion plays; 0 takes as many as ``effort`` says.
        keep: iterates kept for the report, in addition to the start.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})
    wants: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA})
    replays: ClassVar[bool] = True
    weighs_knowledge: ClassVar[bool] = True
    adapts: ClassVar[bool] = True

    effort: str = "standard"
    iterations: int = 0
    samples: int = 0
    keep: int = 0

    def __post_init__(self) -> None:
        one_of("effort", self.effort, EFFORTS)
        for name in ("iterations", "samples", "keep"):
            in_range(name, getattr(self, name), 0)

    def keeping(self, count: int) -> "Standard":
        """Return the attack that keeps iterates of the searches that it plays."""
        return self if self.keep else replace(self, keep=count)

    def adapts_to(self, defence: Defence) -> bool:
        """Return True for every defence that does anything: learned inversion plays it, whatever it is."""
        return any(defence.overrides(hook) for hook in HOOKS)

    def too_large(self, images: int, local_steps: int) -> str:
        """Return why no part of the attack can play such updates, or ""; closed forms take batches of any size."""
        return "" if local_steps == 1 else self._search.too_large(images, local_steps)

    def out_of_reach(self, network: nn.Module, shape: tuple[int, int, int], images: int, local_steps: int) -> str:
        """Return why neither searches nor what fits large batches can play such updates of this network, or ""."""
        searched = self._search.too_large(images, local_steps)
        if not searched or (local_steps == 1 and any(isinstance(layer, nn.Linear) for layer in network.modules())):
            return ""
        return f"{searched}, and what fits larger updates needs a single local step and a Linear layer"

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Play the closed forms, then the way that is best on public images, and keep the better guess per target."""
        state = rng.get_state()
        with part(0, 4):
            exact = self._closed_form(seen, again(state))
        if exact is not None and bool(exact.converged.all()):
            return _noted(exact, "chosen: a closed form, which is exact")
        reason = self._search.too_large(seen.num_examples, 1)
        if reason:
            return self._without_search(seen, exact, reason, state)
        found = self._searched(seen, state)
        return found if exact is None else mixed(found, exact, exact.converged)

    def _searched(self, seen: Observation, state: torch.Tensor) -> Reconstruction:
        """Return what is best on public images if there are enough, else what a search explains."""
        if not seen.knows(Knowledge.PUBLIC_DATA) or not spared(seen):
            return self._explained(seen, state, "no public images that fit")
        if reason := unplayable(seen):
            return self._explained(seen, state, f"clients with public images can't be played: {reason}")
        try:
            return self._best_on_public(seen, state)
        except DefenceError as error:  # it needs a client's private state, which the server can't have
            return self._explained(seen, state, f"clients with public images can't be played: {error}")

    def _without_search(
        self, seen: Observation, exact: Reconstruction | None, reason: str, state: torch.Tensor
    ) -> Reconstruction:
        """Return what is found of updates that are too large to search: by closed forms, else one picture per class."""
        if exact is not None:
            return _noted(exact, f"chosen: a closed form; gradient matching {reason}")
        unfit = Cpa().unfit(seen.network, seen.shape, seen.num_examples)
        if not seen.single_step:
            unfit = "they need the gradient of a single step"
        name = "representations" if unfit else "cpa"
        note = f"chosen: {name}; gradient matching {reason}" + (f"; closed forms do not fit: {unfit}" if unfit else "")
        try:
            found = Way(f"{name}:iterations={self.work.iterations}", knowing=False)(seen, again(state))
        except ConfigError as error:  # no Linear layer at the end of the network
            return nothing(seen, seen.num_examples, f"nothing fits: gradient matching {reason}; {unfit} {error}")
        return _noted(found, note)

    def _closed_form(self, seen: Observation, rng: torch.Generator) -> Reconstruction | None:
        """Return what the closed form gives that fits the network and the number of images, or None if none does."""
        if seen.num_examples > 1:
            return self._exact_batches(seen, rng)
        try:
            first_linear(seen.network, seen.shape)
        except ConfigError:
            return None
        return Way("linear", knowing=False)(seen, rng)

    def _exact_batches(self, seen: Observation, rng: torch.Generator) -> Reconstruction | None:
        """Return batches behind a ReLU by ``cpa``, which is fast, or ``spear``; None if the network does not fit."""
        if not seen.single_step or Spear().unfit(seen.network, seen.shape, seen.num_examples):
            return None
        found = Way("cpa", knowing=False)(seen, rng)
        if bool(found.converged.all()) or seen.num_examples > SPEAR_IMAGES:
            return found
        return mixed(Way("spear", knowing=False)(seen, rng), found, found.converged)

    @property
    def work(self) -> Effort:
        """Return how much work the attack takes on."""
        usual = EFFORTS[self.effort]
        return usual._replace(iterations=self.iterations or usual.iterations, samples=self.samples or usual.samples)

    @property
    def _search(self) -> Attack:
        """Return gradient matching, the part that fits most updates."""
        return build_attack(self.work.search(SEARCHES[0]))

    def _explained(self, seen: Observation, state: torch.Tensor, reason: str) -> Reconstruction:
        """Return the search that knows the defence, or per target the plain one if only that explained the update."""
        first = Way(self.work.search(SEARCHES[0]), knowing=True)
        found = first(seen, again(state), self.keep)
        if seen.knows(Knowledge.DEFENCE) and not bool(found.converged.all()):
            other = first._replace(knowing=False)(seen, again(state), self.keep)
            found = mixed(found, other, other.converged & ~found.converged)
        noted = _noted(found, f"only gradient matching was played: {reason}")
        return _flagged(noted, seen, Choice({first: 0.0}, "", ""))

    def _best_on_public(self, seen: Observation, state: torch.Tensor) -> Reconstruction:
        """Return the guesses of the way that was best on public images, which no attack learns from."""
        spare = spared(seen)
        rest = seen.with_public(seen.public_data[slice(sum(map(len, spare)), None)])
        with part(0, 2):
            choice = choose(rest, spare, self.work, state)
        with part(1, 2):
            found = choice.best(rest, again(state), self.keep)
        return _flagged(_noted(found, choice.told(len(spare))), seen, choice)


def _flagged(found: Reconstruction, seen: Observation, choice: Choice) -> Reconstruction:
    """Return the guesses with the flags of each target."""
    best, figures = choice.best, choice.figures
    searched = isinstance(build_attack(best.spec), Matching)
    matching = [figure for way, figure in figures.items() if way.spec.startswith("gs:")]
    beaten = best.spec.startswith("lti") and bool(matching)
    gradients = seen.mean_gradients.values()
    norms = torch.stack([tensor.flatten(1).square().sum(1) for tensor in gradients]).sum(0).sqrt()
    entries = sum(tensor[0].numel() for tensor in gradients)
    flags = []
    for converged, norm in zip(found.converged.tolist(), norms.tolist(), strict=False):
        own = [choice.random, LEARNED_BEAT_SEARCH if beaten else ""]
        own += [NOT_CONVERGED if searched and not converged else ""]
        own += [VANISHING_GRADIENT if norm < VANISHING * entries**0.5 else ""]
        flags.append(tuple(filter(None, own)))
    return replace(found, flags=tuple(flags))


def _noted(found: Reconstruction, note: str) -> Reconstruction:
    notes = found.why or ("",) * len(found.images)
    return replace(found, why=tuple("; ".join(filter(None, [note, why])) for why in notes))
