"""How the server opens a secure sum: the masks that are left in it, from shares, and its whole numbers as an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradveil.engines.questions import Content
from gradveil.engines.sum_masks import (
    SECRET_BYTES,
    SEED_BYTES,
    Codes,
    Roster,
    mask,
    pair_mask,
    public_bytes,
    recovered,
    shared_key,
)
from gradveil.errors import MessageError
from gradveil.federated.secure_sum import Quantiser
from gradveil.types import Update


@dataclass(frozen=True)
class SumPlan:
    """One secure sum.

    Attributes:
        round: number of the round.
        weights: weight of each client's update, by client.
        threshold: clients that must be left.
        how: how entries become whole numbers.
        like: an update with the names and shapes of every client's.
        contents: the message with which each client is asked to train.
    """

    round: int
    weights: Mapping[int, float]
    threshold: int
    how: Quantiser
    like: Update
    contents: Mapping[int, Content]

    @property
    def entries(self) -> int:
        """Return the number of entries of an update."""
        return sum(tensor.numel() for tensor in (*self.like.tensors.values(), *self.like.buffers.values()))


def masks_left(
    count: int,
    roster: Roster,
    alive: Sequence[int],
    dead: Sequence[int],
    shares: Mapping[int, Mapping[int, bytes]],
    transcript: str,
) -> Codes:
    """Return all masks that are still in the sum: the survivors' own, and those between survivors and the lost."""
    total = np.zeros(count, np.uint64)
    some = list(shares.values())[: roster.threshold]
    for client in alive:
        seed = recovered([given[client] for given in some], SEED_BYTES)
        total = total + mask(seed, transcript, count)
    for client in dead:
        secret = recovered([given[client] for given in some], SECRET_BYTES)
        if public_bytes(secret) != roster.member(client).mask_key:
            raise MessageError(f"Shares of client {client}'s key must give the key, got another: client {client} lied.")
        for other in alive:
            key = shared_key(secret, roster.member(other).mask_key)
            total = total + pair_mask(other, client, key, transcript, count)
    return total


def decoded(plan: SumPlan, total: Codes, count: int, bits: int, examples: int) -> Update:
    """Return a sum of whole numbers as an update. Raise MessageError if ``count`` clients can't have caused it."""
    words = total & np.uint64(0xFFFFFFFF) if bits == 32 else total
    if int(words.max(initial=0)) > count << plan.how.bits:
        raise MessageError(
            f"The sum of round {plan.round} must be within its range, got a larger one: a client sent other numbers "
            "than it should. Which one can't be told, as single updates are hidden."
        )
    codes, start = torch.from_numpy(words.astype(np.int64)), 0
    parts = []
    for like in (plan.like.tensors, plan.like.buffers):
        found = {}
        for name in sorted(like):
            stop = start + like[name].numel()
            found[name] = plan.how.decode(codes[start:stop], count).reshape(like[name].shape)
            start = stop
        parts.append({name: found[name] for name in like})
    return Update(parts[0], examples, parts[1])
