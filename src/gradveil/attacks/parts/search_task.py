"""What a search has to match: the gradients seen, and what is known with them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradveil.attacks.parts.statistics import Statistics
from gradveil.types import Tensors


@dataclass(frozen=True)
class SearchTask:
    """What a chunk of rows has to match.

    Attributes:
        wanted: mean gradients (rows, ...) by name.
        statistics: mean and variance (rows, channels) by BatchNorm layer.
        labels: fixed labels (rows, B), or soft ones (rows, B, classes); None if labels are searched.
        outputs: known outputs (rows, numbers) of secret modules, by name.
        later: what the same rows have to match in later rounds of their clients.
    """

    wanted: Tensors
    statistics: Statistics
    labels: Tensor | None
    outputs: Tensors = field(default_factory=dict)
    later: tuple["SearchTask", ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.wanted.values())))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the task as a list."""
        pairs = [tensor for pair in self.statistics.values() for tensor in pair]
        labels = [] if self.labels is None else [self.labels]
        later = [tensor for task in self.later for tensor in task.tensors]
        return [*self.wanted.values(), *pairs, *labels, *self.outputs.values(), *later]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "SearchTask":
        """Return the task with other tensors, in the order of ``tensors``."""
        rest = iter(tensors)
        return SearchTask(
            {name: next(rest) for name in self.wanted},
            {name: (next(rest), next(rest)) for name in self.statistics},
            None if self.labels is None else next(rest),
            {name: next(rest) for name in self.outputs},
            tuple(task.with_tensors([next(rest) for _ in task.tensors]) for task in self.later),
        )

    def labelled(self, labels: Tensor) -> "SearchTask":
        """Return the task with fixed labels, in all rounds."""
        return replace(self, labels=labels, later=tuple(task.labelled(labels) for task in self.later))

    def of(self, rows: Tensor) -> "SearchTask":
        """Return the task of some rows."""
        return self.with_tensors([tensor[rows] for tensor in self.tensors])


def added(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the sum of several gradients, tensor by tensor.

    Example:
        >>> added([{"w": torch.ones(2)}, {"w": torch.ones(2)}])
        {'w': tensor([2., 2.])}
    """
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
