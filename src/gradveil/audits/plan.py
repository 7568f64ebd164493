"""The cells of an audit: the pieces of work that are run, saved and resumed as a whole."""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from gradveil.attacks import MembershipAttack, build_any_attack
from gradveil.attacks.base import AnyAttack
from gradveil.audits.settings import AuditSettings
from gradveil.defences import build_defence
from gradveil.threat import Knowledge

Rows = list[dict[str, Any]]

SLICE = 16
"""Targets per cell: enough to attack at once, few enough to share the work between two cores."""


@dataclass(frozen=True)
class Cell:
    """One attack on one defence with one seed, for some of the targets; or the training under one defence.

    Attributes:
        name: the name of its files.
        kind: privacy, utility or membership.
        defence: the defence's spec.
        seed: the seed of everything random.
        attack: the attack's spec; "" for a training.
        adaptive: whether the attacker knows the defence.
        first: the first target.
        last: one more than the last target.
        round: the tapped round whose updates are attacked; 0 for a cell that is not about one round.
        needs: the name of the training whose updates are attacked, which must be finished before; "" for none.
        later: tapped rounds after ``round`` that are attacked together with it.
    """

    name: str
    kind: str
    defence: str
    seed: int
    attack: str = ""
    adaptive: bool = False
    first: int = 0
    last: int = 0
    round: int = 0
    needs: str = ""
    later: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """What the cell does, for people."""
        if self.kind == "utility":
            return f"training under {self.defence}"
        rounds = "/".join(map(str, (self.round, *self.later)))
        where = f" in round{'s' * bool(self.later)} {rounds}" if self.needs else ""
        return f"{self.attack} on {self.defence}{where}{' (adaptive)' if self.adaptive else ''}"

    def to_json(self) -> dict[str, Any]:
        """Return the cell as plan.json holds it."""
        facts = asdict(self)
        return facts | {"targets": [facts.pop("first"), facts.pop("last")]}


def plan(settings: AuditSettings, without: Collection[str] = ()) -> list[Cell]:
    """Return all cells in the order of the rows: for each seed and defence first its training, then its attacks.

    Attacks need the training's taps. An attack on membership trains by itself and has one cell for all its rounds. Only
    the plain attack is run if the attack does not adapt to the defence. Attacks ``without`` are left out.
    """
    cells: list[Cell] = []
    for seed in settings.all_seeds:
        for defence in settings.defences:
            training = f"utility-{len(cells):05d}" if settings.rounds else ""
            if training:
                cells.append(Cell(training, "utility", defence, seed))
            own = build_defence(defence)
            for attack in (spec for spec in settings.attacks if spec not in without):
                built = build_any_attack(attack)
                adapts = settings.adaptive and built.adapts_to(own)
                if isinstance(built, MembershipAttack):
                    for knows in [False] + [True] * adapts:
                        cells.append(Cell(f"membership-{len(cells):05d}", "membership", defence, seed, attack, knows))
                    continue
                plain = Knowledge.DEFENCE not in built.needs
                for adaptive in [False] * plain + [True] * adapts:
                    for taps, first in product(_looked_at(built, settings), range(0, settings.targets, SLICE)):
                        last = min(first + SLICE, settings.targets)
                        what = (f"privacy-{len(cells):05d}", "privacy", defence, seed, attack, adaptive)
                        cells.append(Cell(*what, first, last, taps[0], training, taps[1:]))
    return cells


def _looked_at(attack: AnyAttack, settings: AuditSettings) -> list[tuple[int, ...]]:
    """Return the tapped rounds of each cell: one by one, or all together if the attack takes them so."""
    return [settings.taps] if attacks_together(attack) else [(tap,) for tap in settings.taps]


def attacks_together(attack: AnyAttack) -> bool:
    """Return whether an attack takes all tapped rounds of a client at once."""
    return bool(getattr(attack, "together", False))


def num_rows(cell: Cell, settings: AuditSettings) -> int:
    """Return the number of rows of a finished cell."""
    attack = build_any_attack(cell.attack) if cell.kind == "membership" else None
    if isinstance(attack, MembershipAttack):
        return len(attack.measured_rounds(settings.rounds))
    return cell.last - cell.first if cell.kind == "privacy" else 1


def facts_of(cell: Cell) -> dict[str, Any]:
    """Return the fields that all rows of a cell share."""
    facts: dict[str, Any] = {"kind": cell.kind, "defence": cell.defence, "seed": cell.seed, "cell": cell.name}
    if cell.kind == "utility":
        return facts
    own: dict[str, Any] = {"adaptive": cell.adaptive}
    if cell.kind == "privacy":
        own |= {"round": cell.round, "later_rounds": list(cell.later) or None}
    return facts | {"attack": cell.attack} | own


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite, which JSON can't hold."""
    return value if value is not None and math.isfinite(value) else None
