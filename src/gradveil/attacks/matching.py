"""Gradient matching: find images whose update is the one seen. The loop that all attacks by search share."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.adaptive import Answer, answers, turned
from gradveil.attacks.parts.evolution import Evolution
from gradveil.attacks.parts.labels import bias_excess
from gradveil.attacks.parts.local_training import WAYS, Replay, replay_of
from gradveil.attacks.parts.optimisers import BatchedAdam, BatchedLbfgs, BatchedRmsprop
from gradveil.attacks.parts.search import PARTS, Search, SearchStep, SearchTask, restricted
from gradveil.attacks.parts.starts import NEEDS, check_start
from gradveil.progress import part, tell
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Matching(Attack):
    """Base of attacks by gradient matching: a subclass says what is searched (`labels_of`) and how (`search`).

    Attributes:
        iterations: steps of the optimiser.
        restarts: searches from different starts; the one with the least loss is kept.
        start: where a search begins; see `gradveil.attacks.parts.starts`.
        local: how several local steps are played again: unroll, line or once.
        stop_below: a target is done when one of its restarts has a loss below this share of a zero guess's.
        chunk: searches (of cma: candidates) taken together; more do not fit a CPU's cache.
        keep: iterates kept for the report, beside the start.
        compile: on, off, or auto: for long searches of single steps, where there is a compiler.
        adapt: which of a known defence's countermoves to play; by default the first, ``none`` plays none.
        parts: which tensors are matched: all, those of convolutions or those of linear layers.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})

    iterations: int = 1000
    restarts: int = 1
    start: str = "normal"
    local: str = "unroll"
    stop_below: float = 0.0
    chunk: int = 32
    keep: int = 0
    compile: str = "auto"
    adapt: str = ""
    parts: str = "all"

    def __post_init__(self) -> None:
        in_range("iterations", self.iterations, 1)
        in_range("restarts", self.restarts, 1)
        in_range("stop_below", self.stop_below, 0)
        in_range("chunk", self.chunk, 1)
        in_range("keep", self.keep, 0)
        check_start(self.start)
        one_of("local", self.local, WAYS)
        one_of("compile", self.compile, ["auto", "on", "off"])
        one_of("parts", self.parts, PARTS)
        object.__setattr__(self, "needs", self.needs | NEEDS.get(self.start, frozenset()))

    @abstractmethod
    def search(self, seen: Observation) -> Search:
        """The search that these settings describe."""

    @abstractmethod
    def labels_of(self, seen: Observation) -> Tensor | None:
        """The labels (T, B) to go by; None to search soft ones with the images."""

    def keeping(self, count: int) -> "Matching":
        """Return the attack that keeps at most ``count`` iterates, unless ``keep`` is set."""
        return self if self.keep else replace(self, keep=min(count, self.iterations))

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Search all targets side by side that are answered alike."""
        plays = answers(seen, self.adapt)
        if len(plays) == 1:
            return _match(self, seen, plays[0], rng)
        found = []
        for number, play in enumerate(plays):
            with part(number, len(plays)):
                found.append(_match(self, seen.only(play.targets), play, rng))
        return _merged(found, [target for play in plays for target in play.targets])


def _merged(found: Sequence[Reconstruction], targets: Sequence[int]) -> Reconstruction:
    """Results of some targets each, in the order of all."""
    places = torch.tensor(targets).argsort().to(found[0].loss.device)
    whys, names = ([text for each in found for text in getattr(each, key)] for key in ("why", "answers"))
    return Reconstruction(
        images=torch.cat([each.images for each in found])[places],
        labels=torch.cat([each.labels for each in found])[places],
        loss=torch.cat([each.loss for each in found])[places],
        converged=torch.cat([each.converged for each in found])[places],
        why=tuple(whys[place] for place in places.tolist()),
        iterates=torch.cat([each.iterates for each in found], 1)[:, places],
        steps=found[0].steps,
        answers=tuple(names[place] for place in places.tolist()),
    )


def _match(attack: Matching, seen: Observation, play: Answer, rng: torch.Generator) -> Reconstruction:
    """All targets, in chunks; the restarts of a target stay in one chunk."""
    targets, restarts = seen.num_targets, attack.restarts
    search = restricted(turned(attack.search(seen), seen, play.move), attack.parts, seen.network, seen.updates)
    searched = search.move.soft_labels and not seen.knows(Knowledge.LABELS)
    labels = None if searched else attack.labels_of(seen)
    replay = replace(replay_of(seen, attack.local, rng), penalties=search.move.penalties)
    rows = torch.arange(targets).repeat_interleave(restarts)
    known = None if labels is None else _dealt(labels.cpu()[rows], replay, rng)
    steps = [SearchStep(phase, restarts, seen, replay) for phase in search.phases]
    step = steps[-1]
    wanted = seen.mean_gradients if search.move.look is None else search.move.look(seen.mean_gradients)
    together = SearchTask(wanted, search.priors.statistics, None, search.move.outputs)

    def task_of(some: Tensor) -> SearchTask:
        task = together.of(rows[some].to(step.device))
        return task if known is None else replace(task, labels=known[some].to(step.device))

    size = min(max(1, attack.chunk // restarts) * restarts, len(rows))
    chunks = torch.split(torch.arange(len(rows)), size)
    if _compiles(attack, replay, len(chunks)):
        for each in steps:
            each.compile_for(task_of(chunks[0]), must=attack.compile == "on")
    found = []
    for number, some in enumerate(chunks):
        with part(number, len(chunks)):
            found.append(_search(attack, steps, task_of(some), rng))
    loss = torch.cat([each.loss for each in found])
    ours = loss.view(targets, restarts)
    best = torch.where(ours.isnan(), torch.inf, ours).argmin(1) + torch.arange(targets).to(loss.device) * restarts
    notes = [note for each in found for note in each.notes]
    return Reconstruction(
        images=torch.cat([each.images for each in found])[best],
        labels=torch.cat([each.labels for each in found])[best],
        loss=loss[best],
        converged=(loss <= torch.cat([each.enough for each in found]))[best],
        iterates=torch.cat([each.iterates for each in found], 1)[:, best],
        why=tuple(notes[row] for row in best.tolist()),
        answers=("" if play.move is None or play.move.decode else play.name,) * targets,
        steps=_frames(attack, len(steps)),
    )


def _frames(attack: Matching, phases: int) -> tuple[int, ...]:
    """After how many steps of all phases a picture is kept."""
    whole = attack.iterations * phases
    return tuple(dict.fromkeys(round(i * whole / attack.keep) for i in range(attack.keep + 1))) if attack.keep else ()


def _dealt(labels: Tensor, replay: Replay, rng: torch.Generator) -> Tensor:
    """Labels (rows, B, ...) in the order of the guesses: with several steps each restart deals them anew."""
    if len(replay.batches) <= 1:
        return labels
    order = torch.rand(labels.shape[:2], generator=rng).argsort(1)
    return labels[torch.arange(len(labels))[:, None], order]


def _compiles(attack: Matching, replay: Replay, chunks: int) -> bool:
    if attack.compile != "auto":
        return attack.compile == "on"
    return replay.is_plain and attack.iterations * chunks >= _LONG


_LONG = 10_000
"""Steps of whole chunks from which compiling pays; a rule of time would not give the same rows twice."""


class _Found(NamedTuple):
    """What came of one chunk: images (rows, B, C, H, W) in [0, 1], labels (rows, B), losses (rows,) and more."""

    images: Tensor
    labels: Tensor
    loss: Tensor
    enough: Tensor
    iterates: Tensor
    notes: list[str]


def _search(attack: Matching, steps: Sequence[SearchStep], task: SearchTask, rng: torch.Generator) -> _Found:
    """One chunk, from its start to the best iterate of each row; each phase starts where the one before was best."""
    last, shown, number = steps[-1], list[Tensor](), 0
    frames, whole = _frames(attack, len(steps)), attack.iterations * len(steps)
    best = _Best(steps[0].begin(attack.start, task, rng))
    for step in steps:
        best = _Best(best.variables)
        walk = _evolve if step.search.optimiser == "cma" else _descend
        for rows, flat, loss in walk(attack, step, task, best, rng):
            best.offer(rows, flat, loss)
            tell(number / whole)
            if number in frames:
                shown.append(step.pictures(best.variables, task.labels))
            number += 1
        number -= step is not last  # the next one begins where this one ended
    pictures = last.pictures(best.variables, task.labels)
    shown += [pictures] * (len(frames) - len(shown))  # of a chunk that was done early
    targets = last.targets(best.variables, task.labels)
    labels = (targets if targets.dim() == 1 else targets.argmax(1)).view(task.rows, -1)
    iterates = torch.stack(shown[: len(frames)]) if shown else pictures.new_empty(0, *pictures.shape)
    notes = _noted(last, task, best, pictures)
    nothing = last.search.objective.of_nothing(task.wanted)
    enough = (_CONVERGED * nothing).clamp_min(_NOISY * last.search.residual)
    return _Found(pictures, labels, best.loss, enough, iterates, notes)


_CONVERGED = 1e-3
"""A loss counts as converged from this share of a zero guess's distance on."""
_NOISY = 1.25
"""Under known noise also from this multiple of the distance on that the truth itself would have."""


def _descend(
    attack: Matching, step: SearchStep, task: SearchTask, best: "_Best", rng: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rows, iterates and their losses. Targets that are done leave, unless the step is compiled for all."""
    search, variables = step.search, best.variables
    rows = torch.arange(task.rows, device=variables.device)
    optimiser = _optimiser(attack, step, task, variables, rng)
    closure = step.closure(task)
    enough = attack.stop_below * search.objective.of_nothing(task.wanted)
    for _ in range(attack.iterations):
        before = optimiser.variables
        yield rows, before, optimiser.step(closure)
        if attack.stop_below:
            going = _going(attack, best, enough)
            if not bool(going.any()):
                return
            staying = going[rows]
            if not step.is_compiled and not bool(staying.all()):
                rows = rows[staying]
                optimiser.keep(staying)
                closure = step.closure(task.of(rows))
    yield rows, optimiser.variables, closure(optimiser.variables)[0]


def _optimiser(
    attack: Matching, step: SearchStep, task: SearchTask, variables: Tensor, rng: torch.Generator
) -> BatchedAdam | BatchedLbfgs | BatchedRmsprop:
    search = step.search
    if search.optimiser == "lbfgs":
        return BatchedLbfgs(variables, lr=search.lr)
    if search.optimiser == "rmsprop":
        return BatchedRmsprop(
            variables,
            lr=search.lr,
            rates=step.rates(variables, task),
            steps=attack.iterations,
            schedule=search.schedule,
        )
    return BatchedAdam(
        variables,
        lr=search.lr,
        steps=attack.iterations,
        schedule=search.schedule,
        sign=search.sign,
        noise=search.noise,
        rng=rng,
        project=(lambda flat: _boxed(step, flat)) if search.boxed else None,
    )


def _going(attack: Matching, best: "_Best", enough: Tensor) -> Tensor:
    """(rows,) which of a chunk's rows are of targets none of whose restarts is good enough yet."""
    open_ = (best.loss > enough).view(-1, attack.restarts).all(1)
    return open_.repeat_interleave(attack.restarts)


def _evolve(
    attack: Matching, step: SearchStep, task: SearchTask, best: "_Best", rng: torch.Generator
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield rows, the best candidates of each population and their losses. Targets that are done leave."""
    search, start = step.search, best.variables
    rows = torch.arange(task.rows, device=start.device)
    evolution = Evolution(start, spread=search.lr, population=search.population, rng=rng)
    enough = attack.stop_below * search.objective.of_nothing(task.wanted)
    yield rows, start, step.losses(start, task)
    for _ in range(attack.iterations):
        asked = evolution.ask()  # (rows, population, variables)
        whose = rows.repeat_interleave(search.population)
        pieces = zip(*(torch.split(part, attack.chunk) for part in (asked.flatten(0, 1), whose)), strict=True)
        losses = torch.cat([step.losses(flat, task.of(some)) for flat, some in pieces]).view(len(rows), -1)
        evolution.tell(losses)
        loss, at = torch.where(losses.isnan(), torch.inf, losses).min(1)
        yield rows, asked[torch.arange(len(rows), device=rows.device), at], loss
        if attack.stop_below:
            staying = _going(attack, best, enough)[rows]
            if not bool(staying.any()):
                return
            rows = rows[staying]
            evolution.keep(staying.tolist())


def _boxed(step: SearchStep, flat: Tensor) -> Tensor:
    images = step.space.box(flat[:, : step.num_pixels].contiguous())
    return torch.cat([images, flat[:, step.num_pixels :]], 1) if flat.shape[1] > step.num_pixels else images


class _Best:
    """The best iterate of each row so far, by the attacker's own loss."""

    def __init__(self, variables: Tensor) -> None:
        self.variables = variables.detach().clone()
        self.loss = torch.full((len(variables),), torch.inf, dtype=variables.dtype, device=variables.device)

    def offer(self, rows: Tensor, variables: Tensor, loss: Tensor) -> None:
        everything = len(rows) == len(self.loss)
        kept, least = (self.variables, self.loss) if everything else (self.variables[rows], self.loss[rows])
        better = loss < least  # a loss of NaN is never better
        if not bool(better.any()):
            return
        kept, least = torch.where(better[:, None], variables, kept), torch.where(better, loss, least)
        if everything:
            self.variables, self.loss = kept, least
        else:
            self.variables[rows], self.loss[rows] = kept, least


def _noted(step: SearchStep, task: SearchTask, best: _Best, pictures: Tensor) -> list[str]:
    """For each row what to say where the guess explains the update's direction, but not its size; else ""."""
    guess = step.guessed(pictures.flatten(0, 1), best.variables, task)
    ours, theirs = (
        torch.cat([part[name].detach().flatten(1) for name in task.wanted], 1) for part in (guess, task.wanted)
    )
    alike = torch.nn.functional.cosine_similarity(ours, theirs, dim=1)
    factor = theirs.norm(dim=1) / ours.norm(dim=1).clamp_min(torch.finfo(ours.dtype).tiny)
    differs = "learning rate, number of steps, loss reduction or clipping differ from what is stated"
    notes = []
    excesses = [0.0] * task.rows if step.knows_defence else bias_excess(step.seen, task.wanted)
    for same, size, excess, finite in zip(
        alike.tolist(), factor.tolist(), excesses, best.loss.isfinite().tolist(), strict=True
    ):
        if not finite:
            notes.append("the attack's loss was never a finite number")
        elif same > 0.99 and not 0.67 < size < 1.5:
            notes.append(f"the update is {size:.3g} times as large as its likely images give: {differs}")
        elif excess > 1.05:
            notes.append(f"the update is at least {excess:.3g} times as large as cross-entropy allows: {differs}")
        else:
            notes.append("")
    return notes
