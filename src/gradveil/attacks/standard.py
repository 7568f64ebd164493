"""Standard: the attacks that fit, chosen by a pilot on public images, with no setting to type."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from gradveil.attacks.base import Attack, build_attack
from gradveil.attacks.cpa import Cpa
from gradveil.attacks.matching import Matching
from gradveil.attacks.parts.analytic import first_linear
from gradveil.attacks.parts.combined import ignorant, mean_psnr, mixed
from gradveil.attacks.spear import Spear
from gradveil.errors import ConfigError
from gradveil.progress import part
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.threat.rehearsal import rehearse, relative_work, unplayable
from gradveil.types import Batch
from gradveil.validate import in_range, one_of

PILOT = 4
"""Updates of public images on which the ways of attacking are compared."""
SPARED = 0.5
"""Share of the public images, at most, that the pilot takes from those that attacks learn from."""
VANISHING = 1e-6
"""Norm of a gradient, for each root of its entries, below which float32 holds little more than rounding errors."""

LEARNED_BEAT_SEARCH = "learned inversion beat gradient matching: a search with better settings may find more"
NOT_CONVERGED = "the search did not converge"
RANDOM_DEFENCE = "the defence is random: another draw may leak more"
VANISHING_GRADIENT = "the gradient nearly vanishes"


class Effort(NamedTuple):
    """How much work the attack takes on.

    Attributes:
        iterations: steps of a search.
        samples: clients that learned inversion plays.
        searches: how many settings of gradient matching the pilot compares.
    """

    iterations: int
    samples: int
    searches: int


EFFORTS = {"quick": Effort(400, 500, 2), "standard": Effort(1200, 2000, 3), "thorough": Effort(4000, 4000, 4)}
MOST_WORK = 1000
"""Operations of playing a client, relative to one without a defence, beyond which learned inversion is left out: it
plays hundreds of them."""
SHORTER = 4
"""Settings of gradient matching are compared by searches with a fourth of the steps."""
SEARCHES = (
    "sign=none,schedule=cosine,lr=0.3,tv=1e-6",
    "sign=none,boxed=false",
    "sign=none,schedule=cosine,lr=0.1,tv=1e-3",
    "tv=1e-4",
)
"""Settings of gradient matching, from smooth small networks to deep ones with ReLU; the last are the published ones."""


class Way(NamedTuple):
    """One way of attacking: an attack, and whether it uses its knowledge of the defence."""

    spec: str
    knowing: bool

    @property
    def title(self) -> str:
        """What rows call it."""
        return self.spec if self.knowing else f"{self.spec} (plain)"

    def __call__(self, seen: Observation, rng: torch.Generator, keep: int = 0) -> Reconstruction:
        """Attack in this way, and keep about ``keep`` iterates for the report."""
        attack = build_attack(self.spec)
        return (attack.keeping(keep) if keep else attack)(seen if self.knowing else ignorant(seen), rng)


@dataclass(frozen=True)
class Standard(Attack):
    r"""Try the attacks that fit the updates on public images first, and play the best of them on the targets.

    .. math:: a^* = \arg\max_{a} \frac{1}{N} \sum_{x \in public} \mathrm{PSNR}(a(D(\nabla L(x))), x)

    Closed forms come first: targets that ``linear`` (single images), ``cpa`` or ``spear`` (batches) rebuilds exactly
    are done. For all others the attacker plays clients with a few public images under the same protocol and defence.
    Short searches of their updates choose the settings of gradient matching. Then they are attacked in every way that
    fits (gradient matching with these settings, learned inversion, principal components of public images, independent
    components of a batch; knowing the defence or not), and the targets in the way that was best on them. Without public
    images it plays gradient matching alone, and keeps what a search explained. In the spirit of AutoAttack there is
    nothing to tune; ``why`` says what was chosen and why, and flags say when figures should not be trusted.

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

    def too_large(self, images: int, local_steps: int) -> str:
        """Return why gradient matching, its part that fits most updates, can't search such updates, or ""."""
        return build_attack(self._search(SEARCHES[0])).too_large(images, local_steps)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Play the closed forms, then the way that is best on public images, and keep the better guess per target."""
        state = rng.get_state()
        with part(0, 4):
            exact = self._closed_form(seen, _again(state))
        if exact is not None and bool(exact.converged.all()):
            return _noted(exact, "chosen: a closed form, which is exact")
        if seen.knows(Knowledge.PUBLIC_DATA) and not unplayable(seen) and _spare(seen) is not None:
            found = self._best_on_public(seen, state)
        else:
            found = self._explained(seen, state)
        return found if exact is None else mixed(found, exact, exact.converged)

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
        if bool(found.converged.all()):
            return found
        return mixed(Way("spear", knowing=False)(seen, rng), found, found.converged)

    @property
    def work(self) -> Effort:
        """Return how much work the attack takes on."""
        usual = EFFORTS[self.effort]
        return usual._replace(iterations=self.iterations or usual.iterations, samples=self.samples or usual.samples)

    def _search(self, settings: str, shorter: int = 1) -> str:
        """Return the spec of gradient matching with these settings, and with a part of the steps."""
        return f"gs:iterations={max(1, self.work.iterations // shorter)},{settings}"

    def ways(self, seen: Observation, settings: str) -> list[Way]:
        """Return the ways to compare on public images; ``settings`` are those of gradient matching."""
        search, size = self._search(settings), seen.num_examples
        specs = [search]
        if not build_attack("lti").too_large(size, 1):
            specs.append(f"lti:samples={self.work.samples}")
        specs.append(f"ggl:optimiser=adam,iterations={max(1, self.work.iterations // 2)}")
        if seen.single_step and size > 1 and not Cpa().unfit(seen.network, seen.shape, size):
            specs.append(f"cpa:iterations={self.work.iterations}")
        plain = [Way(search, knowing=False)] if seen.knows(Knowledge.DEFENCE) else []
        return [Way(spec, knowing=True) for spec in specs] + plain

    def _explained(self, seen: Observation, state: torch.Tensor) -> Reconstruction:
        """Return the search that knows the defence, or per target the plain one if only that explained the update."""
        first = Way(self._search(SEARCHES[0]), knowing=True)
        found = first(seen, _again(state), self.keep)
        if seen.knows(Knowledge.DEFENCE) and not bool(found.converged.all()):
            other = first._replace(knowing=False)(seen, _again(state), self.keep)
            found = mixed(found, other, other.converged & ~found.converged)
        return _flagged(_noted(found, "no public images: only gradient matching was played"), seen, first, {}, "")

    def _best_settings(self, tried: Callable[[Way], float]) -> str:
        """Return the settings of gradient matching whose short search was best."""
        compared = SEARCHES[: self.work.searches]
        figures = {}
        for number, settings in enumerate(compared):
            with part(number, len(compared)):
                figures[settings] = tried(Way(self._search(settings, SHORTER), knowing=True))
        return max(compared, key=lambda settings: figures[settings])

    def _best_on_public(self, seen: Observation, state: torch.Tensor) -> Reconstruction:
        """Return the guesses of the way that was best on public images."""
        spare, rest = _divided(seen)
        seed = int(torch.randint(2**62, (), generator=_again(state)))
        stage = rehearse(rest, spare, seed)
        figures = dict[Way, float]()

        def tried(way: Way) -> float:
            return mean_psnr(way(stage, _again(state)), spare)

        with part(0, 3):
            settings = self._best_settings(tried)
        ways, left_out = _affordable(self.ways(rest, settings), rest, spare[0])
        for number, way in enumerate(ways):
            with part(len(ways) + number, 3 * len(ways)):
                figures[way] = tried(way)
        best = max(figures, key=lambda way: figures[way])
        with part(2, 3):
            found = best(rest, _again(state), self.keep)
        ranked = sorted(figures.items(), key=lambda item: -item[1])
        told = "; ".join(f"{way.title} {figure:.1f} dB" for way, figure in ranked[:3])
        found = _noted(found, f"chosen by {len(spare)} updates of public images: {told}{left_out}")
        return _flagged(found, seen, best, figures, _random(rest, spare, seed))


def _again(state: torch.Tensor) -> torch.Generator:
    """Return a new generator in a given state, so that every part draws what it would draw on its own."""
    rng = torch.Generator()
    rng.set_state(state)
    return rng


def _spare(seen: Observation) -> list[Batch] | None:
    """Return the public images of the pilot, one batch per update, or None if there are too few."""
    public, size = seen.public_data, seen.num_examples
    count = min(PILOT, int(SPARED * len(public)) // size)
    if count < 1 or public.images.shape[1:] != seen.shape:
        return None
    return [public[slice(start, start + size)] for start in range(0, count * size, size)]


def _divided(seen: Observation) -> tuple[list[Batch], Observation]:
    """Return the images of the pilot, and the observation of an attacker who has all other public images."""
    spare = _spare(seen) or []
    used = sum(map(len, spare))
    return spare, seen.with_public(seen.public_data[slice(used, None)])


def _affordable(ways: list[Way], seen: Observation, example: Batch) -> tuple[list[Way], str]:
    """Return the ways without learned inversion if playing clients under the defence is too much work, and a note."""
    if not seen.knows(Knowledge.DEFENCE) or (work := relative_work(seen, example)) <= MOST_WORK:
        return ways, ""
    note = f"; lti was left out, since a client under the defence takes {work:,.0f} times the work of one without"
    return [way for way in ways if not way.spec.startswith("lti")], note


def _random(seen: Observation, spare: Sequence[Batch], seed: int) -> str:
    """Return a flag if the known defence sends something else of the same images each time, or ""."""
    if not seen.knows(Knowledge.DEFENCE):
        return ""
    one, other = (rehearse(seen, spare[:1], number).updates for number in (seed, seed + 1))
    same = all(torch.equal(one[name], tensor) for name, tensor in other.items())
    return "" if same else RANDOM_DEFENCE


def _flagged(
    found: Reconstruction, seen: Observation, best: Way, figures: dict[Way, float], random: str
) -> Reconstruction:
    """Return the guesses with the flags of each target."""
    searched = isinstance(build_attack(best.spec), Matching)
    matching = [figure for way, figure in figures.items() if way.spec.startswith("gs:")]
    beaten = best.spec.startswith("lti") and bool(matching)
    gradients = seen.mean_gradients.values()
    norms = torch.stack([tensor.flatten(1).square().sum(1) for tensor in gradients]).sum(0).sqrt()
    entries = sum(tensor[0].numel() for tensor in gradients)
    flags = []
    for converged, norm in zip(found.converged.tolist(), norms.tolist(), strict=False):
        own = [random, LEARNED_BEAT_SEARCH if beaten else ""]
        own += [NOT_CONVERGED if searched and not converged else ""]
        own += [VANISHING_GRADIENT if norm < VANISHING * entries**0.5 else ""]
        flags.append(tuple(filter(None, own)))
    return replace(found, flags=tuple(flags))


def _noted(found: Reconstruction, note: str) -> Reconstruction:
    notes = found.why or ("",) * len(found.images)
    return replace(found, why=tuple("; ".join(filter(None, [note, why])) for why in notes))
