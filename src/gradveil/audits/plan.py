"""Which cells an audit has: the pieces that are worked on, saved and resumed as a whole."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from gradveil.attacks import MembershipAttack, build_any_attack
from gradveil.audits.settings import AuditSettings
from gradveil.defences import build_defence
from gradveil.threat import Knowledge

Rows = list[dict[str, Any]]

SLICE = 16
"""Targets of a cell: many are attacked at once, and two cores have something to share."""


@dataclass(frozen=True)
class Cell:
    """One defence under one attack with one seed, for some of the targets if it has any; or the training under one.

    Attributes:
        name: of its files.
        kind: privacy, utility or membership.
        defence: the defence's text.
        seed: of everything random.
        attack: the attack's text; "" in a training.
        adaptive: whether the attacker knows the defence.
        first: the first target.
        last: the one behind the last.
    """

    name: str
    kind: str
    defence: str
    seed: int
    attack: str = ""
    adaptive: bool = False
    first: int = 0
    last: int = 0

    @property
    def title(self) -> str:
        """What it is, for people."""
        if self.kind == "utility":
            return f"training under {self.defence}"
        return f"{self.attack} on {self.defence}{' (adaptive)' if self.adaptive else ''}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in plan.json."""
        facts = asdict(self)
        return facts | {"targets": [facts.pop("first"), facts.pop("last")]}


def plan(settings: AuditSettings) -> list[Cell]:
    """All cells, in the order of the rows: for each seed and defence its training, then its attacks.

    An attack on membership has one cell for all its rounds. A defence that names no countermove has nothing to know,
    and an attack that does not adapt has no use for it: then only the plain attack is run.
    """
    cells: list[Cell] = []
    for seed in settings.all_seeds:
        for defence in settings.defences:
            if settings.rounds:
                cells.append(Cell(f"utility-{len(cells):05d}", "utility", defence, seed))
            own = build_defence(defence)
            knowing = settings.adaptive and own.overrides("adaptive")
            for attack in settings.attacks:
                if isinstance(built := build_any_attack(attack), MembershipAttack):
                    cells.append(Cell(f"membership-{len(cells):05d}", "membership", defence, seed, attack))
                    continue
                adapts = knowing and (built.adapts or own.hides_images)
                plain = Knowledge.DEFENCE not in built.needs
                for adaptive in [False] * plain + [True] * adapts:
                    for first in range(0, settings.targets, SLICE):
                        last = min(first + SLICE, settings.targets)
                        name = f"privacy-{len(cells):05d}"
                        cells.append(Cell(name, "privacy", defence, seed, attack, adaptive, first, last))
    return cells


def num_rows(cell: Cell, settings: AuditSettings) -> int:
    """How many rows a cell has when it is finished."""
    attack = build_any_attack(cell.attack) if cell.kind == "membership" else None
    if isinstance(attack, MembershipAttack):
        return len(attack.measured_rounds(settings.rounds))
    return cell.last - cell.first if cell.kind == "privacy" else 1


def facts_of(cell: Cell) -> dict[str, Any]:
    """What every row of a cell says of itself."""
    facts: dict[str, Any] = {"kind": cell.kind, "defence": cell.defence, "seed": cell.seed, "cell": cell.name}
    if cell.kind == "utility":
        return facts
    return facts | {"attack": cell.attack} | ({"adaptive": cell.adaptive} if cell.kind == "privacy" else {})


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
