"""What a search by gradient matching is made of: how it goes about, what it matches, and its step."""

import logging
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradveil.attacks.parts.compiled import compiled
from gradveil.attacks.parts.local_training import Replay, replaced_outputs
from gradveil.attacks.parts.makers import Maker
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import Closure
from gradveil.attacks.parts.priors import batch_norm_distance, group_consistency, squared_norm, total_variation
from gradveil.attacks.parts.starts import begin
from gradveil.attacks.parts.statistics import Statistics, watched
from gradveil.defences.countermove import Countermove
from gradveil.errors import ConfigError
from gradveil.networks.grads import example_gradients
from gradveil.networks.space import Space
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
        optimiser: adam, lbfgs, rmsprop or cma (whose first standard deviation is the rate).
        lr: its rate.
        schedule: constant, steps or cosine (adam, rmsprop).
        sign: none, hard or soft (adam): what becomes of the gradient first.
        noise: of standard deviation this times the rate, added to each step (adam).
        boxed: whether guesses are kept inside [0, 1].
        move: the answer to a defence that the attacker knows: what it makes of a guess, hides and leaves to compare.
        first: a search of as many steps, whose best guesses this one starts from.
        residual: the distance that the truth itself is expected to have, under noise.
        maker: what makes images of the numbers that are searched; None searches pixels.
        population: candidates a step (cma).
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
    maker: Maker | None = None
    population: int = 1

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
    everything = {**search.objective.weights, **weights}  # what a countermove carries beside the tensors stays out
    return replace(search, objective=replace(search.objective, weights=everything), first=first)


@dataclass(frozen=True)
class SearchTask:
    """One chunk: what to match, row by row.

    Attributes:
        wanted: mean gradients (rows, ...).
        statistics: of BatchNorm, (rows, channels).
        labels: (rows, B), or soft ones (rows, B, classes), where they are fixed.
        outputs: of modules that are secret, but known, (rows, numbers).
    """

    wanted: Tensors
    statistics: Statistics
    labels: Tensor | None
    outputs: Tensors = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many searches these are."""
        return len(next(iter(self.wanted.values())))

    @property
    def tensors(self) -> list[Tensor]:
        """All of it as a list."""
        pairs = [tensor for pair in self.statistics.values() for tensor in pair]
        labels = [] if self.labels is None else [self.labels]
        return [*self.wanted.values(), *pairs, *labels, *self.outputs.values()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "SearchTask":
        """The inverse of ``tensors``."""
        rest = iter(tensors)
        return SearchTask(
            {name: next(rest) for name in self.wanted},
            {name: (next(rest), next(rest)) for name in self.statistics},
            None if self.labels is None else next(rest),
            {name: next(rest) for name in self.outputs},
        )

    def of(self, rows: Tensor) -> "SearchTask":
        """The task of some rows."""
        return self.with_tensors([tensor[rows] for tensor in self.tensors])


class SearchStep:
    """Loss and gradient of guesses (rows, variables): the part that takes the time."""

    def __init__(self, search: Search, restarts: int, seen: Observation, replay: Replay) -> None:
        self.seen, self.replay = seen, replay
        self.search, self._restarts = search, restarts
        self._like = next(iter(seen.updates.values()))
        self.device = self._like.device
        self.space = Space(seen.network, seen.shape, self._like)
        self.batch_size = replay.batch_size
        self.maker = search.maker
        self.num_pixels = self.batch_size * self.space.size if self.maker is None else self.maker.size
        self._num_decoys = math.ceil(self.batch_size * search.move.decoys)
        draws = search.move.unknowns
        self._unknowns = {name: draw(1, torch.Generator()).shape[1] for name, draw in draws.items()}
        self._fast: Callable[..., tuple[Tensor, ...]] | None = None
        self._rows = 0

    @property
    def is_compiled(self) -> bool:
        """Whether it takes chunks of one size only."""
        return self._fast is not None

    @property
    def knows_defence(self) -> bool:
        """Whether guesses are compared as the defence would have sent them."""
        move = self.search.move
        return move.sent is not None or bool(move.decoys) or bool(move.unknowns) or bool(move.outputs)

    def begin(self, start: str, task: SearchTask, rng: torch.Generator) -> Tensor:
        """First guesses: images, logits of soft labels where labels are searched, decoys, secret outputs."""
        if self.maker is None:
            first = begin(start, self.seen, task.labels, task.rows, self.batch_size, self.space, rng)
        else:
            first = self.maker.begin(task.rows, rng)
        parts = [first.to(self._like)]
        images = self.batch_size if task.labels is None else 0
        sizes = [images * self.seen.num_classes] * bool(images)
        sizes += [self._num_decoys * size for size in (self.space.size, self.seen.num_classes)] * bool(self._num_decoys)
        parts += [torch.randn(task.rows, size, generator=rng).to(self._like) for size in sizes]
        parts += [draw(task.rows, rng).to(self._like) for draw in self.search.move.unknowns.values()]
        return torch.cat(parts, 1)

    def targets(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """The guesses' labels (rows * B,), or soft ones (rows * B, classes) where they are searched."""
        if labels is not None:
            return labels.flatten(0, 1)
        logits = flat[:, self.num_pixels :][:, : self.batch_size * self.seen.num_classes]
        return logits.reshape(-1, self.seen.num_classes).softmax(1)

    def decoys(self, flat: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Pixels and soft labels of the images that the defence hides; None without any.

        ``targets`` are the private images' labels, (rows * B,) or (rows * B, classes).
        """
        if not self._num_decoys:
            return None
        sizes = [self._num_decoys * size for size in (self.space.size, self.seen.num_classes)]
        end = flat.shape[1] - sum(self._unknowns.values())
        images, logits = torch.split(flat[:, end - sum(sizes) : end], sizes, 1)
        pixels = self.space.to_pixels(images.reshape(-1, *self.seen.shape))
        soft = logits.reshape(-1, self.seen.num_classes).softmax(1)
        each, rest = divmod(self._num_decoys, self.batch_size)
        if rest:  # nobody can say whose they are
            return pixels, soft
        share = self.search.move.own_label
        own = F.one_hot(targets, self.seen.num_classes).to(soft) if targets.dim() == 1 else targets
        return pixels, (1 - share) * soft + share * own.repeat_interleave(each, 0)

    def outputs(self, flat: Tensor, task: SearchTask) -> dict[str, Tensor]:
        """Outputs (rows, numbers) of secret modules: those searched, which stand last, and those known."""
        sizes = list(self._unknowns.values())
        searched = torch.split(flat[:, flat.shape[1] - sum(sizes) :], sizes, 1)
        return {**task.outputs, **dict(zip(self._unknowns, searched, strict=True))}

    def _images(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """Normalised images (rows * B, C, H, W)."""
        own = flat[:, : self.num_pixels]
        if self.maker is None:
            return own.reshape(-1, *self.seen.shape)
        told = self.targets(flat, labels)
        grouped = told.view(len(flat), self.batch_size, *told.shape[1:])
        return self.space.from_pixels(self.maker.pictures(own, grouped))

    @torch.no_grad()
    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """Images (rows, B, C, H, W) in [0, 1]."""
        images = self._images(flat, labels).view(len(flat), -1, *self.seen.shape)
        return self.space.to_pixels(images).clamp(0, 1)

    def rates(self, flat: Tensor, task: SearchTask) -> Tensor:
        """Factors on the rate for each variable: the maker's for its own and for searched labels, else 1."""
        factors = torch.ones(flat.shape[1])
        if self.maker is not None:
            factors[: self.num_pixels] = self.maker.rates()
            if task.labels is None:
                factors[self.num_pixels :][: self.batch_size * self.seen.num_classes] = self.maker.label_rate
        return factors.to(flat)

    def guessed(self, pixels: Tensor, flat: Tensor, task: SearchTask) -> Tensors:
        """What images in [0, 1] would have led to, as far as the attacker knows the client.

        ``flat`` has their labels, and all else that is searched.
        """
        wanted, outputs = task.wanted, self.outputs(flat, task)
        targets = self.targets(flat, task.labels)
        guess = self.replay(pixels, targets, wanted, outputs)
        decoys = self.decoys(flat, targets)
        if decoys is not None:
            size = self._num_decoys
            with replaced_outputs(self.replay.network, outputs, size):
                theirs = example_gradients(self.replay.network, *decoys, group_size=size, create_graph=True)
            share = size / self.batch_size
            guess = {name: tensor + share * theirs[name] for name, tensor in guess.items()}
        return guess if self.search.move.sent is None else self.search.move.sent(guess, wanted)

    def closure(self, task: SearchTask) -> Closure:
        """The function that an optimiser calls."""
        if self._fast is None:
            return lambda flat: self._evaluate(flat, task)
        fast, rows = self._fast, task.rows
        padded = [_padded(tensor, self._rows).contiguous() for tensor in task.tensors]

        def run(flat: Tensor) -> tuple[Tensor, Tensor]:
            loss, gradient = fast(_padded(flat, self._rows), *padded)
            return loss[:rows], gradient[:rows]

        return run

    def compile_for(self, task: SearchTask, *, must: bool) -> None:
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

    def _evaluate(self, flat: Tensor, task: SearchTask) -> tuple[Tensor, Tensor]:
        leaf = flat.detach().requires_grad_()
        loss = self._loss(leaf, task)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    def losses(self, flat: Tensor, task: SearchTask) -> Tensor:
        """(rows,) losses alone, for optimisers that need no gradient."""
        return self._loss(flat.detach(), task).detach()

    def _loss(self, leaf: Tensor, task: SearchTask) -> Tensor:
        priors, rows = self.search.priors, len(leaf)
        images = self._images(leaf, task.labels)
        pixels = self.space.to_pixels(images)
        with watched(self.seen.network) as statistics:
            guess = self.guessed(pixels, leaf, task)
            if task.statistics and not self.replay.is_plain:
                with replaced_outputs(self.seen.network, self.outputs(leaf, task), self.batch_size):
                    self.seen.network(pixels)
            found = statistics(rows) if task.statistics else {}
        if task.statistics and self.replay.mixes:
            groups = pixels.view(rows, -1, *self.seen.shape)
            found = _trained_statistics(self.replay.network, groups, self.outputs(leaf, task))
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
        if self.maker is not None:
            loss = loss + self.maker.penalty(leaf[:, : self.num_pixels], pixels)
        return loss


def _trained_statistics(network: nn.Module, groups: Tensor, outputs: Tensors) -> Statistics:
    """Those of each group (rows, B, C, H, W) where every BatchNorm takes its own from the group."""
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
    """Repeat the last row up to ``rows``."""
    if len(tensor) == rows:
        return tensor
    return torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])
