r"""What a site's answers cost over all its runs, as one ε at one δ.

The updates of one run cost what the run's defence says about all updates that the site has sent in it. Runs whose
guarantee is Gaussian differential privacy compose exactly:

.. math:: \mu = \sqrt{\textstyle\sum_i \mu_i^2}

Every other guarantee, and every score of training images, adds its ε and δ (basic composition). The ε of the Gaussian
part is taken at the δ that the others leave. One update without a guarantee makes the sum infinite.

Reference: Dong, Roth and Su 2019, https://arxiv.org/abs/1905.02383, Corollary 3.3; Dwork and Roth 2014, Theorem 3.16.
"""

import math
from collections.abc import Iterable

from gradveil.defences import Budget, Defence
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.engines.site_codes import refused
from gradveil.engines.site_history import GivenAnswer
from gradveil.engines.site_ledger import Ledger, LedgerFile
from gradveil.engines.site_policy import SitePolicy
from gradveil.federated.protocol import LocalSettings


def cost_of(defence: Defence, how: LocalSettings, images: int, updates: int, entries: int) -> Budget | None:
    """Return what ``updates`` updates of one run cost, or None if nothing bounds it.

    Args:
        defence: of the run.
        how: how the site trains.
        images: number of the site's training images.
        updates: number of updates that the site sends in the run.
        entries: number of entries of an update.
    """
    found = defence.budget(how.releases(images, updates, entries))
    return found if found is not None and math.isfinite(found.epsilon) else None


def epsilon_in_all(costs: Iterable[Budget | None], delta: float, scores: float = 0.0) -> float:
    """Return the ε at ``delta`` of several runs together, or infinity if nothing bounds it.

    Args:
        costs: of each run; None is a run without a guarantee.
        delta: the δ of all runs together.
        scores: ε of all scores, which have no δ.

    Example:
        >>> round(epsilon_in_all([Budget(0, 0, 0.6), Budget(0, 0, 0.8)], 1e-5), 2)  # mu = 1
        4.38
        >>> epsilon_in_all([Budget(1.0, 1e-6), Budget(2.0, 0.0)], 1e-5, scores=0.5), epsilon_in_all([None], 1e-5)
        (3.5, inf)
    """
    known, mus, left = scores, list[float](), delta
    for cost in costs:
        if cost is None:
            return math.inf
        if cost.mu is None:
            known, left = known + cost.epsilon, left - cost.delta
        else:
            mus.append(cost.mu)
    if left < -1e-9 * delta:
        return math.inf
    if not any(mus):
        return known
    return known + epsilon_of(math.hypot(*mus), left) if left > 1e-9 * delta else math.inf


def spent(ledger: Ledger, delta: float) -> float:
    """Return the ε at ``delta`` of everything that a site has answered."""
    return epsilon_in_all((record.cost for record in ledger.runs.values() if record.begun), delta, ledger.epsilon)


def note_answer(book: LedgerFile, delta: float, asked: tuple[str, int, str, str], cost: Budget | None) -> None:
    """Add an answer to a site's history, before it leaves.

    Args:
        book: the open ledger.
        delta: the δ of all answers together.
        asked: run, round, work and digest of the weights.
        cost: of all updates of the run so far, or of a score.
    """
    total = spent(book.ledger, delta)
    if asked[2] != "train" and cost is not None:
        total += cost.epsilon
    epsilon, rest, mu = (None, None, None) if cost is None else cost
    book.note(GivenAnswer(*asked, epsilon, rest, mu, total if math.isfinite(total) else None))


def require_affordable(policy: SitePolicy, ledger: Ledger) -> None:
    """Raise RefusedError if what a ledger holds is above the site's limit on ε over all runs."""
    if not policy.max_epsilon:
        return
    total = spent(ledger, policy.max_delta)
    if total > policy.max_epsilon * (1 + 1e-9):
        raise refused(
            "epsilon",
            f"The answers of all runs may cost max-epsilon = {policy.max_epsilon:g} at max-delta = "
            f"{policy.max_delta:g}, got {total:g} with this one.",
        )
