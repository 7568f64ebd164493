"""The server's part in a secure sum over Flower: it relays keys and shares, adds masked updates, and removes the masks.

What the server ever has: public keys, encrypted shares, masked updates, and in the end the seeds of the survivors and
the keys of the lost, from which it computes the masks of the sum. A single update is in none of them. Clients may drop
out in every step, as long as the threshold is left; otherwise the round ends with the reasons.
"""

import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradveil.engines.introductions import Failure, content_of
from gradveil.engines.questions import Content
from gradveil.engines.reading import no_foreign_error, of_client
from gradveil.engines.sum_answers import Check, Keys, MaskedUpdate, read_keys, read_masked, read_outbox, read_shares
from gradveil.engines.sum_masks import (
    Member,
    Roster,
    word_bits,
)
from gradveil.engines.sum_opening import SumPlan, decoded, masks_left
from gradveil.errors import GradveilError, MessageError, RefusedError
from gradveil.types import Update

from flwr.app import ConfigRecord, RecordDict  # isort: skip - messages says if it is missing

LOG = logging.getLogger("flwr")
Ask = Callable[[str, Mapping[int, Content], int], dict[int, RecordDict | Failure]]
MOST_ATTEMPTS = 3
"""Attempts at a round: a second one if clients are not those of an attempt before a restart."""


@dataclass
class SumResult:
    """What came of a sum: the decoded total, each survivor's plain values, and why the others are missing."""

    total: Update
    facts: dict[int, dict[str, Any]]
    lost: dict[int, GradveilError]


@dataclass
class _Attempt:
    """The state of one attempt: why clients are lost, and who has opened its sum before, for a server that stopped."""

    plan: SumPlan
    number: int
    ask: Ask
    check: Check
    lost: dict[int, GradveilError] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)

    def step(
        self, kind: str, contents: Mapping[int, Content], read: Callable[[int, RecordDict], Any]
    ) -> dict[int, Any]:
        """Ask some clients, and return what was read of each answer; raise if fewer than the threshold are left."""
        found = {}
        for client, answer in self.ask(kind, contents, self.plan.threshold).items():
            try:
                with of_client(client), no_foreign_error():
                    found[client] = read(client, content_of(answer, f"Client {client}"))
            except GradveilError as error:
                LOG.warning("%s", error)
                self.lost[client] = error
        self.require(found, kind)
        return found

    def require(self, left: Sized, kind: str) -> None:
        """Raise if fewer clients than the threshold are left after a step."""
        if len(left) < self.plan.threshold:
            reasons = " ".join(str(error) for error in self.lost.values())
            raise MessageError(
                f"The secure sum of round {self.plan.round} needs {self.plan.threshold} of {len(self.plan.weights)} "
                f"clients in every step, got {len(left)} ({kind}). No update was opened. {reasons}"
            )

    def named(self, **values: object) -> dict[str, ConfigRecord]:
        """Return the record that names this attempt, with other values."""
        named: dict[str, Any] = {key.replace("_", "-").strip("-"): value for key, value in values.items()}
        return {"sum": ConfigRecord({"round": self.plan.round, "attempt": self.number, **named})}


def secure_total(plan: SumPlan, ask: Ask, check: Check) -> SumResult:
    """Return the sum of the clients' weighted updates. Raise MessageError if too few clients are left in any step.

    ``check`` raises if the plain values beside a client's masked update are impossible.
    """
    for number in range(1, MOST_ATTEMPTS + 1):
        attempt = _Attempt(plan, number, ask, check)
        try:
            return _play(attempt)
        except MessageError as error:
            if attempt.opened:
                raise MessageError(_opened_before(attempt) + f" {error}") from error
            other_clients = any(isinstance(error, RefusedError) and "'sum'" in str(error) for error in
                                attempt.lost.values())  # fmt: skip
            if not other_clients or number == MOST_ATTEMPTS:
                raise
            LOG.info("Round %s: clients are not those of an earlier attempt; trying anew.", plan.round)
    raise AssertionError("unreachable")


def _play(attempt: _Attempt) -> SumResult:
    """Play the four steps of one attempt."""
    plan = attempt.plan
    # Step 1: everyone makes new keys.
    roster = _roster(attempt, attempt.step("query.keys", dict.fromkeys(plan.weights, attempt.named()), read_keys))

    # Step 2: everyone gets the roster, and shares its secrets with the others, encrypted for each.
    sent = attempt.named(
        threshold=plan.threshold, numbers=list(roster.numbers), weights=[each.weight for each in roster.members],
        mask_keys=[each.mask_key for each in roster.members], share_keys=[each.share_key for each in roster.members],
        signatures=[each.signature for each in roster.members],
    )  # fmt: skip
    outboxes = attempt.step("query.shares", dict.fromkeys(roster.numbers, sent), read_outbox(roster))

    # Step 3: everyone who shared trains, and sends its update under all masks.
    sharers = list(outboxes)
    inputs = {}
    for client in sharers:
        others = [other for other in sharers if other != client]
        mail = attempt.named(from_=others, ciphertexts=[outboxes[other].sealed[client] for other in others])
        inputs[client] = {**plan.contents[client], **mail}
    bits = word_bits(plan.how, len(roster.members))
    arrived = attempt.step("train", inputs, read_masked(plan.entries, bits, roster, attempt.check))
    arrived = _told_alike(attempt, arrived)
    alive = _survivors(attempt, arrived)
    dead = [client for client in sharers if client not in alive]
    total = np.zeros(plan.entries, np.uint64)
    for client in alive:
        total = total + arrived[client].codes

    # Step 4: survivors open the sum: shares of their seeds, and of the keys of those who were lost.
    question = attempt.named(alive=sorted(alive), dead=sorted(dead))
    shares = attempt.step("query.unmask", dict.fromkeys(alive, question), read_shares(alive, dead, outboxes, roster))
    transcript = arrived[alive[0]].transcript
    total = total - masks_left(plan.entries, roster, alive, dead, shares, transcript)
    facts = {client: arrived[client].facts for client in alive}
    for client in dead:
        attempt.lost.setdefault(client, MessageError(f"Client {client} was not part of the sum that was opened."))
    examples = sum(arrived[client].facts["images"] for client in alive)
    lost = {client: error for client, error in attempt.lost.items() if client not in alive}
    return SumResult(decoded(plan, total, len(alive), bits, examples), facts, lost)


def _opened_before(attempt: _Attempt) -> str:
    return (
        f"Round {attempt.plan.round} was opened before the server stopped, and its clients open no other sum. Start "
        "the nodes of all clients that took part then, and repeat the run; or begin another run, with another out."
    )


def _roster(attempt: _Attempt, found: Mapping[int, Keys]) -> Roster:
    """Return who takes part, with their keys."""
    plan = attempt.plan
    attempt.opened |= {client for client, keys in found.items() if keys.opened}
    members = tuple(
        Member(client, keys.mask_key, keys.share_key, keys.signature, float(plan.weights[client]))
        for client, keys in found.items()
    )
    roster = Roster(plan.round, attempt.number, plan.threshold, members)
    try:
        roster.check()
    except MessageError as error:
        raise MessageError(f"Round {roster.round}: {error}") from error
    return roster


def _told_alike(attempt: _Attempt, arrived: Mapping[int, MaskedUpdate]) -> dict[int, MaskedUpdate]:
    """Return the largest group of clients with the same transcript; masks cancel only within it."""
    groups = dict[str, list[int]]()
    for client, each in arrived.items():
        groups.setdefault(each.transcript, []).append(client)
    most = max(groups.values(), key=len)
    for client in arrived.keys() - set(most):
        attempt.lost[client] = MessageError(
            f"The answer of client {client} was not used. All clients of a sum must have received the same model, keys "
            "and weights, got another transcript from it."
        )
    found = {client: arrived[client] for client in most}
    attempt.require(found, "train")
    return found


def _survivors(attempt: _Attempt, arrived: Mapping[int, MaskedUpdate]) -> list[int]:
    """Return the clients whose sum is opened: all that arrived, or those of a sum that was opened before a restart."""
    before = {each.opened for each in arrived.values() if each.opened}
    if not before:
        return list(arrived)
    survivors = [client for client in arrived if client in before.copy().pop()]
    if len(before) > 1 or set(survivors) != set(before.pop()):
        raise MessageError("The survivors of the opened sum must all be there, got others.")
    return survivors
