"""The countermoves that a known defence names, as an attacker reads them off an observation."""

import math
from collections.abc import Mapping
from dataclasses import replace

from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import UnknownNameError
from gradveil.threat import Knowledge, Observation


def countermoves(seen: Observation) -> Mapping[str, Countermove]:
    """Return the countermoves that the defence's own file names, or none if the defence is not known.

    A defence states the noise of one client. In the mean of K clients it has 1 / sqrt(K) times that strength.
    """
    if not seen.knows(Knowledge.DEFENCE):
        return {}
    batch = seen.num_examples if seen.single_step else seen.local_steps.releases(seen.num_examples).batch_size
    secret = (Knowledge.PRIVATE_STATE, Knowledge.KEY, Knowledge.LOCK)
    moves = seen.defence.adaptive(
        Arrived(
            seen.mean_gradients,
            seen.step_lengths,
            batch / seen.clients,
            seen.public,
            seen.network,
            seen.private_state if any(map(seen.knows, secret)) else (),
            seen.private_changes if seen.knows(Knowledge.LOCK) else (),
            1 + len(seen.later) if seen.from_the_first else 1,
            seen.clients,
        )
    )
    share = 1 / math.sqrt(seen.clients)
    return {
        name: replace(move, noise={key: std * share for key, std in move.noise.items()}) for name, move in moves.items()
    }


def countermove(seen: Observation, choice: str = "") -> Countermove | None:
    """Return the named countermove ("" is the first), or None for ``none`` or an unknown defence."""
    moves = countermoves(seen)
    if not moves or choice == "none":
        return None
    if choice and choice not in moves:
        raise UnknownNameError(f"countermove to {seen.defence.spec}", choice, moves)
    return moves[choice] if choice else next(iter(moves.values()))
