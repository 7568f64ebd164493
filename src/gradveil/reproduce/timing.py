"""Timing of rounds: several simulations take turns in one process, so that other load affects all of them alike."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from gradveil.engines.simulation import Simulation


def seconds_in_turns(
    runs: Mapping[str, Simulation], rounds: int, progress: Callable[[float], None]
) -> dict[str, list[float]]:
    """Return the seconds of each round of each simulation; a different simulation starts every round."""
    order = list(runs.items())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1, rounds + 1):
        first = number % len(order)
        for name, simulation in order[first:] + order[:first]:
            row, _ = simulation.step(number)
            seconds[name].append(float(str(row["seconds"])))
        progress(number / rounds)
    return seconds


def round_seconds(seconds: Sequence[float]) -> float:
    """Return the median seconds per round, without the first round, which warms caches."""
    return statistics.median(seconds[1:] or seconds)


def overhead(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Return the ratio of both trainings' `round_seconds`, so that a table's times and ratios agree.

    Example:
        >>> overhead([9.0, 2.0, 3.0, 2.2], [1.0, 1.0, 1.0, 2.0])
        2.2
    """
    return round_seconds(ours) / round_seconds(plain)
