"""What a search by gradient matching is made of: how it goes about, what it matches, and its step."""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradveil.attacks.parts.compiled import compiled
from gradveil.attacks.parts.local_training import Replay
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import Closure
from gradveil.attacks.parts.priors import batch_norm_distance, group_consistency, squared_norm, total_variation
from gradveil.attacks.parts.space import Space
from gradveil.attacks.parts.starts import begin
from gradveil.attacks.parts.statistics import Statistics, watched
from gradveil.defences.base import Countermove
from gradveil.errors import ConfigError
from gradveil.grads import example_gradients
from gradveil.threat import Observation
from gradveil.types import Tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Priors:
    """Weights of what an attacker believes of images, in normalised units; see `gradveil.attacks.parts.priors`.

    Attributes:
        tv: total variation.
        l2: mean square of the pixels.
        batch_norm: distance of the guess's BatchNorm statistics from ``statistics``.
        group: distance of each restart's guess from the mean of the target's restarts.
        statistics: what ``batch_norm`` is the distance from.
    """

    tv: float = 0.0
    l2: float = 0.0
    batch_norm: float = 0.0
    group: float = 0.0
    statistics: Statistics = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """How guesses are searched; see the attacks for the published settings.

    Attributes:
        objective: how far a guess's update is from the one seen.
        priors: penalties on the guess itself.
        optimiser: adam or lbfgs.
        lr: its rate.
        schedule: constant, steps or cosine (adam).
        sign: none, hard or soft (adam): what becomes of the gradient first.
        noise: of standard deviation this times the rate, added to each step (adam).
        boxed: whether guesses are kept inside [0, 1].
        move: the answer to a defence that the attacker knows: what it makes of a guess, hides and leaves to compare.
        first: a search of as many steps, whose best guesses this one starts from.
        residual: the distance that the truth itself is expected to have, under noise.
    """

    objective: Objective = field(default_factory=Objective)
    priors: Priors = field(default_factory=Priors)
    optimiser: str = "adam"
    lr: float = 0.1
    schedule: str = "steps"
    sign: str = "hard"
    noise: float = 0.0
    boxed: bool = True
    move: Countermove = field(default_factory=Countermove)
    first: "Search | None" = None
    residual: float = 0.0

    @property
    def phases(self) -> "list[Search]":
        """The searches to run one after the other; this one is the last."""
        return [self] if self.first is None else [*self.first.phases, self]


def restricted(search: Search, parts: str, network: nn.Module, names: Iterable[str]) -> Search:
    """The search that matches only the tensors of some layers, in all its phases.

    Args:
        search: as it is for all tensors; a tensor that it leaves out stays out.
        parts: one of `PARTS`; ``convolutions`` and ``linear`` are weights and biases of such layers alone.
        network: whose layers they are.
        names: of all tensors that there are to match.
    """
    if parts == "all":
        return search
    kind = nn.Linear if parts == "linear" else _ConvNd
    kept = {
        f"{name}.{key}" if name else key
        for name, layer in network.named_modules()
        if isinstance(layer, kind)
        for key, _ in layer.named_parameters(recurse=False)
    }
    return _keeping(search, kept, parts, list(names))


PARTS = ("all", "convolutions", "linear")


def _keeping(search: Search, kept: Container[str], parts: str, names: Sequence[str]) -> Search:
    weights = {name: search.objective.weights.get(name, 1.0) if name in kept else 0.0 for name in names}
    if not any(weights.values()):
        raise ConfigError(f"parts={parts} must leave some tensor to match, got none in this network. Use parts=all.")
    first = None if search.first is None else _keeping(search.first, kept, parts, names)
    return replace(search, objective=replace(search.objective, weights=weights), first=first)


@dataclass(frozen=True)
class Task:
    """One chunk: what to match, row by row.

    Attributes:
        wanted: mean gradients (rows, ...).
        statistics: of BatchNorm, (rows, channels).
        labels: (rows, B), or soft ones (rows, B, classes), where they are fixed.
    """

    wanted: Tensors
    statistics: Statistics
    labels: Tensor | None

    @property
    def rows(self) -> int:
        """How many searches these are."""
        return len(next(iter(self.wanted.values())))

    @property
    def tensors(self) -> list[Tensor]:
        """All of it as a list."""
        pairs = [tensor for pair in self.statistics.values() for tensor in pair]
        return [*self.wanted.values(), *pairs, *([] if self.labels is None else [self.labels])]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Task":
        """The inverse of ``tensors``."""
        rest = iter(tensors)
        return Task(
            {name: next(rest) for name in self.wanted},
            {name: (next(rest), next(rest)) for name in self.statistics},
            None if self.labels is None else next(rest),
        )

    def of(self, rows: Tensor) -> "Task":
        """The task of some rows."""
        return self.with_tensors([tensor[rows] for tensor in self.tensors])


class Step:
    """Loss and gradient of guesses (rows, variables): the part that takes the time."""

    def __init__(self, search: Search, restarts: int, seen: Observation, replay: Replay) -> None:
        self.seen, self.replay = seen, replay
        self.search, self._restarts = search, restarts
        self._like = next(iter(seen.updates.values()))
        self.device = self._like.device
        self.space = Space(seen.network, seen.shape, self._like)
        self.batch_size = replay.batch_size
        self.num_pixels = self.batch_size * self.space.size
        self._num_decoys = self.batch_size * search.move.decoys
        self._fast: Callable[..., tuple[Tensor, ...]] | None = None
        self._rows = 0

    @property
    def is_compiled(self) -> bool:
        """Whether it takes chunks of one size only."""
        return self._fast is not None

    @property
    def knows_defence(self) -> bool:
        """Whether guesses are compared as the defence would have sent them."""
        return self.search.move.sent is not None or bool(self.search.move.decoys)

    def begin(self, start: str, task: Task, rng: torch.Generator) -> Tensor:
        """First guesses: images, and logits of soft labels where labels are searched."""
        parts = [begin(start, self.seen, task.labels, task.rows, self.batch_size, self.space, rng).to(self._like)]
        images = self.batch_size if task.labels is None else 0
        sizes = [images * self.seen.num_classes] * bool(images)
        sizes += [self._num_decoys * size for size in (self.space.size, self.seen.num_classes)] * bool(self._num_decoys)
        parts += [torch.randn(task.rows, size, generator=rng).to(self._like) for size in sizes]
        return torch.cat(parts, 1)

    def split(self, flat: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalised images (rows * B, C, H, W), and labels (rows * B,) or soft ones (rows * B, classes)."""
        images = flat[:, : self.num_pixels].reshape(-1, *self.seen.shape)
        if labels is not None:
            return images, labels.flatten(0, 1)
        logits = flat[:, self.num_pixels :][:, : self.batch_size * self.seen.num_classes]
        return images, logits.reshape(-1, self.seen.num_classes).softmax(1)

    def decoys(self, flat: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Pixels and soft labels of the images that the defence hides, which stand last; None without any.

        ``targets`` are the private images' labels, (rows * B,) or (rows * B, classes).
        """
        if not self._num_decoys:
            return None
        sizes = [self._num_decoys * size for size in (self.space.size, self.seen.num_classes)]
        images, logits = torch.split(flat[:, -sum(sizes) :], sizes, 1)
        pixels = self.space.to_pixels(images.reshape(-1, *self.seen.shape))
        soft = logits.reshape(-1, self.seen.num_classes).softmax(1)
        share = self.search.move.own_label
        own = F.one_hot(targets, self.seen.num_classes).to(soft) if targets.dim() == 1 else targets
        return pixels, (1 - share) * soft + share * own.repeat_interleave(self.search.move.decoys, 0)

    def pictures(self, flat: Tensor) -> Tensor:
        """Images (rows, B, C, H, W) in [0, 1]."""
        return self.space.to_pixels(flat[:, : self.num_pixels].view(len(flat), -1, *self.seen.shape)).clamp(0, 1)

    def guessed(
        self, pixels: Tensor, targets: Tensor, wanted: Tensors, decoys: tuple[Tensor, Tensor] | None = None
    ) -> Tensors:
        """What images in [0, 1] with these labels would have led to, as far as the attacker knows the client."""
        guess = self.replay(pixels, targets, wanted)
        if decoys is not None:
            size = len(decoys[0]) // len(pixels) * self.batch_size
            theirs = example_gradients(self.replay.network, *decoys, group_size=size, create_graph=True)
            guess = {name: tensor + self.search.move.decoys * theirs[name] for name, tensor in guess.items()}
        return guess if self.search.move.sent is None else self.search.move.sent(guess, wanted)

    def closure(self, task: Task) -> Closure:
        """The function that an optimiser calls."""
        if self._fast is None:
            return lambda flat: self._evaluate(flat, task)
        fast, rows = self._fast, task.rows
        padded = [_padded(tensor, self._rows).contiguous() for tensor in task.tensors]

        def run(flat: Tensor) -> tuple[Tensor, Tensor]:
            loss, gradient = fast(_padded(flat, self._rows), *padded)
            return loss[:rows], gradient[:rows]

        return run

    def compile_for(self, task: Task, *, must: bool) -> None:
        """Compile for chunks of this size; smaller ones are padded. Where that fails, ``must`` makes it an error."""

        def function(flat: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self._evaluate(flat, task.with_tensors(tensors))

        flat = self.begin("grey", task, torch.Generator().manual_seed(0))
        self._evaluate(flat, task)  # once as it is, so that gradients have been checked before they are traced
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

    def _evaluate(self, flat: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        priors, rows = self.search.priors, len(flat)
        leaf = flat.detach().requires_grad_()
        images, targets = self.split(leaf, task.labels)
        pixels = self.space.to_pixels(images)
        with watched(self.seen.network) as statistics:
            guess = self.guessed(pixels, targets, task.wanted, self.decoys(leaf, targets))
            if task.statistics and not self.replay.is_plain:
                self.seen.network(pixels)
            found = statistics(rows) if task.statistics else {}
        if task.statistics and self.replay.mixes:
            found = _trained_statistics(self.replay.network, pixels.view(rows, -1, *self.seen.shape))
        loss = self.search.objective(guess, task.wanted)
        if priors.tv:
            loss = loss + priors.tv * total_variation(images).view(rows, -1).mean(1)
        if priors.l2:
            loss = loss + priors.l2 * squared_norm(images).view(rows, -1).mean(1)
        if task.statistics:
            loss = loss + priors.batch_norm * batch_norm_distance(found, task.statistics)
        if priors.group:
            groups = images.view(-1, self._restarts, self.batch_size, *self.seen.shape)  # (targets, restarts, B, ...)
            apart = group_consistency(groups.transpose(0, 1).flatten(1, 2))  # (restarts, targets * B)
            loss = loss + priors.group * apart.view(self._restarts, -1, self.batch_size).mean(2).T.flatten()
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def _trained_statistics(network: nn.Module, groups: Tensor) -> Statistics:
    """Those of each group (rows, B, C, H, W) where every BatchNorm takes its own from the group."""
    found = []
    for images in groups:
        with watched(network) as statistics:
            network(images)
            found.append(statistics(1))
    pairs = {name: [each[name] for each in found] for name in found[0]}
    return {
        name: (torch.cat([mean for mean, _ in each]), torch.cat([variance for _, variance in each]))
        for name, each in pairs.items()
    }


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """Repeat the last row up to ``rows``."""
    if len(tensor) == rows:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])
