"""Rehearsals: a server plays clients that have its own public images, and looks at what they would send."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradveil.defences.base import Defence
from gradveil.errors import ThreatModelError
from gradveil.federated.protocol import Protocol
from gradveil.threat.knowledge import Knowledge, PublicKnowledge
from gradveil.threat.model import Observation, Script
from gradveil.threat.observe import Federation, observe
from gradveil.threat.seen import joined
from gradveil.types import Batch


def rehearse(seen: Observation, batches: Sequence[Batch], seed: int, rounds: int = 1) -> Observation:
    """Return what the server would see of clients that have these images and train as the observed ones did.

    An attacker who knows the defence plays it as it is, with new keys, noise and other private draws for each client,
    and with the tensors that were broadcast in the observed round. One who does not know it plays clients without a
    defence. The attacker has the same knowledge of the played clients as of the observed ones, as far as it can be had
    without a private image.

    Args:
        seen: what the server saw of the real clients.
        batches: the images of each played update; all of one size. All count as marked sensitive.
        seed: of all random draws.
        rounds: updates of each played client. With several, a batch is all that a client has, and FedSGD uses as many
            images per round as the observed clients did.

    Raises:
        ThreatModelError: the round can't be played, see `unplayable`.
    """
    reason = unplayable(seen)
    if reason:
        raise ThreatModelError(f"Clients with public images can't be played: {reason}.")
    script: Script = seen.script  # type: ignore[assignment]  # `unplayable` has checked it
    defended = seen.knows(Knowledge.DEFENCE)
    own = [replace(batch, sensitive=torch.ones_like(batch.sensitive)) for batch in batches]
    parts = [_dealt(batch, seen.clients) for batch in own] if seen.clients > 1 else [own]
    found = [
        observe(
            script.network if defended else seen.network,
            clients,
            threat=seen.threat,
            num_classes=seen.num_classes,
            defence=seen.defence if defended else Defence(),
            protocol=_one_round(script.protocol) if rounds == 1 else replace(script.protocol, rounds=rounds),
            public=_public(seen),
            federation=Federation(
                aux=script.aux,
                num_clients=script.num_clients,
                seed=seed + number,
                state=seen.network.state_dict(),
                public=seen.public,
            ),
        )
        for number, clients in enumerate(parts)
    ]
    return found[0] if len(found) == 1 else _stacked(found)


def unplayable(seen: Observation) -> str:
    """Return why a rehearsal is not possible, or "" if it is."""
    if seen.script is None:
        return "the network before the defence changed it is not known"
    if not seen.single_step and not seen.knows(Knowledge.LOCAL_STEPS):
        return "it is not known how clients train (local-steps)"
    return ""


def relative_work(seen: Observation, batch: Batch, most: float = math.inf) -> float:
    """Return the floating-point operations of playing a client, relative to one without a defence.

    Operations are counted, not timed, so that the answer is the same on every machine. Counting ends as soon as there
    are more than ``most`` times as many; then the answer is just above ``most``.
    """
    plain = _operations(seen.without(Knowledge.DEFENCE), batch, math.inf)
    return _operations(seen, batch, most * max(1, plain)) / max(1, plain)


def _operations(seen: Observation, batch: Batch, most: float) -> int:
    """Return the operations of playing a client, or the first count above ``most``."""
    with _Counter(most) as counter, suppress(_Enough):
        rehearse(seen, [batch], seed=0)
    return int(counter.total)


class _Enough(BaseException):
    """Ends a count. No Exception, so that no defence catches it."""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Counts floating-point operations, by torch's own formulas."""

    def __init__(self, most: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.total = most, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        if self.total > self.most:
            raise _Enough
        return result


def _one_round(protocol: Protocol) -> Protocol:
    """Return the protocol of one round in which FedSGD uses all images of a client: those of one update."""
    local = protocol.local
    return replace(protocol, rounds=1, local=replace(local, batch_size=0) if local.algorithm == "fedsgd" else local)


def _dealt(batch: Batch, clients: int) -> list[Batch]:
    """Return the images behind a mean as equal batches of its clients."""
    each = len(batch) // clients
    return [batch[slice(start, start + each)] for start in range(0, each * clients, each)]


def _public(seen: Observation) -> PublicKnowledge:
    return PublicKnowledge(
        seen.public_data if seen.knows(Knowledge.PUBLIC_DATA) else None,
        seen.class_averages if seen.knows(Knowledge.CLASS_AVERAGES) else None,
    )


def _stacked(found: Sequence[Observation]) -> Observation:
    """Return several means as updates of one observation; of the facts per update, keep labels and encodings."""
    first = found[0]
    updates, buffers = (
        {name: torch.cat([getattr(one, part)[name] for one in found]) for name in getattr(first, part)}
        for part in ("updates", "buffers")
    )
    facts = {key: fact for key, fact in first._facts.items() if key in _COMMON}
    if first.knows(Knowledge.LABELS):
        facts[Knowledge.LABELS] = torch.cat([one.labels for one in found])
    if first.knows(Knowledge.ENCODINGS):
        facts[Knowledge.ENCODINGS] = joined([one.encodings for one in found])
    return replace(first, updates=updates, buffers=buffers, _facts=facts)


_COMMON = (
    Knowledge.NUM_EXAMPLES, Knowledge.LOCAL_STEPS, Knowledge.DEFENCE, Knowledge.PUBLIC_DATA, Knowledge.CLASS_AVERAGES,
)  # fmt: skip
"""Facts that are the same for all updates."""
