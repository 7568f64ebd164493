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
from gradveil.attacks.parts.adaptive import Answer, answers, turned
from gradveil.attacks.parts.labels import bias_excess
from gradveil.attacks.parts.local_training import WAYS, Replay, replay_of
from gradveil.attacks.parts.search import PARTS, Search, restricted
from gradveil.attacks.parts.search_step import SearchStep, SearchTask
from gradveil.attacks.parts.search_walk import Best, Limits, descend, evolve
from gradveil.attacks.parts.starts import NEEDS, check_start
from gradveil.progress import part, tell
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Matching(Attack):
    """Base of attacks by gradient matching. A subclass implements `search` and `labels_of`.

    Attributes:
        iterations: steps of the optimiser.
        restarts: searches from different starts; the one with the least loss is kept.
        start: where a search begins; see `gradveil.attacks.parts.starts`.
        local: how several local steps are simulated: unroll, line or once.
        stop_below: a target is done when one of its restarts has a loss below this share of a zero guess's loss.
        chunk: searches (of cma: candidates) evaluated at once; more do not fit a CPU's cache.
        keep: iterates kept for the report, in addition to the start.
        compile: on, off, or auto, which compiles long searches of single steps if there is a compiler.
        adapt: which countermove to play against a known defence; the first by default, ``none`` for none.
        parts: which tensors are matched: all, those of convolutions or those of linear layers.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})
    replays: ClassVar[bool] = True

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
    replay = replace(replay_of(seen, attack.local, rng), penalties=search.move.penalties)
    rows = torch.arange(seen.num_targets).repeat_interleave(restarts)  # the target of each row
    known = None if labels is None else _dealt(labels.cpu()[rows], replay, rng)
    wanted = seen.mean_gradients if search.move.look is None else search.move.look(seen.mean_gradients)
    targets = SearchTask(wanted, search.priors.statistics, None, search.move.outputs)
    steps = [SearchStep(phase, restarts, seen, replay) for phase in search.phases]
    device = steps[-1].device

    def task_of(some: Tensor) -> SearchTask:
        task = targets.of(rows[some].to(device))
        return task if known is None else replace(task, labels=known[some].to(device))

    size = min(max(1, attack.chunk // restarts) * restarts, len(rows))
    chunks = torch.split(torch.arange(len(rows)), size)
    if _compiles(attack, replay, len(chunks)):
        for step in steps:
            step.compile_for(task_of(chunks[0]), must=attack.compile == "on")
    found = []
    for number, some in enumerate(chunks):
        with part(number, len(chunks)):
            found.append(_search(attack, steps, task_of(some), rng))
    answer = "" if play.move is None or play.move.decode else play.name
    return replace(_chosen(found, restarts), steps=_frames(attack, len(steps)), answers=(answer,) * seen.num_targets)


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


def _search(attack: Matching, steps: Sequence[SearchStep], task: SearchTask, rng: torch.Generator) -> _Found:
    """Search one chunk and return the best guess of each row; a phase starts from the best of the phase before."""
    last, shown, number = steps[-1], list[Tensor](), 0
    frames, whole = _frames(attack, len(steps)), attack.iterations * len(steps)
    limits = Limits(attack.iterations, attack.restarts, attack.stop_below, attack.chunk)
    best = Best(steps[0].begin(attack.start, task, rng))
    for step in steps:
        best = Best(best.variables)
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
    return _Found(pictures, labels, best.loss, enough, iterates, _noted(last, task, best, pictures))


_CONVERGED = 1e-3
"""A row has converged if its loss is at most this share of a zero guess's distance ..."""
_NOISY = 1.25
"""... or, under known noise, at most this multiple of the distance that the true images would have."""


def _frames(attack: Matching, phases: int) -> tuple[int, ...]:
    """Return the numbers of steps, over all phases, after which a picture is kept."""
    whole = attack.iterations * phases
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
