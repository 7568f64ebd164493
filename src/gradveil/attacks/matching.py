"""Gradient matching: find images that would have caused the update that was seen.

All attacks by search share this loop; each only says how to search (`Matching.search`) and with which labels::

    for each group of targets that share a countermove:                        Matching.run
        search = the attack's search, adapted to the countermove                _match
        for each chunk of rows, one row per target and restart:
            best = variables of a start: images, and all else that is unknown   _search
            for each phase of the search:
                for each iteration:                                             descend
                    guess = update that the images would have caused            SearchStep.evaluate
                    loss = distance(guess, update seen) + priors
                    variables = optimiser's step along the gradient of loss
                    best = variables of each row with the least loss so far     Best.offer
        keep the restart with the least loss of each target                     _chosen

`gradveil.attacks.parts` has `search_walk` (descend), `search_step` (loss) and `search_layout` (the variables).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.lti import Lti
from gradveil.attacks.parts.adaptive import Answer, answers, turned
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.attacks.parts.dropout import with_masks
from gradveil.attacks.parts.labels import bias_excess
from gradveil.attacks.parts.local_training import WAYS, Replay, replay_of
from gradveil.attacks.parts.search import PARTS, Search, restricted
from gradveil.attacks.parts.search_step import SearchStep
from gradveil.attacks.parts.search_task import SearchTask
from gradveil.attacks.parts.search_walk import Best, Limits, descend, evolve
from gradveil.attacks.parts.starts import NEEDS, check_start
from gradveil.progress import part, tell
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of

MOST_STEPS = 1000
"""Local steps that a search simulates in each of its iterations, at most."""


@dataclass(frozen=True)
class Matching(Attack):
    """Base of attacks by gradient matching. A subclass implements `search` and `labels_of`.

    Attributes:
        iterations: steps of the optimiser, over all phases of the search.
        restarts: searches from different starts; the one with the least loss is kept.
        start: where a search begins; see `gradveil.attacks.parts.starts`.
        local: how several local steps are simulated: unroll, line or once.
        stop_below: a target is done when one of its restarts has a loss below this share of a zero guess's loss.
        chunk: searches (of cma: candidates) evaluated at once; more do not fit a CPU's cache.
        keep: iterates kept for the report, in addition to the start.
        compile: on, off, or auto, which compiles long searches of single steps if there is a compiler.
        adapt: which countermove to play against a known defence; the first by default, ``none`` for none.
        parts: which tensors are matched: all, those of convolutions or those of linear layers.
        together: whether an audit gives the attack all tapped rounds of a client at once; one guess must match all of
            them, so they must be of the same images.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})
    replays: ClassVar[bool] = True
    most_images: ClassVar[int] = 128

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
    together: bool = False

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
        if self.start == "lti":
            object.__setattr__(self, "fewest_public", Lti.fewest_public)

    def too_large(self, images: int, local_steps: int) -> str:
        """Return why these updates are too large to search, or "".

        The largest batches of which the literature shows recognisable pictures have 48 images (Yin et al. 2021,
        https://arxiv.org/abs/2104.07586) and 100 images (Geiping et al. 2020, https://arxiv.org/abs/2003.14053), of
        which some came back. Each iteration repeats all local steps, and keeps them in memory, unless ``local=once``.
        """
        if self.local != "once" and local_steps > MOST_STEPS:
            return f"can simulate at most {MOST_STEPS:,} local steps, got {local_steps:,} (local=once simulates none)"
        return super().too_large(images, local_steps)

    @abstractmethod
    def search(self, seen: Observation) -> Search:
        """Return the search that these settings describe."""

    @abstractmethod
    def labels_of(self, seen: Observation) -> Tensor | None:
        """Return the labels (T, B) to assume, or None to search soft labels with the images."""

    def keeping(self, count: int) -> "Matching":
        """Return the attack that keeps at most ``count`` iterates, unless ``keep`` is set."""
        return self if self.keep else replace(self, keep=min(count, self.iterations))

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Search targets that share a countermove together."""
        plays = answers(seen, self.adapt)
        if len(plays) == 1:
            return _match(self, seen, plays[0], rng)
        found = []
        for number, play in enumerate(plays):
            with part(number, len(plays)):
                found.append(_match(self, seen.only(play.targets), play, rng))
        return _merged(found, [target for play in plays for target in play.targets])


def _match(attack: Matching, seen: Observation, play: Answer, rng: torch.Generator) -> Reconstruction:
    """Search all targets in chunks; the restarts of a target stay in one chunk."""
    restarts = attack.restarts
    search = restricted(turned(attack.search(seen), seen, play.move), attack.parts, seen.network, seen.updates)
    searched = search.move.soft_labels and not seen.knows(Knowledge.LABELS)
    labels = None if searched else attack.labels_of(seen)
    rows = torch.arange(seen.num_targets).repeat_interleave(restarts)  # the target of each row
    steps, targets = _rounds(attack, seen, play, search, rng)
    replay, device = steps[-1].replay, steps[-1].device
    known = None if labels is None else _dealt(labels.cpu()[rows], replay, rng)

    def task_of(some: Tensor) -> SearchTask:
        task = targets.of(rows[some].to(device))
        return task if known is None else task.labelled(known[some].to(device))

    size = min(max(1, attack.chunk // restarts) * restarts, len(rows))
    chunks = torch.split(torch.arange(len(rows)), size)
    if _compiles(attack, replay, len(chunks)):
        for step in steps:
            step.compile_for(task_of(chunks[0]), must=attack.compile == "on")
    learned = _learned(seen, rng) if attack.start == "lti" else None
    found = []
    for number, some in enumerate(chunks):
        with part(number, len(chunks)):
            first = None if learned is None else learned[rows[some]]
            found.append(_search(attack, steps, task_of(some), rng, first))
    answer = "" if play.move is None or play.move.decode else play.name
    return replace(_chosen(found, restarts), steps=_frames(attack), answers=(answer,) * seen.num_targets)


def _rounds(
    attack: Matching, seen: Observation, play: Answer, search: Search, rng: torch.Generator
) -> tuple[list[SearchStep], SearchTask]:
    """Return the steps of all phases and what they have to match, in later rounds of the clients too.

    A countermove that separates decoys has solved its targets by one round.
    """
    replay = replace(replay_of(seen, attack.local, rng), penalties=search.move.penalties)
    search, replay = with_masks(search, replay, seen)
    wanted = seen.mean_gradients if search.move.look is None else search.move.look(seen.mean_gradients)
    task = SearchTask(wanted, search.priors.statistics, None, search.move.outputs)
    later = [_later(attack, one, play, rng) for one in seen.later] if not play.separates else []
    steps = [
        SearchStep(phase, attack.restarts, seen, replay, [own[number] for own, _ in later])
        for number, phase in enumerate(search.phases)
    ]
    return steps, replace(task, later=tuple(one for _, one in later))


def _later(
    attack: Matching, seen: Observation, play: Answer, rng: torch.Generator
) -> tuple[list[SearchStep], SearchTask]:
    """Return the same for one later round, with the countermove of the same name."""
    move = play.move
    if move is not None and not move.adds_up:
        moves = countermoves(seen)
        move = moves.get(play.name, next(iter(moves.values())))
    search = restricted(turned(attack.search(seen), seen, move), attack.parts, seen.network, seen.updates)
    return _rounds(attack, replace(seen, later=()), play._replace(move=move), search, rng)


def _dealt(labels: Tensor, replay: Replay, rng: torch.Generator) -> Tensor:
    """Return labels (rows, B, ...) in the order of the guesses; with several local steps each row shuffles its own."""
    if len(replay.batches) <= 1:
        return labels
    order = torch.rand(labels.shape[:2], generator=rng).argsort(1)
    return labels[torch.arange(len(labels))[:, None], order]


def _compiles(attack: Matching, replay: Replay, chunks: int) -> bool:
    if attack.compile != "auto":
        return attack.compile == "on"
    return replay.is_plain and attack.iterations * chunks >= _LONG


_LONG = 10_000
"""Compiling pays from this many steps of whole chunks on; a rule based on time would make rows irreproducible."""


class _Found(NamedTuple):
    """The result of one chunk.

    Attributes:
        images: (rows, B, C, H, W) in [0, 1].
        labels: (rows, B).
        loss: (rows,).
        enough: (rows,) the loss from which on a row counts as converged.
        iterates: (frames, rows, B, C, H, W).
        notes: per row what is odd about it, or "".
    """

    images: Tensor
    labels: Tensor
    loss: Tensor
    enough: Tensor
    iterates: Tensor
    notes: list[str]


def _learned(seen: Observation, rng: torch.Generator) -> Tensor:
    """Return the images (T, B, C, H, W) that learned inversion guesses, mid-grey where it has no guess."""
    return Lti().run(seen, rng).images.nan_to_num(0.5)


def _search(
    attack: Matching,
    steps: Sequence[SearchStep],
    task: SearchTask,
    rng: torch.Generator,
    learned: Tensor | None = None,
) -> _Found:
    """Search one chunk and return the best guess of each row; a phase starts from the best of the phase before.

    ``learned`` images (rows, B, C, H, W) are where the first phase starts.
    """
    last, shown, number = steps[-1], list[Tensor](), 0
    frames, whole = _frames(attack), attack.iterations
    best = Best(steps[0].begin(attack.start, task, rng, learned))
    for step, iterations in zip(steps, shared_out(whole, len(steps)), strict=True):
        best = Best(best.variables)
        limits = Limits(iterations, attack.restarts, attack.stop_below, attack.chunk)
        walk = evolve if step.search.optimiser == "cma" else descend
        for rows, flat, loss in walk(limits, step, task, best, rng):
            best.offer(rows, flat, loss)
            tell(number / whole)
            if number in frames:
                shown.append(step.pictures(best.variables, task))
            number += 1
        number -= step is not last  # the next phase begins where this one ended
    pictures = last.pictures(best.variables, task)
    shown += [pictures] * (len(frames) - len(shown))  # if the chunk was done early
    targets = last.targets(best.variables, task)
    labels = (targets if targets.dim() == 1 else targets.argmax(1)).view(task.rows, -1)
    iterates = torch.stack(shown[: len(frames)]) if shown else pictures.new_empty(0, *pictures.shape)
    enough = (_CONVERGED * last.search.objective.of_nothing(task.wanted)).clamp_min(_NOISY * last.search.residual)
    enough = enough * last.times
    return _Found(pictures, labels, best.loss, enough, iterates, _noted(last, task, best, pictures))


_CONVERGED = 1e-3
"""A row has converged if its loss is at most this share of a zero guess's distance ..."""
_NOISY = 1.25
"""... or, under known noise, at most this multiple of the distance that the true images would have."""


def shared_out(iterations: int, phases: int) -> list[int]:
    """Return the steps of each phase: an attack with several phases takes as many in all as one with a single phase.

    Example:
        >>> shared_out(601, 2), shared_out(1, 2)
        ([300, 301], [1, 1])
    """
    return [max(1, (number + 1) * iterations // phases - number * iterations // phases) for number in range(phases)]


def _frames(attack: Matching) -> tuple[int, ...]:
    """Return the numbers of steps, over all phases, after which a picture is kept."""
    whole = attack.iterations
    return tuple(dict.fromkeys(round(i * whole / attack.keep) for i in range(attack.keep + 1))) if attack.keep else ()


def _noted(step: SearchStep, task: SearchTask, best: Best, pictures: Tensor) -> list[str]:
    """Return a note for each row whose guess explains the update's direction but not its size, else ""."""
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


def _chosen(found: Sequence[_Found], restarts: int) -> Reconstruction:
    """Return the restart with the least loss of each target, from all chunks."""
    loss = torch.cat([each.loss for each in found])
    ours = loss.view(-1, restarts)
    best = torch.where(ours.isnan(), torch.inf, ours).argmin(1) + torch.arange(len(ours)).to(loss.device) * restarts
    notes = [note for each in found for note in each.notes]
    return Reconstruction(
        images=torch.cat([each.images for each in found])[best],
        labels=torch.cat([each.labels for each in found])[best],
        loss=loss[best],
        converged=(loss <= torch.cat([each.enough for each in found]))[best],
        iterates=torch.cat([each.iterates for each in found], 1)[:, best],
        why=tuple(notes[row] for row in best.tolist()),
    )


def _merged(found: Sequence[Reconstruction], targets: Sequence[int]) -> Reconstruction:
    """Return the results of several groups of targets as one, in the order of all targets."""
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
