"""A site's policy and ledger in somebody's own Flower app: for the mod and for `gradveil.flower.train`.

Both stand in one folder of the site: ``policy.toml``, of which the agreed defences, the most updates and the most ε
count here, and ``ledger-NUMBER.json`` with its history, over all runs. An update is counted before it is computed, so
that a failure can't make it free.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gradveil.defences import Budget
from gradveil.engines.site_budget import note_answer, require_affordable
from gradveil.engines.site_codes import refused
from gradveil.engines.site_ledger import open_ledger
from gradveil.engines.site_policy import SitePolicy, accepts, read_policy


@dataclass(frozen=True)
class AskedUpdate:
    """An update that a server asks for.

    Attributes:
        run: name of the run; updates that cost different amounts need different names.
        round: number of the round; 0 is the next one.
        weights: digest of the model that the server sent.
        defence: text of the defence.
        cost: returns what a number of updates of this run costs, or None if nothing bounds it.
    """

    run: str
    round: int
    weights: str
    defence: str
    cost: Callable[[int], Budget | None]


def policy_of(site: Path) -> SitePolicy:
    """Return the policy of a site's folder."""
    return read_policy({"policy": str(site / "policy.toml")})


def count_update(site: Path, client: int, asked: AskedUpdate) -> None:
    """Note an update in a site's ledger and history. Raise RefusedError if the site's policy does not allow it."""
    policy = policy_of(site)
    if not accepts(policy.defence, asked.defence):
        raise refused("defence", f"The defence must be {policy.defence!r}, to which this site agreed, got another one.")
    with open_ledger(site / f"ledger-{client}.json") as book:
        record = book.ledger.run(asked.run)
        number = asked.round or record.begun + 1
        if number <= record.begun:
            raise refused("round", f"Rounds must increase, got round {number} after round {record.begun}.")
        begun = record.begin(number, asked.weights)
        begun = replace(begun, cost=asked.cost(begun.updates))
        ledger = book.ledger.with_run(asked.run, begun)
        if ledger.updates > policy.max_rounds:
            raise refused("rounds", f"This site sends {policy.max_rounds} updates in all, which are used up.")
        require_affordable(policy, ledger)
        book.write(ledger)
        note_answer(book, policy.max_delta, (asked.run, number, "train", asked.weights), begun.cost)
        book.write(book.ledger.with_run(asked.run, begun.answer(asked.weights)))
