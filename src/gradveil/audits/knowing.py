"""An attacker who knows the defence may still play the plain attack, and keeps the better of both guesses.

Both searches have losses of their own, which can't be compared. The attacker therefore goes by what it can check:

- If it has public images, it rehearses: it plays clients with such images under the same defence, attacks them in both
  ways, and plays the way that was better on them.
- Without public images it keeps the plain guess of a target if the plain search explained the update and the search
  that knows the defence did not.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gradveil.attacks import Attack
from gradveil.attacks.parts.combined import ignorant, mean_psnr, mixed
from gradveil.progress import part
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.threat.rehearsal import rehearse, unplayable
from gradveil.types import Batch

PLAIN = "plain attack"
"""What the rows of a knowing attacker name as countermove if it kept the plain guess."""


def played(
    attack: Attack,
    seen: Observation,
    rng: Callable[[], torch.Generator],
    spare: Sequence[Batch] = (),
) -> Reconstruction:
    """Return the guesses of an attack; an attacker who knows the defence keeps the better of both ways.

    Args:
        attack: the attack.
        seen: what the server saw.
        rng: makes the generator of all random draws, the same each time: a plain guess is that of the plain row.
        spare: public images of a few updates, not among those that the attack learns from.
    """
    plain_too = Knowledge.DEFENCE not in attack.needs and not attack.weighs_knowledge
    if not plain_too or not seen.knows(Knowledge.DEFENCE):
        return attack(seen, rng())
    if spare and seen.knows(Knowledge.PUBLIC_DATA) and not unplayable(seen):
        known, plain = rehearsed(attack, seen, spare, rng)
        told = f"on public images {known:.1f} dB knowing the defence, {plain:.1f} dB without"
        with part(2, 3):
            return _noted(attack(seen, rng()), told) if known >= plain else _plain(attack(ignorant(seen), rng()), told)
    with part(0, 2):
        result = attack(seen, rng())
    if bool(result.converged.all()):
        return result
    with part(1, 2):
        other = attack(ignorant(seen), rng())
    return mixed(
        result, _plain(other, "only the plain search explained the update"), other.converged & ~result.converged
    )


def rehearsed(
    attack: Attack, seen: Observation, spare: Sequence[Batch], rng: Callable[[], torch.Generator]
) -> tuple[float, float]:
    """Return the mean PSNR of both ways on clients with public images: knowing the defence, and not."""
    device = next(iter(seen.updates.values())).device
    stage = rehearse(seen, [batch.to(device) for batch in spare], int(torch.randint(2**62, (), generator=rng())))
    with part(0, 3):
        known = mean_psnr(attack(stage, rng()), spare)
    with part(1, 3):
        return known, mean_psnr(attack(ignorant(stage), rng()), spare)


def _plain(result: Reconstruction, note: str) -> Reconstruction:
    return _noted(replace(result, answers=(PLAIN,) * len(result.images)), f"the plain guess is kept: {note}")


def _noted(result: Reconstruction, note: str) -> Reconstruction:
    notes = result.why or ("",) * len(result.images)
    return replace(result, why=tuple("; ".join(filter(None, [why, note])) for why in notes))
