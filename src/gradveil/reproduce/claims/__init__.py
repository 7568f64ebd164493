"""What papers claim, and whether it holds in results: one module for each paper, its claims in the paper's order."""

import importlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradveil.reproduce.base import SCALES, command

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "fails", "undecided", "not run"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN)
PLAIN, KNOWING = "plain", "knows the defence"
RULE = (
    "The rule is the same for every claim: it **holds** if the figure of every seed lies in the stated range, "
    "**fails** if that of no seed does, and is **undecided** if seeds disagree, if they are fewer than the claim "
    "needs, if the scale is smaller than it needs, or if the rows lack what it needs, such as an attack that works "
    "and a training that learns without defence. The reason is stated. Claims about accuracy need three "
    "seeds, others one."
)

Rows = Sequence[Mapping[str, Any]]
Run = Mapping[str, Any]
"""The document of one experiment at one scale and seed, see `gradveil.reproduce.base.run_experiment`."""


class TooLittle(Exception):  # noqa: N818 - a state, not an error: these rows can't decide a claim
    """The rows can't decide a claim; the message says why."""


class Contradicted(Exception):  # noqa: N818 - a state as well
    """The rows lack what a claim says exists; the message says what."""


@dataclass(frozen=True)
class Claim:
    """One table entry, figure or sentence of a paper, with the rule that tells whether it holds.

    Attributes:
        id: a short name, unique within the paper.
        where: the place in the paper.
        says: the claim in our words.
        paper: the paper's own figure, or "" if it gives none.
        table: the experiment that measures it, or "".
        measure: computes the deciding figure from the rows of one run; raises `TooLittle` if they can't
            decide, and `Contradicted` if something that the paper says exists does not.
        figure: what that figure is, in words.
        at_least: the lowest value for which the claim holds.
        at_most: the highest value for which the claim holds.
        scale: the smallest scale that can decide it.
        seeds: the number of seeds that it needs.
        attacker: the attacker that it is about: `PLAIN`, as in the papers, `KNOWING`, or "" for none.
        ours: whether the paper makes the claim against weaker attackers only.
        why: the reason why nothing measures it.
    """

    id: str
    where: str
    says: str
    paper: str = ""
    table: str = ""
    measure: Callable[[Rows], float] | None = None
    figure: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf
    scale: str = "small"
    seeds: int = 1
    attacker: str = ""
    ours: bool = False
    why: str = ""

    @property
    def range(self) -> str:
        """The range in which the claim holds, in words."""
        low, high = f"at least {self.at_least:g}", f"at most {self.at_most:g}"
        return " and ".join([low] * (self.at_least > -math.inf) + [high] * (self.at_most < math.inf))


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict.

    Attributes:
        claim: the claim.
        verdict: one of `VERDICTS`.
        ours: our figure, mean and spread over the seeds, or "".
        scale: the scale and number of seeds of the runs that decided, or "".
        why: the reason for the verdict.
    """

    claim: Claim
    verdict: str
    ours: str = ""
    scale: str = ""
    why: str = ""


def claims_of(paper: str) -> Sequence[Claim]:
    """Return the claims of a paper, or none if it has no module here."""
    try:
        module = importlib.import_module(f"{__name__}.{paper}")
    except ModuleNotFoundError:
        return ()
    found: Sequence[Claim] = module.CLAIMS
    return found


def against_both(claim: Claim, told: Callable[[Mapping[str, Any]], bool]) -> tuple[Claim, Claim]:
    """Return a claim about attacks twice: on the rows of plain attackers, and of those who know the defence.

    ``told`` tells whether a row's attacker knows the defence. Rows without defence serve both.
    """
    measure = claim.measure
    if measure is None:
        raise ValueError(f"The claim {claim.id!r} must have a measure.")

    def of(knowing: bool) -> Callable[[Rows], float]:
        return lambda rows: measure([row for row in rows if row.get("defence") == "none" or told(row) is knowing])

    return (
        replace(claim, measure=of(knowing=False), attacker=PLAIN),
        replace(claim, id=f"{claim.id}-known", measure=of(knowing=True), attacker=KNOWING, ours=True),
    )


def judge(paper: str, claim: Claim, runs: Sequence[Run]) -> Judged:
    """Return the verdict on a claim by the runs of its experiment, of which the largest scale counts."""
    if claim.measure is None:
        return Judged(claim, NOT_RUN, why=claim.why)
    if not runs:
        return Judged(claim, NOT_RUN, why=f"`{command(paper, claim.table, claim.scale)}`")
    used = at_largest_scale(runs)
    scale = used[0]["scale"]
    told = f"{scale}, {len(used)} seed{'s' * (len(used) > 1)}"
    try:
        found = [_figure(claim.measure, run["rows"]) for run in used]
    except TooLittle as reason:
        return Judged(claim, UNDECIDED, "none", told, str(reason))
    values = [value for value in found if not isinstance(value, str)]
    ours = f"{claim.figure}: {mean_and_spread(values)}" if values else "none"
    inside = [not isinstance(value, str) and claim.at_least <= value <= claim.at_most for value in found]
    verdict = HOLDS if all(inside) else FAILS if not any(inside) else UNDECIDED
    why = "; ".join([f"holds if {claim.range}", *dict.fromkeys(value for value in found if isinstance(value, str))])
    if SCALES.index(scale) < SCALES.index(claim.scale):
        verdict, why = UNDECIDED, f"{why}; needs scale {claim.scale}"
    elif len(used) < claim.seeds:
        verdict, why = UNDECIDED, f"{why}; needs {claim.seeds} seeds"
    elif verdict == UNDECIDED:
        why += "; seeds disagree"
    return Judged(claim, verdict, ours, told, why)


def _figure(measure: Callable[[Rows], float], rows: Rows) -> float | str:
    """Return the deciding figure, or what is missing that the claim says exists."""
    try:
        return measure(rows)
    except Contradicted as missing:
        return str(missing)


def at_largest_scale(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the largest scale among them, by seed."""
    largest = max((run["scale"] for run in runs), key=SCALES.index)
    return sorted((run for run in runs if run["scale"] == largest), key=lambda run: int(run["seed"]))


def mean_and_spread(values: Sequence[float]) -> str:
    """Format the mean of values, with their smallest and largest if there are several.

    Example:
        >>> mean_and_spread([0.5]), mean_and_spread([1.0, 2.0, 3.0])
        ('0.5', '2 (1 to 3)')
    """
    spread = f" ({min(values):.3g} to {max(values):.3g})" if len(set(values)) > 1 else ""
    return f"{statistics.fmean(values):.3g}{spread}"


# --- Words for measures -----------------------------------------------------------------------------------------------


def where(rows: Rows, **wanted: Any) -> list[Mapping[str, Any]]:  # noqa: ANN401 - values of rows
    """Return the rows that have these values; a text also fits a longer one that begins with it and a colon.

    Example:
        >>> where([{"defence": "prune:fraction=0.4"}, {"defence": "none"}], defence="prune")
        [{'defence': 'prune:fraction=0.4'}]
    """
    return [row for row in rows if all(_fits(row.get(key), value) for key, value in wanted.items())]


def _fits(found: object, value: object) -> bool:
    return found == value or (isinstance(found, str) and isinstance(value, str) and found.startswith(f"{value}:"))


def mean_of(rows: Rows, key: str, /, **wanted: Any) -> float:  # noqa: ANN401 - values of rows
    """Return the mean of a column over the rows that have these values; raise `TooLittle` if it has none."""
    values = [row[key] for row in where(rows, **wanted) if row.get(key) is not None]
    if not values:
        raise TooLittle(f"no {key.replace('_', ' ')} of {', '.join(map(str, wanted.values())) or 'any row'}")
    return statistics.fmean(map(float, values))


def share(text: str) -> float:
    """Return ``7 of 8`` or ``98%`` as a number.

    Example:
        >>> share("7 of 8"), share("98%")
        (0.875, 0.98)
    """
    part, _, whole = text.partition(" of ")
    return float(part) / float(whole) if whole else float(text.rstrip(" %")) / 100


def numbers(text: str) -> list[float]:
    """Return the numbers of ``0.98 / 0.99 / 0.99``."""
    return [float(part) for part in text.split("/")]


def learned(rows: Rows, least: float, key: str = "accuracy", /, **wanted: Any) -> float:  # noqa: ANN401 - values of rows
    """Return the accuracy without defence; raise `TooLittle` if it is below ``least``, for then nothing was learned."""
    found = mean_of(rows, key, **{"defence": "none", **wanted})
    if found < least:
        raise TooLittle(f"the undefended training reaches {found:.3g} only; a loss can be told from {least:g}")
    return found


def works(figure: float, least: float, what: str) -> None:
    """Raise `TooLittle` if an attack achieves less than ``least`` without defence, so that nothing can be told."""
    if figure < least:
        raise TooLittle(
            f"without defence the attack reaches {figure:.3g} only ({what}); a defence can be told from {least:g}"
        )
