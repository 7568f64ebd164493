"""What clients answer in each step of a secure sum, read without trusting them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradveil.engines.messages import listed, read_arrays, read_config
from gradveil.engines.sum_masks import POINT_BYTES, SHARE_BYTES, Codes, Roster, commitment, public_key
from gradveil.errors import MessageError

from flwr.app import RecordDict  # isort: skip - messages says if it is missing

Check = Callable[[int, Mapping[str, Any]], None]
"""Raises if the plain values beside a client's masked update are impossible."""
_SEALED_BYTES = 4096
"""Bytes of a client's encrypted shares for another one, at most."""


@dataclass(frozen=True)
class Keys:
    """A client's public keys, and whether it has opened this sum before."""

    mask_key: bytes
    share_key: bytes
    signature: bytes
    opened: bool


def read_keys(client: int, content: RecordDict) -> Keys:
    """Return the public keys in a client's answer."""
    facts = read_config(content, "facts")
    mask_key, share_key = (_bytes(facts, key, POINT_BYTES) for key in ("mask-key", "share-key"))
    for key in (mask_key, share_key):
        public_key(key)
    signature, opened = _bytes(facts, "signature", 512), facts.get("opened")
    if not isinstance(opened, bool):
        raise MessageError("opened must be true or false, got another value.")
    return Keys(mask_key, share_key, signature, opened)


@dataclass(frozen=True)
class Outbox:
    """A client's encrypted shares, by receiver, and its commitments to them: of its seed and its key, by receiver."""

    sealed: Mapping[int, bytes]
    marks: Mapping[int, tuple[bytes, bytes]]


def read_outbox(roster: Roster) -> Callable[[int, RecordDict], Outbox]:
    """Return the function that reads a client's encrypted shares for all others of a roster."""

    def read(client: int, content: RecordDict) -> Outbox:
        facts, count = read_config(content, "facts"), len(roster.members)
        to, sealed = listed(facts, "to", int, count), listed(facts, "ciphertexts", bytes, count)
        marks = listed(facts, "commitments", bytes, 2 * count)
        if to != [number for number in roster.numbers if number != client] or len(sealed) != len(to):
            raise MessageError("Shares must be for every other client of the sum, in order, got others.")
        if len(marks) != 2 * count or any(len(each) > _SEALED_BYTES for each in (*sealed, *marks)):
            raise MessageError("Shares and commitments must have their usual sizes, got others.")
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return Outbox(dict(zip(to, sealed, strict=True)), dict(zip(roster.numbers, pairs, strict=True)))

    return read


@dataclass(frozen=True)
class MaskedUpdate:
    """A client's masked update, and the plain values beside it."""

    codes: Codes
    transcript: str
    opened: tuple[int, ...]
    facts: dict[str, Any]


def read_masked(entries: int, bits: int, roster: Roster, check: Check) -> Callable[[int, RecordDict], MaskedUpdate]:
    """Return the function that reads a client's masked update: ``entries`` whole numbers of ``bits`` bits each."""
    kind = torch.int32 if bits == 32 else torch.int64
    like = {"masked": torch.empty(entries, dtype=kind)}

    def read(client: int, content: RecordDict) -> MaskedUpdate:
        facts = read_config(content, "facts")
        check(client, facts)
        words = read_arrays(content, "masked", like, 0)["masked"].numpy()
        codes = words.view(np.uint32 if kind == torch.int32 else np.uint64).astype(np.uint64)
        transcript, opened = facts.get("transcript"), listed(facts, "opened", int, len(roster.members))
        if not isinstance(transcript, str) or len(transcript) != 64 or not set(opened) <= set(roster.numbers):
            raise MessageError("A masked update must come with its transcript, got another value.")
        return MaskedUpdate(codes, transcript, tuple(opened), facts)

    return read


def read_shares(
    alive: Sequence[int], dead: Sequence[int], outboxes: Mapping[int, Outbox], roster: Roster
) -> Callable[[int, RecordDict], dict[int, bytes]]:
    """Return the function that reads a client's shares of the survivors' seeds and the lost clients' keys."""
    wanted = [*sorted(alive), *sorted(dead)]

    def read(client: int, content: RecordDict) -> dict[int, bytes]:
        facts, count = read_config(content, "facts"), len(roster.members)
        of, shares = listed(facts, "of", int, count), listed(facts, "shares", bytes, count)
        if of != wanted or len(shares) != len(of):
            raise MessageError("Shares must be of every client of the sum, got others.")
        for owner, share in zip(of, shares, strict=True):
            mark = outboxes[owner].marks[client][0 if owner in alive else 1]
            if len(share) > SHARE_BYTES or commitment(share) != mark:
                raise MessageError(f"The share of client {owner}'s secret must be the one that it gave, got another.")
        return dict(zip(of, shares, strict=True))

    return read


def _bytes(values: Mapping[str, Any], key: str, most: int) -> bytes:
    value = values.get(key)
    if not isinstance(value, bytes) or len(value) > most:
        raise MessageError(f"{key} must be at most {most} bytes, got another value.")
    return value
