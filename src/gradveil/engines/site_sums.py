"""A site's part in a secure sum: its keys, shares of them for the others, its masked update, and opening the sum once.

Four messages per round: ``keys`` asks for fresh public keys, ``shares`` hands out the roster and collects encrypted
shares of the site's secrets, ``train`` collects the masked update, ``unmask`` asks for the shares that open the sum.
All state is one file of the site, so that the very same message gets the very same answer, and nothing else does.

What a site refuses, whatever the server says: an unfair roster (`gradveil.engines.site_sum_terms`); fewer survivors
than the threshold; survivors without itself; both a client's seed and its key; and to open a second sum of a round. As
every site opens one sum per round, more than half are needed, and a later attempt needs as many as an earlier one, a
server can't open two sums of one round and subtract them.
"""

import secrets
from dataclasses import replace

import numpy as np

from gradveil.engines.messages import listed, read_config, whole
from gradveil.engines.site import Site
from gradveil.engines.site_codes import refused
from gradveil.engines.site_ledger import digest
from gradveil.engines.site_sum_state import Part, identity, load_part, save_part, signed_text
from gradveil.engines.site_sum_terms import MOST_ATTEMPTS, MOST_MEMBERS, read_roster, require_fair
from gradveil.engines.sum_masks import (
    SEED_BYTES,
    SHARE_BYTES,
    Codes,
    Roster,
    commitment,
    mask,
    new_secret,
    pair_mask,
    private_key,
    public_bytes,
    shared_key,
)

from cryptography.fernet import InvalidToken  # isort: skip - comes with Flower
from flwr.app import ConfigRecord, RecordDict  # isort: skip
from flwr.common.secure_aggregation.crypto.shamir import create_shares  # isort: skip
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt  # isort: skip
from flwr.common.secure_aggregation.secaggplus_utils import (  # isort: skip
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import sign_message  # isort: skip


def is_secure(site: Site) -> bool:
    """Return whether this client's update goes into a secure sum; a guard's never does."""
    early = site.defence.early_clients(site.settings.clients)
    return site.settings.aggregation == "secure" and site.number not in early


def keys(site: Site, content: RecordDict) -> RecordDict:
    """Answer with public keys for an attempt at a round."""
    if not is_secure(site):
        raise refused("sum", "Keys for a secure sum are for runs with aggregation = secure, got another run.")
    asked = read_config(content, "sum")
    number = whole(asked, "round", 1, site.settings.rounds)
    attempt = whole(asked, "attempt", 1, MOST_ATTEMPTS)
    part = load_part(site)
    if part is None or (part.round, part.attempt) != (number, attempt):
        _require_new(site, part, number, attempt)
        part = _begin(site, number, attempt, part)
        save_part(site, part)
    points = [public_bytes(bytes.fromhex(secret)) for secret in (part.mask_secret, part.share_secret)]
    signature, opened = bytes.fromhex(part.signature), part.opened is not None
    return _answer({"mask-key": points[0], "share-key": points[1], "signature": signature, "opened": opened})


def _require_new(site: Site, part: Part | None, number: int, attempt: int) -> None:
    """Raise unless the site may begin another attempt: its round is not over, and no sum of it was opened."""
    if part is not None and part.round == number:
        if part.opened is not None:
            raise refused("opened", f"The sum of round {number} was opened; another one of this round never is.")
        if attempt < part.attempt:
            raise refused("round", f"Attempts at a round must increase, got {attempt} after {part.attempt}.")
    elif site.book.ledger.run(site.run).begun >= number:
        raise refused("round", f"Round {number} is over, or its state is lost.")


def _begin(site: Site, number: int, attempt: int, before: Part | None) -> Part:
    mask_secret, share_secret = new_secret(), new_secret()
    text = signed_text(site.run, number, attempt, site.number, public_bytes(mask_secret), public_bytes(share_secret))
    signature = sign_message(private_key(identity(site)), text)
    floor = max(before.floor, before.threshold) if before is not None and before.round == number else 0
    return Part(number, attempt, mask_secret.hex(), share_secret.hex(), signature.hex(), floor)


def shares(site: Site, content: RecordDict) -> RecordDict:
    """Accept the roster of a sum; answer with shares of this site's seed and key, encrypted for each other client."""
    part, roster = _current(site, content), read_roster(content)
    if part.roster not in ("", roster.digest()):
        raise refused("sum", "The clients of a sum must not change within an attempt, got others.")
    if not part.roster:
        require_fair(site, part, roster)
        part = _shared(site, part, roster)
        save_part(site, part)
    to, ciphertexts, commitments = part.outbox
    return _answer({
        "to": [int(number) for number in to],
        "ciphertexts": [bytes.fromhex(text) for text in ciphertexts],
        "commitments": [bytes.fromhex(text) for text in commitments],
    })  # fmt: skip


def _shared(site: Site, part: Part, roster: Roster) -> Part:
    """Return the state with a new seed and shares of it and of the key for masks."""
    seed, count = secrets.token_bytes(SEED_BYTES), len(roster.members)
    of_seed = create_shares(seed, roster.threshold, count)
    of_key = create_shares(bytes.fromhex(part.mask_secret), roster.threshold, count)
    own, sealed = ["", ""], dict[int, str]()
    for member, one, other in zip(roster.members, of_seed, of_key, strict=True):
        if member.number == site.number:
            own = [one.hex(), other.hex()]
            continue
        key = shared_key(bytes.fromhex(part.share_secret), member.share_key)
        text = share_keys_plaintext_concat(site.number, member.number, one, other)
        sealed[member.number] = encrypt(key, text).hex()
    marks = [commitment(share).hex() for pair in zip(of_seed, of_key, strict=True) for share in pair]
    members = {str(each.number): [each.mask_key.hex(), each.share_key.hex()] for each in roster.members}
    outbox = [[str(number) for number in sealed], list(sealed.values()), marks]
    return replace(
        part, roster=roster.digest(), threshold=roster.threshold, weight=roster.member(site.number).weight,
        members=members, seed=seed.hex(), own=own, outbox=outbox,
    )  # fmt: skip


def join(site: Site, content: RecordDict, request: str) -> Part:
    """Take in the others' shares, before training. Raise unless enough are there and all can be read.

    The state is saved, so that the same attempt is never answered with another model, other clients or other shares.
    """
    part = _current(site, content)
    if not part.roster:
        raise refused("sum", "An update is masked only for a roster that this site accepted, got none before.")
    asked = read_config(content, "sum")
    senders, sealed = listed(asked, "from", int, MOST_MEMBERS), listed(asked, "ciphertexts", bytes, MOST_MEMBERS)
    others = [number for number in map(int, part.members) if number != site.number]
    if len(set(senders)) != len(senders) or not set(senders) <= set(others) or len(sealed) != len(senders):
        raise refused("sum", "Shares must come from other clients of the sum, one each, got others.")
    if len(senders) + 1 < part.threshold:
        raise refused("sum", f"A sum needs {part.threshold} clients, got {len(senders) + 1} that shared their keys.")
    whole_request = digest(site.run, part.roster, sorted([*senders, site.number]), request)
    if part.request not in ("", whole_request):
        raise refused("sum", "An attempt at a sum is answered once, got another model or other clients.")
    held = {str(number): _opened(site, part, number, text) for number, text in zip(senders, sealed, strict=True)}
    part = replace(part, held=held, request=whole_request)
    save_part(site, part)
    return part


def _opened(site: Site, part: Part, sender: int, sealed: bytes) -> list[str]:
    """Return another client's shares of its seed and key, from its encrypted message to this site."""
    key = shared_key(bytes.fromhex(part.share_secret), bytes.fromhex(part.members[str(sender)][1]))
    try:
        source, to, of_seed, of_key = share_keys_plaintext_separate(decrypt(key, sealed))
    except (InvalidToken, ValueError, TypeError) as error:
        raise refused("sum", f"Shares of client {sender} can't be read: they are not for this site.") from error
    if (source, to) != (sender, site.number) or not 0 < len(of_seed) <= SHARE_BYTES >= len(of_key) > 0:
        raise refused("sum", f"Shares of client {sender} must be its own, for this site, got others.")
    return [of_seed.hex(), of_key.hex()]


def masked(site: Site, part: Part, codes: Codes) -> Codes:
    """Return whole numbers plus all masks, modulo 2^64."""
    total = codes + mask(bytes.fromhex(part.seed), part.request, len(codes))
    for number in part.held:
        key = shared_key(bytes.fromhex(part.mask_secret), bytes.fromhex(part.members[number][0]))
        total = total + pair_mask(site.number, int(number), key, part.request, len(codes))
    return np.asarray(total, np.uint64)


def unmask(site: Site, content: RecordDict) -> RecordDict:
    """Answer with shares of the survivors' seeds and of the lost clients' keys, once per round."""
    part, asked = _current(site, content), read_config(content, "sum")
    alive, dead = (sorted(listed(asked, key, int, MOST_MEMBERS)) for key in ("alive", "dead"))
    if part.opened is not None and [list(each) for each in part.opened] != [alive, dead]:
        raise refused("opened", "The sum of this round was opened for other survivors, and never is again.")
    if not part.request:
        raise refused("sum", "A sum is opened only after this site's masked update, got none before.")
    if sorted(alive + dead) != sorted([site.number, *map(int, part.held)]):
        raise refused("sum", "Each client is a survivor or lost, got one that is both, neither, or no client.")
    if site.number not in alive or len(alive) < part.threshold:
        raise refused("sum", f"A sum is opened for {part.threshold} survivors or more with this site, got others.")
    save_part(site, replace(part, opened=[alive, dead]))
    held = {site.number: part.own} | {int(number): pair for number, pair in part.held.items()}
    given = [held[number][0] for number in alive] + [held[number][1] for number in dead]
    return _answer({"of": [*alive, *dead], "shares": [bytes.fromhex(share) for share in given]})


def _current(site: Site, content: RecordDict) -> Part:
    """Return the state of the attempt that a message names. Raise if it is not the site's last one."""
    part, asked = load_part(site), read_config(content, "sum")
    named = whole(asked, "round", 1, site.settings.rounds), whole(asked, "attempt", 1, MOST_ATTEMPTS)
    if not is_secure(site) or part is None or (part.round, part.attempt) != named:
        raise refused("sum", f"A step of a sum must belong to the attempt that began last, got {named}.")
    return part


def _answer(values: dict[str, object]) -> RecordDict:
    return RecordDict({"facts": ConfigRecord(values)})  # type: ignore[arg-type]
