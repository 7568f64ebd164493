"""The pilot of `standard`: compare ways of attacking on clients that have public images, and choose the best.

What it finds depends on public data, the broadcast network and, if it is known, the defence alone. So it is kept in the
scratch folder, and cells of an audit that agree in these share one pilot.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from gradveil.attacks.base import build_attack
from gradveil.attacks.cpa import Cpa
from gradveil.attacks.parts.combined import ignorant, mean_psnr
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.attacks.parts.evidence import MOST_ENTRIES
from gradveil.attacks.parts.inversion_examples import fingerprint
from gradveil.attacks.posterior import FEWEST, Posterior
from gradveil.progress import part
from gradveil.scratch import scratch_file
from gradveil.storage import digest_of, write_atomic
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.threat.rehearsal import rehearse, relative_work
from gradveil.types import Batch

IMAGES = 4
"""Public images on which the ways of attacking are compared: four updates of one image, or one of four or more."""
SPARED = 0.5
"""Share of the public images, at most, that the pilot takes from those that attacks learn from."""
MOST_WORK = 200
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
RANDOM_DEFENCE = "the defence is random: another draw may leak more"


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

    def search(self, settings: str, shorter: int = 1) -> str:
        """Return the spec of gradient matching with these settings, and with a part of the steps."""
        return f"gs:iterations={max(1, self.iterations // shorter)},{settings}"


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


class Choice(NamedTuple):
    """What a pilot found.

    Attributes:
        figures: mean PSNR of each way on public images.
        left_out: a note on ways that were not tried, or "".
        random: a flag if the known defence is random, or "".
    """

    figures: dict[Way, float]
    left_out: str
    random: str

    @property
    def best(self) -> Way:
        """The way that was best on public images."""
        return max(self.figures, key=lambda way: self.figures[way])

    def told(self, updates: int) -> str:
        """Return what rows say of the choice."""
        ranked = sorted(self.figures.items(), key=lambda item: -item[1])
        best = "; ".join(f"{way.title} {figure:.1f} dB" for way, figure in ranked[:3])
        return f"chosen by {updates} updates of public images: {best}{self.left_out}"


def spared(seen: Observation) -> list[Batch]:
    """Return the public images of the pilot, one batch per update; none if they are too few or of another shape."""
    public, size = seen.public_data, seen.num_examples
    count = min(max(1, IMAGES // size), int(SPARED * len(public)) // size)
    if public.images.shape[1:] != seen.shape:
        return []
    return [public[slice(start, start + size)] for start in range(0, count * size, size)]


def ways(seen: Observation, work: Effort, settings: str) -> list[Way]:
    """Return the ways to compare on public images; ``settings`` are those of gradient matching.

    An attacker who knows a defence may search as if it did not; if the defence names no countermove, that is the same.
    """
    search, size = work.search(settings), seen.num_examples
    specs = [search]
    lti = build_attack("lti")
    if not lti.too_large(size, 1) and len(seen.public_data) >= lti.fewest_public:
        specs.append(f"lti:samples={work.samples}")
    specs.append(f"ggl:optimiser=adam,iterations={max(1, work.iterations // 2)}")
    if seen.single_step and size > 1 and not Cpa().unfit(seen.network, seen.shape, size):
        specs.append(f"cpa:iterations={work.iterations}")
    samples = explainable(seen)
    if samples:
        specs.append(f"posterior:samples={samples}")
    answered = seen.knows(Knowledge.DEFENCE) and seen.defence.overrides("adaptive")
    return [Way(spec, knowing=True) for spec in specs] + [Way(search, knowing=False)] * answered


def explainable(seen: Observation) -> int:
    """Return how many public images ``posterior`` can compare with updates under known noise, or 0 if it does not fit.

    Without noise, or if it is not known, searches and learned inversion use updates better.
    """
    single = seen.single_step and seen.num_examples == 1 and seen.clients == 1
    if not single or not any(move.noise for move in countermoves(seen).values()):
        return 0
    entries = sum(tensor[0].numel() for tensor in seen.updates.values())
    samples = min(Posterior().samples, len(seen.public_data), MOST_ENTRIES // entries)
    return samples if samples >= FEWEST else 0


def choose(seen: Observation, spare: Sequence[Batch], work: Effort, state: torch.Tensor) -> Choice:
    """Return what the pilot finds, or what an earlier one found under the same circumstances.

    Args:
        seen: what the server saw, with the public images that attacks may learn from.
        spare: other public images, one batch per update.
        work: how much work to take on.
        state: of the random generator with which every way starts.
    """
    path = scratch_file(f"pilot-{_key(seen, spare, work, state)}.json")
    if path is not None and path.exists():
        with suppress(ValueError, KeyError, TypeError):
            return _read(json.loads(path.read_text()))
    found = _compared(seen, spare, work, state)
    if path is not None:
        rows = [[*way, figure] for way, figure in found.figures.items()]
        kept = {"figures": rows, "left_out": found.left_out, "random": found.random}
        write_atomic(path, json.dumps(kept).encode())
    return found


def again(state: torch.Tensor) -> torch.Generator:
    """Return a new generator in a given state, so that every part draws what it would draw on its own."""
    rng = torch.Generator()
    rng.set_state(state)
    return rng


def _key(seen: Observation, spare: Sequence[Batch], work: Effort, state: torch.Tensor) -> str:
    """Return a digest of everything that the pilot depends on."""
    averages = {"averages": seen.class_averages} if seen.knows(Knowledge.CLASS_AVERAGES) else {}
    images = {f"spare {number}": batch.images for number, batch in enumerate(spare)}
    facts = (work, seen.threat.names, seen.num_examples, seen.clients, seen.single_step)
    return digest_of([fingerprint(seen, *facts)], [], {"state": state, **averages, **images})


def _read(kept: dict[str, Any]) -> Choice:
    figures = {Way(str(spec), bool(knowing)): float(figure) for spec, knowing, figure in kept["figures"]}
    if not figures:
        raise ValueError("no figures")
    return Choice(figures, str(kept["left_out"]), str(kept["random"]))


def _compared(seen: Observation, spare: Sequence[Batch], work: Effort, state: torch.Tensor) -> Choice:
    """Play clients with the spare images, and attack them in every way that fits."""
    seed = int(torch.randint(2**62, (), generator=again(state)))
    stage = rehearse(seen, spare, seed)
    figures = dict[Way, float]()

    def tried(way: Way) -> float:
        return mean_psnr(way(stage, again(state)), spare)

    with part(0, 4):
        settings = _best_settings(work, tried)
    fitting, left_out = _affordable(ways(seen, work, settings), seen, spare[0])
    for number, way in enumerate(fitting):
        with part(len(fitting) + 3 * number, 4 * len(fitting)):
            figures[way] = tried(way)
    return Choice(figures, left_out, _random(seen, stage, spare[0], seed))


def _best_settings(work: Effort, tried: Callable[[Way], float]) -> str:
    """Return the settings of gradient matching whose short search was best."""
    compared = SEARCHES[: work.searches]
    figures = {}
    for number, settings in enumerate(compared):
        with part(number, len(compared)):
            figures[settings] = tried(Way(work.search(settings, SHORTER), knowing=True))
    return max(compared, key=lambda settings: figures[settings])


def _affordable(fitting: list[Way], seen: Observation, example: Batch) -> tuple[list[Way], str]:
    """Return the ways without learned inversion if playing clients under the defence is too much work, and a note."""
    if not seen.knows(Knowledge.DEFENCE) or relative_work(seen, example, MOST_WORK) <= MOST_WORK:
        return fitting, ""
    note = (
        f"; lti was left out, since a client under the defence takes over {MOST_WORK:,} times the work of one without"
    )
    return [way for way in fitting if not way.spec.startswith("lti")], note


def _random(seen: Observation, stage: Observation, first: Batch, seed: int) -> str:
    """Return a flag if the known defence sends something else of the stage's first images another time, or ""."""
    if not seen.knows(Knowledge.DEFENCE):
        return ""
    other = rehearse(seen, [first], seed + 1).updates
    same = all(torch.equal(stage.updates[name][:1], tensor) for name, tensor in other.items())
    return "" if same else RANDOM_DEFENCE
