"""Flags: lines of the summary whose comparison needs care, each with the reason in words."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradveil.metrics.recognition import OTHER_IMAGES, WORSE_THAN_BLIND
from gradveil.registry import parse_spec
from gradveil.rows import Row

MARGIN = 1.0
"""dB of mean PSNR by which lines must differ to be flagged: the same attack varies as much from seed to seed."""
MARK = "!"
"""The mark of a flagged line in the console."""

MORE = "leaks more than no defence"
STEPS = "the attacker who knows the defence took more steps than the plain one"
WORSE = "knowing the defence did worse than not knowing it"

Key = tuple[str, str, bool]


def flagged(
    lines: Sequence[Row], steps: Mapping[tuple[Any, ...], float | None], others: Collection[tuple[Any, ...]] = ()
) -> list[Row]:
    """Return the lines of a summary with their ``flags``.

    Args:
        lines: one per defence, attack and kind of attacker.
        steps: the attack's steps of each line, by defence, attack and whether the attacker knows the defence.
        others: the lines, named in the same way, with updates that may be of other images than those that are scored.

    A line is flagged if its attack did worse than a blind guess, if it leaks more than the same attack without a
    defence, if its attacker knows the defence and took more steps than the one who does not, and if that attacker did
    worse. The first and the last two mean that an attack is weaker than it could be: an attacker may always guess
    blindly, or play the plain attack. The second is mostly chance, or a defence that helps the attack.
    """
    by_key: dict[Key, Row] = {(line["defence"], line["attack"], line["adaptive"]): line for line in lines}
    return [
        line | {"flags": [*_flags(line, by_key, steps), *[OTHER_IMAGES] * (key in others)]}
        for key, line in zip(by_key, lines, strict=True)
    ]


def _flags(line: Row, lines: Mapping[Key, Row], steps: Mapping[tuple[Any, ...], float | None]) -> list[str]:
    plain_key = line["defence"], line["attack"], False
    plain = lines.get(plain_key) if line["adaptive"] else None
    undefended = lines.get(("none", line["attack"], False)) if line["defence"] != "none" else None
    effort = steps.get((*plain_key[:2], True)), steps.get(plain_key)
    found = {
        WORSE_THAN_BLIND: _below(line["psnr"], line["blind_psnr"], 0.0),
        MORE: undefended is not None and _below(undefended["psnr"], line["psnr"], MARGIN),
        STEPS: plain is not None and _below(effort[1], effort[0], 0.0),
        WORSE: plain is not None and _below(line["psnr"], plain["psnr"], MARGIN),
    }
    return [text for text, holds in found.items() if holds]


def _below(one: float | None, other: float | None, margin: float) -> bool:
    return one is not None and other is not None and one < other - margin


def explained(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence per flag that some line has, with the lines that have it.

    Example:
        >>> explained([{"defence": "prune", "attack": "gs", "adaptive": True, "flags": [WORSE]}])
        ['! knowing the defence did worse than not knowing it: prune, gs adaptive']
    """
    told: dict[str, list[str]] = {}
    for line in lines:
        name = f"{line['defence']}, {parse_spec(line['attack'])[0]} {'adaptive' if line['adaptive'] else 'plain'}"
        for flag in line.get("flags") or ():
            told.setdefault(flag, []).append(name)
    return [f"{MARK} {flag}: {'; '.join(names)}" for flag, names in told.items()]
