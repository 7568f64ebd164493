"""Optimisers for many independent problems at once: row t of the variables belongs to problem t.

On each row alone, `BatchedAdam` equals `torch.optim.Adam`, `BatchedRmsprop` equals `torch.optim.RMSprop`, and
`BatchedLbfgs` equals `torch.optim.LBFGS` without line search. Rows that are done can be dropped (`keep`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import UnknownNameError

SCHEDULES = ("constant", "steps", "cosine")
SIGNS = ("none", "hard", "soft")
Closure = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from variables (T, D) to losses (T,) and their gradients (T, D)."""


def decay(schedule: str, step: int, steps: int) -> float:
    """Return the factor on the learning rate at a step, counted from 0.

    ``constant``: 1. ``steps``: times 0.1 after 3/8, 5/8 and 7/8 of the steps (GS). ``cosine``: half a cosine, with a
    warm-up over the first 50 steps (breaching's modern settings).

    Example:
        >>> [decay("steps", s, 8) for s in (0, 3, 5, 7)]
        [1.0, 0.1, 0.01, 0.001]
    """
    if schedule == "constant":
        return 1.0
    if schedule == "steps":
        passed = sum(step >= math.floor(steps * share) for share in (3 / 8, 5 / 8, 7 / 8))
        return float(f"1e-{passed}")
    if schedule == "cosine":
        warm = min(1.0, (step + 1) / 50)
        return warm * 0.5 * (1 + math.cos(math.pi * step / max(steps, 1)))
    raise UnknownNameError("schedule", schedule, SCHEDULES)


@dataclass(frozen=True)
class LearningRate:
    """A learning rate that follows a schedule.

    Attributes:
        start: the learning rate before any decay.
        steps: the number of steps that the schedule spans.
        schedule: constant, steps or cosine; see `decay`.
    """

    start: float
    steps: int
    schedule: str = "constant"

    def decay(self, step: int) -> float:
        """Return the factor on ``start`` at a step, counted from 0."""
        return decay(self.schedule, step, self.steps)


def signed(gradient: Tensor, kind: str, progress: float) -> Tensor:
    """Return the gradient that Adam is given: unchanged (``none``), its sign (``hard``, GS) or its tanh (``soft``)."""
    if kind == "none":
        return gradient
    if kind == "hard":
        return gradient.sign()
    if kind == "soft":
        scale = gradient.abs().amax(tuple(range(1, gradient.dim())), keepdim=True).clamp_min(1e-30)
        return torch.tanh(gradient / scale * (1 + 10 * progress))
    raise UnknownNameError("sign", kind, SIGNS)


class BatchedAdam:
    """Adam on T independent problems, with the changes to gradient and step that attacks use.

    Args:
        variables: (T, D).
        rate: the learning rate.
        sign: how the gradient is transformed first; see `signed`.
        noise: standard deviation of the noise added to each step, as a multiple of the learning rate (Langevin).
        rng: source of the noise; a CPU generator.
        project: applied to the variables after each step, for example to keep them in a box.
    """

    def __init__(
        self,
        variables: Tensor,
        rate: LearningRate,
        *,
        sign: str = "none",
        noise: float = 0.0,
        rng: torch.Generator | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.variables = variables.detach().clone()
        self._rate, self._sign, self._noise, self._rng, self._project = rate, sign, noise, rng, project
        self._mean, self._square = torch.zeros_like(variables), torch.zeros_like(variables)
        self._step = 0
        self._all, self._rows = len(variables), torch.arange(len(variables), device=variables.device)

    def step(self, closure: Closure) -> Tensor:
        """Take one step and return the losses (T,) before it."""
        loss, gradient = closure(self.variables)
        gradient = signed(gradient, self._sign, self._step / self._rate.steps)
        rate = self._rate.start * self._rate.decay(self._step)
        self._step += 1
        self._mean.lerp_(gradient, 1 - _BETAS[0])
        self._square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        scale = math.sqrt(1 - _BETAS[1] ** self._step)
        denominator = self._square.sqrt().div_(scale).add_(_EPSILON)
        moved = self.variables.addcdiv(self._mean, denominator, value=-rate / (1 - _BETAS[0] ** self._step))
        if self._noise:
            drawn = torch.randn(self._all, moved.shape[1], generator=self._rng).to(moved)  # for dropped rows too
            moved += rate * self._noise * drawn[self._rows]
        self.variables = self._project(moved) if self._project else moved
        return loss

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of a mask (T,)."""
        self.variables, self._mean, self._square = (t[rows] for t in (self.variables, self._mean, self._square))
        self._rows = self._rows[rows]


_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class BatchedRmsprop:
    """RMSprop with momentum on T independent problems.

    Args:
        variables: (T, D).
        rate: the learning rate.
        factors: (D,) factors on the learning rate.
        kept: share of the running mean of squares that a step keeps.
        momentum: share of the last step that is added to the next.
    """

    def __init__(
        self, variables: Tensor, rate: LearningRate, *, factors: Tensor, kept: float = 0.99, momentum: float = 0.99
    ) -> None:
        self.variables = variables.detach().clone()
        self._rate, self._number = rate, 0
        self._rates, self._kept, self._momentum = (-rate.start * factors).to(variables), kept, momentum
        self._square, self._step = torch.zeros_like(variables), torch.zeros_like(variables)

    def step(self, closure: Closure) -> Tensor:
        """Take one step and return the losses (T,) before it."""
        loss, gradient = closure(self.variables)
        self._square.mul_(self._kept).addcmul_(gradient, gradient, value=1 - self._kept)
        self._step.mul_(self._momentum).addcdiv_(gradient, self._square.sqrt().add_(_EPSILON))
        share = self._rate.decay(self._number)
        self._number += 1
        self.variables = torch.addcmul(self.variables, self._step, self._rates, value=share)
        return loss

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of a mask (T,)."""
        self.variables, self._square, self._step = (t[rows] for t in (self.variables, self._square, self._step))


class BatchedLbfgs:
    """L-BFGS on T independent problems; each row has its own history, step length and stopping.

    Settings and stopping rules are those of `torch.optim.LBFGS` with ``line_search_fn=None``.
    """

    def __init__(
        self,
        variables: Tensor,
        *,
        lr: float = 1.0,
        max_iterations: int = 20,
        history: int = 100,
        tolerance_gradient: float = 1e-7,
        tolerance_change: float = 1e-9,
    ) -> None:
        targets, size = variables.shape
        self.variables = variables.detach().clone()
        self._lr, self._max_iterations, self._history = lr, max_iterations, history
        self._tolerance_gradient, self._tolerance_change = tolerance_gradient, tolerance_change
        new = variables.new_zeros
        self._differences = new(history, targets, size)  # slot s of row t is [s, t]
        self._steps = new(history, targets, size)
        self._inverse = new(history, targets)  # 1 / <y, s> of each slot
        self._rows = torch.arange(targets, device=variables.device)
        self._count = torch.zeros(targets, dtype=torch.long, device=variables.device)
        self._diagonal = variables.new_ones(targets)
        self._direction = new(targets, size)
        self._last_gradient = new(targets, size)
        self._rate = new(targets)
        self._iterations = torch.zeros(targets, dtype=torch.long, device=variables.device)

    def step(self, closure: Closure) -> Tensor:
        """Take up to ``max_iterations`` iterations per row and return the losses (T,) before them."""
        loss, gradient = closure(self.variables)
        first = loss
        active = gradient.abs().amax(1) > self._tolerance_gradient
        for iteration in range(self._max_iterations):
            if not bool(active.any()):
                break
            self._iterations += active
            self._update_direction(gradient, active)
            norm = gradient.abs().sum(1)
            start = torch.minimum(torch.ones_like(norm), 1 / norm) * self._lr
            rate = torch.where(self._iterations == 1, start, torch.full_like(norm, self._lr))
            self._rate = torch.where(active, rate, self._rate)
            slope = (gradient * self._direction).sum(1)
            active = active & (slope <= -self._tolerance_change)
            move = torch.where(active, self._rate, torch.zeros_like(norm))[:, None] * self._direction
            self._last_gradient = torch.where(active[:, None], gradient, self._last_gradient)
            self.variables = self.variables + torch.where(active[:, None], move, torch.zeros_like(move))
            if iteration == self._max_iterations - 1:
                break
            new_loss, new_gradient = closure(self.variables)
            change = (new_loss - loss).abs()
            gradient = torch.where(active[:, None], new_gradient, gradient)
            loss = torch.where(active, new_loss, loss)
            active = active & (gradient.abs().amax(1) > self._tolerance_gradient)
            active = active & (move.abs().amax(1) > self._tolerance_change) & (change >= self._tolerance_change)
        return first

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but those of a mask (T,)."""
        self.variables, self._direction, self._last_gradient = (
            t[rows] for t in (self.variables, self._direction, self._last_gradient)
        )
        self._count, self._diagonal, self._rate = (t[rows] for t in (self._count, self._diagonal, self._rate))
        self._iterations = self._iterations[rows]
        self._differences, self._steps, self._inverse = (
            t[:, rows] for t in (self._differences, self._steps, self._inverse)
        )
        self._rows = torch.arange(len(self.variables), device=self.variables.device)

    def _update_direction(self, gradient: Tensor, active: Tensor) -> None:
        """Add the newest pair to each active row's history and apply the two-loop recursion."""
        begun = self._iterations > 1
        difference = gradient - self._last_gradient
        step = self._direction * self._rate[:, None]
        curvature = (difference * step).sum(1)
        accept = active & begun & (curvature > 1e-10)
        self._remember(difference, step, curvature, accept)
        square = (difference * difference).sum(1)
        self._diagonal = torch.where(accept, curvature / square, self._diagonal)
        direction = -gradient
        least, most = (int(count) for count in self._count.aminmax())
        length = min(most, self._history)
        factors = []
        for age in range(length):  # newest first
            difference_, step_, inverse = self._recall(age, alike=least == most)
            factor = torch.linalg.vecdot(step_, direction) * inverse
            direction.addcmul_(difference_, factor[:, None], value=-1)
            factors.append(factor)
        direction *= self._diagonal[:, None]
        for age in reversed(range(length)):
            difference_, step_, inverse = self._recall(age, alike=least == most)
            back = torch.linalg.vecdot(difference_, direction) * inverse
            direction.addcmul_(step_, (factors[age] - back)[:, None])
        self._direction = torch.where(active[:, None], direction, self._direction)

    def _remember(self, difference: Tensor, step: Tensor, curvature: Tensor, accept: Tensor) -> None:
        rows = self._rows[accept]
        slots = (self._count % self._history)[accept]
        self._differences[slots, rows] = difference[accept]
        self._steps[slots, rows] = step[accept]
        self._inverse[slots, rows] = 1 / curvature[accept]
        self._count = self._count + accept

    def _recall(self, age: int, *, alike: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's pair of a given age, and an inverse of 0 if it has none; ``alike``: all have as many."""
        slots = (self._count - 1 - age) % self._history
        if alike:
            slot = int(slots[0])
            return self._differences[slot], self._steps[slot], self._inverse[slot]  # views, not copies
        at = (slots, self._rows)
        held = (self._count.clamp_max(self._history) > age).to(self._inverse)
        return self._differences[at], self._steps[at], self._inverse[at] * held
