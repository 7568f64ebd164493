"""One step of a search by gradient matching: from rows of search variables to their losses and gradients.

`SearchStep.evaluate` is where the time goes. In the order of the code::

    evaluate(flat)                       loss and gradient of each row
        images = layout's slice of flat, or what a generator makes of it
        loss(flat)                       mismatch + priors
            mismatch                     for each round that was seen of a client, mostly one:
                caused(images)               the update that these images would have caused
                    replay(images, labels)   the client's local training, played again, + decoys
                distance of what the known defence would have sent of it from the update seen
            + total variation + BatchNorm statistics + ...
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.parts.compiled import compiled
from gradveil.attacks.parts.local_training import Replay, replaced_outputs
from gradveil.attacks.parts.optimisers import Closure
from gradveil.attacks.parts.priors import batch_norm_distance, group_consistency, squared_norm, total_variation
from gradveil.attacks.parts.search import Search
from gradveil.attacks.parts.search_layout import DECOY_LABELS, DECOYS, IMAGES, LABELS, SearchLayout, output_of
from gradveil.attacks.parts.search_task import SearchTask, added
from gradveil.attacks.parts.separation import OWN
from gradveil.attacks.parts.starts import begin
from gradveil.attacks.parts.statistics import Statistics, watched
from gradveil.errors import ConfigError
from gradveil.networks.grads import example_gradients
from gradveil.networks.space import Space
from gradveil.threat import Observation
from gradveil.types import Tensors

log = logging.getLogger(__name__)


class SearchStep:
    """Loss and gradient of rows of search variables (rows, size), for one phase of a search.

    ``later`` are the steps of the same phase for later rounds of the same clients: one guess must match all rounds.
    """

    def __init__(
        self, search: Search, restarts: int, seen: Observation, replay: Replay, later: "Sequence[SearchStep]" = ()
    ) -> None:
        self.seen, self.replay, self.later = seen, replay, tuple(later)
        self.search, self._restarts = search, restarts
        self._like = next(iter(seen.updates.values()))
        self.device = self._like.device
        self.space = Space(seen.network, seen.shape, self._like)
        self.batch_size = replay.batch_size
        self.maker = search.maker
        self._num_decoys = math.ceil(self.batch_size * search.move.decoys)
        draws = search.move.unknowns
        self._unknowns = {name: draw(1, torch.Generator()).shape[1] for name, draw in draws.items()}
        self._fast: Callable[..., tuple[Tensor, ...]] | None = None
        self._rows = 0

    @property
    def is_compiled(self) -> bool:
        """Whether the step takes chunks of one size only."""
        return self._fast is not None

    @property
    def knows_defence(self) -> bool:
        """Whether guesses are compared as the defence would have sent them, its noise included."""
        move = self.search.move
        parts = (move.noise, move.decoys, move.unknowns, move.outputs)
        return move.sent is not None or any(bool(part) for part in parts)

    def layout(self, task: SearchTask) -> SearchLayout:
        """Return the layout of a row of search variables."""
        classes, decoys = self.seen.num_classes, self._num_decoys
        sizes = {IMAGES: self.batch_size * self.space.size if self.maker is None else self.maker.size}
        if task.labels is None:
            sizes[LABELS] = self.batch_size * classes
        if decoys:
            sizes |= {DECOYS: decoys * self.space.size, DECOY_LABELS: decoys * classes}
        return SearchLayout(sizes | {output_of(name): size for name, size in self._unknowns.items()})

    def begin(self, start: str, task: SearchTask, rng: torch.Generator, learned: Tensor | None = None) -> Tensor:
        """Return the first guesses (rows, size); ``learned`` images (rows, B, C, H, W) are taken as they are."""
        if learned is not None:
            first = self.space.from_pixels(learned).reshape(task.rows, -1)
        elif self.maker is None:
            first = begin(start, self.seen, task.labels, task.rows, self.batch_size, self.space, rng)
        else:
            first = self.maker.begin(task.rows, rng)
        layout = self.layout(task)
        drawn = [layout.sizes[name] for name in (LABELS, DECOYS, DECOY_LABELS) if name in layout]
        parts = [first, *(torch.randn(task.rows, size, generator=rng) for size in drawn)]
        parts += [draw(task.rows, rng) for draw in self.search.move.unknowns.values()]
        return torch.cat([part.to(self._like) for part in parts], 1)

    def closure(self, task: SearchTask) -> Closure:
        """Return the function that an optimiser calls: from variables to losses and gradients."""
        if self._fast is None:
            return lambda flat: self.evaluate(flat, task)
        fast, rows = self._fast, task.rows
        padded = [_padded(tensor, self._rows).contiguous() for tensor in task.tensors]

        def run(flat: Tensor) -> tuple[Tensor, Tensor]:
            loss, gradient = fast(_padded(flat, self._rows), *padded)
            return loss[:rows], gradient[:rows]

        return run

    def evaluate(self, flat: Tensor, task: SearchTask) -> tuple[Tensor, Tensor]:
        """Return the losses (rows,) and their gradients (rows, size)."""
        leaf = flat.detach().requires_grad_()
        loss = self._loss(leaf, task)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    def losses(self, flat: Tensor, task: SearchTask) -> Tensor:
        """Return the losses (rows,) alone, for optimisers that need no gradient."""
        return self._loss(flat.detach(), task).detach()

    def _loss(self, leaf: Tensor, task: SearchTask) -> Tensor:
        """Return the distance between guess and update, plus the penalties on the guess."""
        priors, rows = self.search.priors, len(leaf)
        images = self._images(leaf, task)
        pixels = self.space.to_pixels(images)
        loss, unlike = self._mismatch(pixels, leaf, task)
        if priors.tv:
            loss = loss + priors.tv * total_variation(images).view(rows, -1).mean(1)
        if priors.l2:
            loss = loss + priors.l2 * squared_norm(images).view(rows, -1).mean(1)
        if priors.learned is not None:
            loss = loss + priors.learned(pixels).view(rows, -1).mean(1)
        if unlike is not None:
            loss = loss + priors.batch_norm * unlike
        if priors.group:
            groups = images.view(-1, self._restarts, self.batch_size, *self.seen.shape)  # (targets, restarts, B, ...)
            apart = group_consistency(groups.transpose(0, 1).flatten(1, 2))  # (restarts, targets * B)
            loss = loss + priors.group * apart.view(self._restarts, -1, self.batch_size).mean(2).T.flatten()
        if self.maker is not None:
            loss = loss + self.maker.penalty(self.layout(task).part(leaf, IMAGES), pixels)
        return loss

    @property
    def times(self) -> int:
        """How often the mean distance of the rounds counts: likelihoods of noise add up over rounds, others do not."""
        return 1 + len(self.later) if self.search.move.noise and not self.search.move.adds_up else 1

    def _mismatch(self, pixels: Tensor, flat: Tensor, task: SearchTask) -> tuple[Tensor, Tensor | None]:
        """Return the distances (rows,) of updates and, if any are known, of BatchNorm statistics, over all rounds."""
        steps, tasks = (self, *self.later), (task, *task.later)
        both = [step._caused_and_statistics(pixels, flat, own) for step, own in zip(steps, tasks, strict=True)]
        caused = tuple(gradient for gradient, _ in both)
        known = [(found, own.statistics) for (_, found), own in zip(both, tasks, strict=True) if own.statistics]
        unlike = torch.stack([batch_norm_distance(*pair) for pair in known]).mean(0) if known else None
        if self.search.move.adds_up:
            caused, steps, tasks = (added(caused),), (self,), (replace(task, wanted=added([t.wanted for t in tasks])),)
        apart = [
            step.search.objective(step._sent(guess, own.wanted), own.wanted)
            for step, guess, own in zip(steps, caused, tasks, strict=True)
        ]
        return (torch.stack(apart).mean(0) * self.times if len(apart) > 1 else apart[0]), unlike

    def _sent(self, guess: Tensors, wanted: Tensors) -> Tensors:
        """Return what the known defence would have sent of a guess's gradient."""
        return guess if self.search.move.sent is None else self.search.move.sent(guess, wanted)

    def _caused_and_statistics(self, pixels: Tensor, flat: Tensor, task: SearchTask) -> tuple[Tensors, Statistics]:
        """Return the gradient that the guess would have caused, and its BatchNorm statistics if the task has any."""
        rows, network = len(flat), self.replay.network
        with watched(network) as statistics:
            caused = self._caused(pixels, flat, task)
            if not task.statistics:
                return caused, {}
            if not self.replay.is_plain and not self.replay.mixes:
                with replaced_outputs(network, self.outputs(flat, task), self.batch_size):
                    network(pixels)
            if self.replay.is_plain or not self.replay.mixes:
                return caused, statistics(rows)
        groups = pixels.view(rows, -1, *self.seen.shape)
        return caused, _trained_statistics(network, groups, self.outputs(flat, task))

    def guessed(self, pixels: Tensor, flat: Tensor, task: SearchTask) -> Tensors:
        """Return the mean gradients (rows, ...) that images in [0, 1] would have caused, as far as the attacker knows.

        Labels and all other searched parts are read from ``flat``.
        """
        return self._sent(self._caused(pixels, flat, task), task.wanted)

    def _caused(self, pixels: Tensor, flat: Tensor, task: SearchTask) -> Tensors:
        """Return the mean gradients (rows, ...) before the defence changed them, with those of decoys."""
        outputs = self.outputs(flat, task)
        targets = self.targets(flat, task)
        guess = self.replay(pixels, targets, task.wanted, outputs)
        decoys = self.decoys(flat, targets, task)
        if decoys is not None:
            size = self._num_decoys
            with replaced_outputs(self.replay.network, outputs, size):
                theirs = example_gradients(self.replay.network, *decoys, group_size=size, create_graph=True)
            share = size / self.batch_size
            alone = {own: guess[own.removeprefix(OWN)] for own in task.wanted if own.startswith(OWN)}
            guess = {name: tensor + share * theirs[name] for name, tensor in guess.items()} | alone
        return guess

    def targets(self, flat: Tensor, task: SearchTask) -> Tensor:
        """Return the labels (rows * B,) of the guesses, or soft ones (rows * B, classes) if they are searched."""
        if task.labels is not None:
            return task.labels.flatten(0, 1)
        return self.layout(task).part(flat, LABELS).reshape(-1, self.seen.num_classes).softmax(1)

    def decoys(self, flat: Tensor, targets: Tensor, task: SearchTask) -> tuple[Tensor, Tensor] | None:
        """Return pixels and soft labels of the images that the defence mixes in, or None if there are none.

        ``targets`` are the private images' labels, (rows * B,) or (rows * B, classes).
        """
        if not self._num_decoys:
            return None
        layout, classes = self.layout(task), self.seen.num_classes
        pixels = self.space.to_pixels(layout.part(flat, DECOYS).reshape(-1, *self.seen.shape))
        soft = layout.part(flat, DECOY_LABELS).reshape(-1, classes).softmax(1)
        each, rest = divmod(self._num_decoys, self.batch_size)
        if rest:  # it is unknown which decoy belongs to which image
            return pixels, soft
        share = self.search.move.own_label
        own = F.one_hot(targets, classes).to(soft) if targets.dim() == 1 else targets
        return pixels, (1 - share) * soft + share * own.repeat_interleave(each, 0)

    def outputs(self, flat: Tensor, task: SearchTask) -> dict[str, Tensor]:
        """Return the outputs (rows, numbers) of secret modules: those that are known, and those that are searched."""
        layout = self.layout(task)
        return {**task.outputs, **{name: layout.part(flat, output_of(name)) for name in self._unknowns}}

    def _images(self, flat: Tensor, task: SearchTask) -> Tensor:
        """Return normalised images (rows * B, C, H, W)."""
        own = self.layout(task).part(flat, IMAGES)
        if self.maker is None:
            return own.reshape(-1, *self.seen.shape)
        targets = self.targets(flat, task)
        grouped = targets.view(len(flat), self.batch_size, *targets.shape[1:])
        return self.space.from_pixels(self.maker.pictures(own, grouped))

    @torch.no_grad()
    def pictures(self, flat: Tensor, task: SearchTask) -> Tensor:
        """Return the guesses as images (rows, B, C, H, W) in [0, 1]."""
        images = self._images(flat, task).view(len(flat), -1, *self.seen.shape)
        return self.space.to_pixels(images).clamp(0, 1)

    def boxed(self, flat: Tensor, task: SearchTask) -> Tensor:
        """Return the variables with all pixels moved into [0, 1]."""
        columns = self.layout(task).slice_of(IMAGES)
        images = self.space.box(flat[:, columns].contiguous())
        return torch.cat([images, flat[:, columns.stop :]], 1) if flat.shape[1] > columns.stop else images

    def rates(self, task: SearchTask) -> Tensor:
        """Return a factor on the learning rate per variable: the maker's for its numbers and the labels, else 1."""
        layout = self.layout(task)
        factors = torch.ones(layout.size)
        if self.maker is not None:
            factors[layout.slice_of(IMAGES)] = self.maker.rates()
            if LABELS in layout:
                factors[layout.slice_of(LABELS)] = self.maker.label_rate
        return factors.to(self._like)

    def compile_for(self, task: SearchTask, *, must: bool) -> None:
        """Compile `evaluate` for chunks of this size; smaller ones are padded. If that fails, raise if ``must``."""

        def function(flat: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self.evaluate(flat, task.with_tensors(tensors))

        flat = self.begin("grey", task, torch.Generator().manual_seed(0))
        self.evaluate(flat, task)  # once without compiling, so that gradients are checked before they are traced
        try:
            self._fast = compiled(function, (flat, *(tensor.contiguous() for tensor in task.tensors)))
            self._rows = task.rows
        except Exception as error:
            if must:
                raise ConfigError(
                    f"compile=on needs a C++ compiler and a network that torch can trace, but {type(error).__name__}: "
                    f"{str(error)[:300]}. Use compile=off."
                ) from error
            log.info("The search is not compiled: %s", error)


def _trained_statistics(network: nn.Module, groups: Tensor, outputs: Tensors) -> Statistics:
    """Return the statistics of each group (rows, B, C, H, W) if every BatchNorm normalises by the group itself."""
    found = []
    for row, images in enumerate(groups):
        own = {name: value[row : row + 1] for name, value in outputs.items()}
        with watched(network) as statistics, replaced_outputs(network, own):
            network(images)
            found.append(statistics(1))
    pairs = {name: [each[name] for each in found] for name in found[0]}
    return {
        name: (torch.cat([mean for mean, _ in each]), torch.cat([variance for _, variance in each]))
        for name, each in pairs.items()
    }


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Repeat the last row until there are ``rows``."""
    if len(tensor) == rows:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])
