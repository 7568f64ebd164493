"""Decoding after an attack: which stages a known defence's countermove names, and how they run one after the other.

An attack guesses the images that the network saw. If a defence changed the images before training, decoders turn these
guesses into private images. A stage is one decoder; see `gradveil.attacks.decoder`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from gradveil.attacks.parts.countermoves import countermove, countermoves
from gradveil.threat import Knowledge, Observation, Reconstruction

Inversion = Callable[[Observation, torch.Generator], Reconstruction]
"""An attack that guesses what the network saw."""


@runtime_checkable
class Stage(Protocol):
    """A decoder, as far as the attack before it needs to know."""

    @property
    def name(self) -> str:
        """What users type."""

    @property
    def spec(self) -> str:
        """The name with its settings."""

    def lacks(self, seen: Observation) -> list[str]:
        """Return what the stage needs but is not granted."""

    def decode_after(
        self, invert: Inversion | None, found: Reconstruction, seen: Observation, rng: torch.Generator
    ) -> Reconstruction:
        """Return private images from guesses of what the network saw.

        ``invert`` is the attack that made the guesses, on which a stage may rehearse; None if they are exact, or not
        those of an attack alone.
        """


Stages = Sequence[Stage]


def stage_options(seen: Observation, choice: str, build: Callable[[str], Stage]) -> list[Stages]:
    """Return the stages of each countermove that names any, in the defence's order (the strongest first).

    Args:
        seen: what the server saw.
        choice: the countermove to play; "" considers all of them, ``none`` plays none.
        build: makes a stage from its text.
    """
    known = {Knowledge.DEFENCE, Knowledge.NUM_EXAMPLES} | (set() if seen.single_step else {Knowledge.LOCAL_STEPS})
    if not known <= seen.threat.knows or choice == "none":
        return []
    chosen = countermove(seen, choice) if choice else None
    moves = [chosen] if chosen else list(countermoves(seen).values())
    return [[build(spec) for spec in move.decode] for move in moves if move.decode]


def runnable(options: Sequence[Stages], seen: Observation) -> Stages:
    """Return the first option whose stages lack nothing, or the first one if each lacks something."""
    fitting = [stages for stages in options if not any(stage.lacks(seen) for stage in stages)]
    return next(iter(fitting or options), [])


def decoded(
    result: Reconstruction, stages: Stages, seen: Observation, rng: torch.Generator, invert: Inversion | None
) -> Reconstruction:
    """Run the stages one after the other. A stage that lacks something is skipped, and ``why`` says so.

    Only the first stage can rehearse on ``invert``, the attack that made ``result``: later ones get decoded guesses.
    """
    for stage in stages:
        lacking = stage.lacks(seen)
        if lacking:
            reason = f"{stage.name} needs {', '.join(lacking)}"
            result = noted(result, f"not decoded: {reason}")
            result = replace(result, not_decoded=result.not_decoded or (reason,) * len(result.images))
            continue
        before = result.answers or ("",)
        result, invert = stage.decode_after(invert, result, seen, rng), None
        played = ", then ".join(filter(None, [before[0], stage.spec]))
        result = replace(result, answers=(played,) * len(result.images))
    return result


def with_untried(
    result: Reconstruction, options: Sequence[Stages], played: Stages, seen: Observation
) -> Reconstruction:
    """Note in ``why`` which stages of the first option were not tried, and what they need."""
    for stage in next(iter(options), []):
        if stage not in played and (lacking := stage.lacks(seen)):
            result = noted(result, f"not tried: {stage.spec} needs {', '.join(lacking)}")
    return result


def noted(result: Reconstruction, note: str) -> Reconstruction:
    """Return the guesses with a note added to the remark on each target."""
    return replace(result, why=tuple("; ".join(filter(None, [why, note])) for why in result.why))
