"""A site's state in a secure sum, one file of its private folder, and the key by which other sites know it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gradveil.engines.site import Site
from gradveil.engines.sum_masks import new_secret, public_bytes
from gradveil.errors import RunFolderError
from gradveil.limits import parse_json
from gradveil.storage import make_folder, write_atomic


@dataclass(frozen=True)
class Part:
    """A site's state in one attempt at a round's sum; bytes are kept as hexadecimal digits.

    Attributes:
        round: the round.
        attempt: the attempt, from 1.
        mask_secret: secret key for masks.
        share_secret: secret key by which it reads shares.
        signature: of both public keys.
        roster: digest of the roster that it accepted; "" before.
        floor: the largest threshold of earlier attempts at this round.
        threshold: of this roster.
        weight: of its update in the sum.
        members: number and public keys of each client in it.
        seed: of its own mask.
        own: its own share of its seed and of its key.
        outbox: the encrypted shares and the commitments that it sent.
        held: the shares of others' seeds and keys that it holds, by client.
        request: digest of the request to which its masked update was the answer; "" before.
        opened: the survivors and the others for whom it gave shares; None before.
    """

    round: int
    attempt: int
    mask_secret: str
    share_secret: str
    signature: str
    floor: int = 0
    roster: str = ""
    threshold: int = 0
    weight: float = 0.0
    members: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seed: str = ""
    own: Sequence[str] = ()
    outbox: Sequence[Sequence[str]] = ()
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    request: str = ""
    opened: Sequence[Sequence[int]] | None = None


def _path(site: Site) -> Path:
    return site.answer_path.with_name("sum.json")


def load_part(site: Site) -> Part | None:
    """Return the state of the last attempt, or None if there was none in this run."""
    path = _path(site)
    if not path.exists():
        return None
    try:
        return Part(**parse_json(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{path} must be a site's state in a secure sum, got a damaged file.") from error


def save_part(site: Site, part: Part) -> None:
    """Replace the state; only when this returns may an answer leave the site."""
    make_folder(_path(site).parent, 0o700)
    write_atomic(_path(site), json.dumps(asdict(part)).encode(), mode=0o600)


def signed_text(run: str, number: int, attempt: int, client: int, mask_key: bytes, share_key: bytes) -> bytes:
    """Return what a site signs with its own key: whose keys these are, and for what."""
    return f"gradveil {run} {number} {attempt} {client} ".encode() + mask_key + share_key


def identity(site: Site) -> bytes:
    """Return the site's own secret key; its public key stands beside it, for the peers' files of other sites."""
    path = Path(site.policy.private_folder) / f"identity-{site.number}.key"
    if not path.exists():
        secret = new_secret()
        make_folder(path.parent, 0o700)
        write_atomic(path, secret.hex().encode(), mode=0o600)
        write_atomic(path.with_suffix(".pub"), f"{public_bytes(secret).hex()}\n".encode())
    return bytes.fromhex(path.read_text())
