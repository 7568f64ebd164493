r"""The arithmetic of secure sums: keys, shares, and masks that cancel.

Every client u adds to its whole numbers a mask of its own seed, and one per other client v from a key that only both
know; u adds it, v subtracts it (Bonawitz et al. 2017, https://doi.org/10.1145/3133956.3133982; SecAgg+ in Flower):

.. math:: y_u = x_u + M(b_u) + \sum_{v < u} M(k_{uv}) - \sum_{v > u} M(k_{uv}) \pmod{2^m}

Key exchange, encryption, signatures and Shamir's shares are Flower's. The masks are not: Flower folds each key to 32
bits, the seed of a Mersenne Twister, which a server can try one by one. Here M is the key stream of ChaCha20.

M also depends on a transcript: a digest of the run's settings, the clients, their keys and weights, the round, and the
model that the client received. If two clients were told different things, their masks do not cancel: the sum is noise.
"""

import base64
import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradveil.errors import MessageError
from gradveil.federated.secure_sum import Quantiser

from cryptography.exceptions import InvalidKey  # isort: skip - comes with Flower
from cryptography.hazmat.primitives.asymmetric import ec  # isort: skip
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # isort: skip
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # isort: skip
from flwr.common.secure_aggregation.crypto.shamir import combine_shares  # isort: skip
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key  # isort: skip

Codes = NDArray[np.uint64]
CURVE = ec.SECP384R1()
SECRET_BYTES, SEED_BYTES, POINT_BYTES, SHARE_BYTES = 48, 32, 49, 128
"""Bytes of a secret key, of a seed, of a public key; bytes of a share at most."""


@dataclass(frozen=True)
class Member:
    """One client of a sum.

    Attributes:
        number: of the client.
        mask_key: public key for masks, a point of the curve.
        share_key: public key by which shares are encrypted for it.
        signature: of both keys, by the site's own key; empty if sites do not sign.
        weight: of its update in the sum.
    """

    number: int
    mask_key: bytes
    share_key: bytes
    signature: bytes
    weight: float


@dataclass(frozen=True)
class Roster:
    """Who takes part in a sum, and how many of them must be left to open it."""

    round: int
    attempt: int
    threshold: int
    members: tuple[Member, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of all clients."""
        return tuple(member.number for member in self.members)

    def member(self, number: int) -> Member:
        """Return one client; its number must be there."""
        return next(member for member in self.members if member.number == number)

    def digest(self, *others: object) -> str:
        """Return a digest of the roster and other values: the transcript of a sum."""
        return hashlib.sha256(repr((self, others)).encode()).hexdigest()

    def check(self) -> None:
        """Raise MessageError unless clients and keys are different, and the threshold is more than half of them.

        With at most half, two sums of one round could be opened, by other clients each.
        """
        keys = {key for member in self.members for key in (member.mask_key, member.share_key)}
        count = len(self.members)
        if len(set(self.numbers)) != count or len(keys) != 2 * count:
            raise MessageError("Clients and keys of a sum must be different, got some twice.")
        if not (2 <= self.threshold <= count < 2 * self.threshold):
            raise MessageError(
                f"The threshold of a sum must be 2 or more, more than half of its {count} clients and at most all, got "
                f"{self.threshold}."
            )
        if not all(0 <= member.weight < math.inf for member in self.members):
            raise MessageError("Weights in a sum must be finite and at least 0, got others.")
        for key in keys:
            public_key(key)


def new_secret() -> bytes:
    """Return a new secret key."""
    return ec.generate_private_key(CURVE).private_numbers().private_value.to_bytes(SECRET_BYTES, "big")


def private_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """Return a secret key as Flower's functions take it."""
    return ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)


def public_bytes(secret: bytes) -> bytes:
    """Return the public key of a secret one, as a compressed point."""
    return private_key(secret).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def public_key(point: bytes) -> ec.EllipticCurvePublicKey:
    """Return a public key as Flower's functions take it. Raise MessageError unless it is a compressed point."""
    try:
        if len(point) != POINT_BYTES:
            raise ValueError("length")
        return ec.EllipticCurvePublicKey.from_encoded_point(CURVE, point)
    except (ValueError, InvalidKey) as error:
        raise MessageError("A public key must be a compressed point of P-384, got other bytes.") from error


def shared_key(secret: bytes, point: bytes) -> bytes:
    """Return the key that two clients have in common, in the form of Flower's encryption."""
    return generate_shared_key(private_key(secret), public_key(point))


def mask(key: bytes, transcript: str, count: int) -> Codes:
    """Return ``count`` numbers, uniform in 0..2^64 - 1, that nobody can tell from random without the key."""
    stream_key = hmac.digest(key, b"gradveil mask " + transcript.encode(), "sha256")
    cipher = Cipher(algorithms.ChaCha20(stream_key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), "<u8").astype(np.uint64)


def pair_mask(mine: int, other: int, key: bytes, transcript: str, count: int) -> Codes:
    """Return what a client adds for the key that it shares with another one: the negative of what the other adds."""
    found = mask(base64.urlsafe_b64decode(key), transcript, count)
    return found if mine > other else np.negative(found)


def word_bits(how: Quantiser, clients: int) -> int:
    """Return the bits of the numbers that are sent: 32 if the sum of all clients' codes fits in, otherwise 64."""
    return 32 if how.modulus(clients) <= 1 << 32 else 64


def commitment(share: bytes) -> bytes:
    """Return a digest by which a share is recognised when it comes back."""
    return hashlib.sha256(b"gradveil share " + share).digest()


def recovered(shares: Sequence[bytes], length: int) -> bytes:
    """Return the secret of some shares. Raise MessageError if they do not fit together."""
    try:
        found = combine_shares(list(shares))
    except Exception as error:  # whatever the library meets in shares that somebody made up
        raise MessageError("Shares of a key must fit together, got others.") from error
    if len(found) != length:
        raise MessageError("Shares of a key must fit together, got others.")
    return found
