"""CMA-ES on many problems at once; needs losses but no gradients."""

from collections.abc import Sequence

import cma
import numpy as np
import torch
from torch import Tensor

from gradveil.randomness import derive_seed


class Evolution:
    """One evolution strategy per target, all asked and told together; each stops by its own rules.

    Args:
        start: (T, D) means of the first populations.
        spread: standard deviation of the first populations.
        population: candidates per step.
        rng: a CPU generator, which seeds one stream per target.

    Reference: Hansen 2016, https://arxiv.org/abs/1604.00772; its author's package ``cma``, with its defaults.
    """

    def __init__(self, start: Tensor, *, spread: float, population: int, rng: torch.Generator) -> None:
        self._like, self._population = start, population
        seeds = torch.randint(2**62, (len(start),), generator=rng).tolist()
        self._strategies = [_strategy(row, spread, population, seed) for row, seed in zip(start, seeds, strict=True)]

    def ask(self) -> Tensor:
        """Return candidates (T, population, D); for a target that is done, copies of its best one."""
        asked = [_candidates(strategy, self._population) for strategy in self._strategies]
        return torch.from_numpy(np.stack(asked)[..., : self._like.shape[1]]).to(self._like)

    def tell(self, losses: Tensor) -> None:
        """Take the losses (T, population) of the last candidates; NaN and infinity count as very bad."""
        known = losses.double().nan_to_num(_BAD, _BAD, _BAD).cpu().numpy()
        for strategy, row in zip(self._strategies, known, strict=True):
            if not strategy.stop():
                strategy.tell(strategy.asked, row.tolist())

    def keep(self, rows: Sequence[bool]) -> None:
        """Drop all targets but those of a mask."""
        self._strategies = [strategy for strategy, stays in zip(self._strategies, rows, strict=True) if stays]
        self._like = self._like[torch.tensor(rows, device=self._like.device)]


_BAD = 1e30


class _Strategy(cma.CMAEvolutionStrategy):  # type: ignore[misc]
    """The package's strategy, with the candidates that it returned last."""

    asked: list[np.ndarray]


def _strategy(start: Tensor, spread: float, population: int, seed: int) -> _Strategy:
    rng = np.random.default_rng(derive_seed(seed, "evolution"))
    mean = start.double().cpu().numpy()
    mean = mean if len(mean) > 1 else np.append(mean, 0.0)  # cma does not accept problems of one variable
    options = {"popsize": population, "randn": lambda *size: rng.standard_normal(size), "seed": np.nan, "verbose": -9}
    return _Strategy(mean, spread, options)


def _candidates(strategy: _Strategy, population: int) -> np.ndarray:
    if not strategy.stop():
        strategy.asked = strategy.ask()
        return np.stack(strategy.asked)
    return np.stack([strategy.result.xbest] * population)
