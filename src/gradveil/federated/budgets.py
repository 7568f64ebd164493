"""What a defence guarantees to the clients of a training, and how rows state it."""

import math
from collections.abc import Iterable
from typing import Any

from gradveil.defences.base import Defence
from gradveil.defences.parts.accounting import Budget
from gradveil.defences.parts.gaussian_dp import identification_bound
from gradveil.federated.protocol import LocalSettings


def weakest_budget(
    defence: Defence, how: LocalSettings, sizes: Iterable[int], rounds: int = 1, entries: int = 0
) -> Budget | None:
    """Return the weakest guarantee of any client that sends ``rounds`` updates, or None if there is none.

    One update of a training has ``rounds=1`` and the same clients, so its epsilon is never above the training's.

    Args:
        defence: the clients' defence.
        how: how they train.
        sizes: the number of images of each client.
        rounds: the number of updates that each client sends.
        entries: the number of entries of the model.
    """
    budgets = [defence.budget(how.releases(size, rounds, entries)) for size in set(sizes)]
    known = [budget for budget in budgets if budget is not None]
    return max(known, default=None)


def budget_fields(budget: Budget | None) -> dict[str, Any]:
    """Return a budget as the fields of a row; empty if there is none, and None for what is not known or infinite.

    Example:
        >>> budget_fields(Budget(4.38, 1e-5, 1.0))["identified_bound"]
        0.018...
    """
    if budget is None:
        return {}
    return {
        "epsilon": budget.epsilon if math.isfinite(budget.epsilon) else None,
        "delta": budget.delta,
        "mu": budget.mu,
        "identified_bound": None if budget.mu is None else identification_bound(budget.mu),
    }
