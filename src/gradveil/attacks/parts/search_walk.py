"""The two ways through a search space: `descend` follows gradients, `evolve` samples candidates (CMA-ES).

Both yield, iteration by iteration, which rows were tried, the variables tried and their losses. The caller keeps the
best variables of each row in a `Best`, which also tells the walk when a target is done.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.parts.evolution import Evolution
from gradveil.attacks.parts.optimisers import BatchedAdam, BatchedLbfgs, BatchedRmsprop, LearningRate
from gradveil.attacks.parts.search_step import SearchStep
from gradveil.attacks.parts.search_task import SearchTask

Tried = tuple[Tensor, Tensor, Tensor]
"""Rows (R,) of the chunk, their variables (R, size) and their losses (R,)."""


@dataclass(frozen=True)
class Limits:
    """How long a chunk is searched.

    Attributes:
        iterations: steps of the optimiser.
        restarts: rows per target.
        stop_below: a target is done when one of its restarts has a loss below this share of a zero guess's loss.
        chunk: candidates that `evolve` evaluates at once.
    """

    iterations: int
    restarts: int = 1
    stop_below: float = 0.0
    chunk: int = 32


class Best:
    """The best variables of each row so far, by the attacker's own loss."""

    def __init__(self, variables: Tensor) -> None:
        self.variables = variables.detach().clone()
        self.loss = torch.full((len(variables),), torch.inf, dtype=variables.dtype, device=variables.device)

    def offer(self, rows: Tensor, variables: Tensor, loss: Tensor) -> None:
        """Keep the variables of each row whose loss is lower than before; a loss of NaN never is."""
        everything = len(rows) == len(self.loss)
        kept, least = (self.variables, self.loss) if everything else (self.variables[rows], self.loss[rows])
        better = loss < least
        if not bool(better.any()):
            return
        kept, least = torch.where(better[:, None], variables, kept), torch.where(better, loss, least)
        if everything:
            self.variables, self.loss = kept, least
        else:
            self.variables[rows], self.loss[rows] = kept, least

    def unfinished(self, restarts: int, enough: Tensor) -> Tensor:
        """Return a mask (rows,) of the rows of targets none of whose restarts has a loss below ``enough``."""
        unsolved = (self.loss > enough).view(-1, restarts).all(1)
        return unsolved.repeat_interleave(restarts)


def descend(limits: Limits, step: SearchStep, task: SearchTask, best: Best, rng: torch.Generator) -> Iterator[Tried]:
    """Follow gradients. Targets that are done leave, unless the step is compiled for the whole chunk."""
    rows = torch.arange(task.rows, device=best.variables.device)
    optimiser = _optimiser(limits, step, task, best.variables, rng)
    closure = step.closure(task)
    enough = limits.stop_below * step.search.objective.of_nothing(task.wanted)
    for _ in range(limits.iterations):
        before = optimiser.variables
        yield rows, before, optimiser.step(closure)
        if limits.stop_below:
            going = best.unfinished(limits.restarts, enough)
            if not bool(going.any()):
                return
            staying = going[rows]
            if not step.is_compiled and not bool(staying.all()):
                rows = rows[staying]
                optimiser.keep(staying)
                closure = step.closure(task.of(rows))
    yield rows, optimiser.variables, closure(optimiser.variables)[0]


def _optimiser(
    limits: Limits, step: SearchStep, task: SearchTask, variables: Tensor, rng: torch.Generator
) -> BatchedAdam | BatchedLbfgs | BatchedRmsprop:
    search = step.search
    if search.optimiser == "lbfgs":
        return BatchedLbfgs(variables, lr=search.lr)
    rate = LearningRate(search.lr, limits.iterations, search.schedule)
    if search.optimiser == "rmsprop":
        return BatchedRmsprop(variables, rate, factors=step.rates(task))
    project = (lambda flat: step.boxed(flat, task)) if search.boxed else None
    return BatchedAdam(variables, rate, sign=search.sign, noise=search.noise, rng=rng, project=project)


def evolve(limits: Limits, step: SearchStep, task: SearchTask, best: Best, rng: torch.Generator) -> Iterator[Tried]:
    """Sample candidates by CMA-ES, and yield the best of each row's population. Targets that are done leave."""
    search, start = step.search, best.variables
    rows = torch.arange(task.rows, device=start.device)
    evolution = Evolution(start, spread=search.lr, population=search.population, rng=rng)
    enough = limits.stop_below * search.objective.of_nothing(task.wanted)
    yield rows, start, step.losses(start, task)
    for _ in range(limits.iterations):
        asked = evolution.ask()  # (rows, population, variables)
        whose = rows.repeat_interleave(search.population)
        pieces = zip(*(torch.split(part, limits.chunk) for part in (asked.flatten(0, 1), whose)), strict=True)
        losses = torch.cat([step.losses(flat, task.of(some)) for flat, some in pieces]).view(len(rows), -1)
        evolution.tell(losses)
        loss, at = torch.where(losses.isnan(), torch.inf, losses).min(1)
        yield rows, asked[torch.arange(len(rows), device=rows.device), at], loss
        if limits.stop_below:
            staying = best.unfinished(limits.restarts, enough)[rows]
            if not bool(staying.any()):
                return
            rows = rows[staying]
            evolution.keep(staying.tolist())
