"""The countermoves that a known defence names, as an attacker reads them off an observation."""

from collections.abc import Mapping

from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import UnknownNameError
from gradveil.threat import Knowledge, Observation


def countermoves(seen: Observation) -> Mapping[str, Countermove]:
    """Return the countermoves that the defence's own file names, or none if the defence is not known."""
    if not seen.knows(Knowledge.DEFENCE):
        return {}
    batch = seen.num_examples if seen.single_step else seen.local_steps.releases(seen.num_examples).batch_size
    secret = (Knowledge.PRIVATE_STATE, Knowledge.KEY, Knowledge.LOCK)
    return seen.defence.adaptive(
        Arrived(
            seen.mean_gradients,
            seen.step_lengths,
            batch,
            seen.public,
            seen.network,
            seen.private_state if any(map(seen.knows, secret)) else (),
            seen.private_changes if seen.knows(Knowledge.LOCK) else (),
        )
    )


def countermove(seen: Observation, choice: str = "") -> Countermove | None:
    """Return the named countermove ("" is the first), or None for ``none`` or an unknown defence."""
    moves = countermoves(seen)
    if not moves or choice == "none":
        return None
    if choice and choice not in moves:
        raise UnknownNameError(f"countermove to {seen.defence.spec}", choice, moves)
    return moves[choice] if choice else next(iter(moves.values()))
