"""On what terms a site takes part in a secure sum: who is in it, with which keys and weights, how many must be left.

The server writes the roster of a sum. A site reads it here, and refuses it unless its own keys are in it, the threshold
is more than half of the clients and not below its policy, weights are such that no update outweighs all others, and, if
it knows its peers, everybody's keys are signed by them.
"""

from collections.abc import Sequence
from pathlib import Path

from gradveil.config import read_settings
from gradveil.engines.messages import listed, read_config, whole
from gradveil.engines.site import Site
from gradveil.engines.site_codes import refused
from gradveil.engines.site_sum_state import Part, signed_text
from gradveil.engines.sum_masks import Member, Roster, public_bytes, public_key
from gradveil.errors import ConfigError, MessageError

from flwr.app import RecordDict  # isort: skip - messages says if it is missing
from flwr.supercore.primitives.asymmetric import verify_signature  # isort: skip

MOST_MEMBERS, MOST_ATTEMPTS = 10_000, 1000
"""Clients of a sum, and attempts at a round, at most."""


def read_roster(content: RecordDict) -> Roster:
    """Return the roster in a message: clients, keys, weights and the threshold. Nothing of it is believed yet."""
    asked = read_config(content, "sum")
    numbers, weights = listed(asked, "numbers", int, MOST_MEMBERS), listed(asked, "weights", float, MOST_MEMBERS)
    points = (listed(asked, key, bytes, MOST_MEMBERS) for key in ("mask-keys", "share-keys", "signatures"))
    try:
        members = tuple(Member(*values) for values in zip(numbers, *points, weights, strict=True))
    except ValueError as error:
        raise MessageError("A roster must have keys and weights of all its clients, got other numbers.") from error
    number, attempt = whole(asked, "round", 1, 10**9), whole(asked, "attempt", 1, MOST_ATTEMPTS)
    return Roster(number, attempt, whole(asked, "threshold", 1, MOST_MEMBERS), members)


def require_fair(site: Site, part: Part, roster: Roster) -> None:
    """Raise unless this site agrees to the roster: enough clients, its own keys, weights by the settings, peers."""
    try:
        roster.check()
        mine = roster.member(site.number)
    except (MessageError, StopIteration) as error:
        raise refused("sum", f"A sum must have this site and a fair threshold. {error}") from error
    secrets_ = (bytes.fromhex(part.mask_secret), bytes.fromhex(part.share_secret))
    if (mine.mask_key, mine.share_key) != tuple(map(public_bytes, secrets_)):
        raise refused("sum", "A sum must have this site's own keys, got others under its number.")
    fewest = max(site.policy.min_sum, site.defence.fewest_clients, part.floor)
    if roster.threshold < fewest:
        raise refused("sum", f"This site's sums need {fewest} clients or more, got a threshold of {roster.threshold}.")
    if any(not 0 <= number < site.settings.clients for number in roster.numbers):
        raise refused("sum", "A sum must be of the run's clients, got others.")
    _require_weights(site, [member.weight for member in roster.members])
    _require_peers(site, roster)


def _require_weights(site: Site, weights: Sequence[float]) -> None:
    """Raise unless no client's weight hides those of others: with weights of 0, a sum is a single update."""
    smallest, largest = min(weights), max(weights)
    if site.settings.weighting == "uniform" and site.settings.sampling == "uniform" and smallest != largest:
        raise refused("sum", "All weights must be equal under weighting = uniform, got different ones.")
    if not largest or smallest < site.policy.min_weight * largest:
        raise refused(
            "sum",
            f"Every weight in a sum must be at least min-weight = {site.policy.min_weight:g} of the largest, got "
            f"{smallest:g} beside {largest:g}. If the sites' numbers of images differ by more, agree on another "
            "min-weight, or on weighting = uniform.",
        )


def _require_peers(site: Site, roster: Roster) -> None:
    """Raise unless every client's keys are signed by the key that the site's file of peers has for it."""
    if not site.policy.peers:
        return
    try:
        known = read_settings(Path(site.policy.peers))
        for member in roster.members:
            point = bytes.fromhex(str(known.get(str(member.number), "")))
            text = signed_text(site.run, roster.round, roster.attempt, member.number, member.mask_key, member.share_key)
            if not verify_signature(public_key(point), text, member.signature):
                raise refused("peers", f"Keys of client {member.number} are not signed by the peer of this number.")
    except (ConfigError, MessageError, ValueError) as error:
        raise refused("peers", f"peers must have the public key of every client of a sum. {error}") from error
