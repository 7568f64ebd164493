"""Judge candidates: what each promises and costs, whether that keeps the wish, and whether the verification agrees."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.defences.parts.gaussian_dp import CANDIDATES, identification_bound
from gradveil.runs.candidates import Protection
from gradveil.runs.wish import DELTA, Wish
from gradveil.runs.worst_case import Figures, breaks

ROUNDING = 1.001
"""Guarantees that exceed the wish by less than this factor keep it: texts are rounded."""
FOUGHT = ("psnr", "blind_psnr", "psnr_undefended", "identified", "attacked", "candidates", "why_not_attacked")
"""What lines tell of the attackers."""
Line = dict[str, Any]


def line_of(
    one: Protection, short: Mapping[str, Line], full: Mapping[str, Line], attacks: Mapping[str, Figures]
) -> Line:
    """Return what is known of a candidate: how far it came, its last row, and what attackers made of it."""
    stages = {"full": full.get(one.name, {}), "short": short.get(one.name, {})}
    stage = next((name for name, row in stages.items() if row), "arithmetic")
    row, training = stages.get(stage, {}), one.training
    told = {key: row.get(key) for key in ("accuracy", "epsilon", "mu")}
    told["identified_bound"] = picked_of(told["epsilon"], told["mu"])
    fought = {key: attacks.get(one.name, {}).get(key) for key in FOUGHT}
    return {
        "candidate": one.name, "proven": one.proven, "stage": stage, **told, **fought,
        "model": training.model if training else "", "defence": training.defence if training else "",
        "aggregation": training.aggregation if training else "", "signal": one.signal,
        "why": one.why_not or row.get("why", ""),
    }  # fmt: skip


def picked_of(epsilon: float | None, mu: float | None) -> float | None:
    """Return the largest chance to pick an image among 1,000, or None without a guarantee.

    Without mu, what has a chance of 1 / 1,000 without an image has at most e^epsilon / 1,000 + delta with it.

    Example:
        >>> round(picked_of(math.log(20), None), 4), picked_of(50.0, None), picked_of(None, None)
        (0.02, 1.0, None)
    """
    if mu is not None:
        return identification_bound(mu)
    if epsilon is None:
        return None
    return min(1.0, math.exp(min(epsilon, 50.0)) / CANDIDATES + DELTA)


def judged(line: Line, reference: float, wish: Wish) -> Line:
    """Return the line with the points that it loses, and whether it keeps the wish, or why not."""
    if line["accuracy"] is None:
        return line | {"loss": None, "holds": False, "why": line["why"] or "it could not be trained"}
    loss = round(100 * (reference - float(line["accuracy"])), 3)
    why = "" if line["stage"] == "full" else "others were better after short trainings"
    why = why or broken(line, wish)
    if not why and loss > wish.max_loss:
        why = f"loses {loss:.1f} points, more than {wish.max_loss:g}"
    return line | {"loss": loss, "holds": not why, "why": why}


def broken(line: Mapping[str, Any], wish: Wish) -> str:
    """Return how the guarantee, or what attackers did, breaks the wish; "" if it does not."""
    if line["proven"]:
        if not within(line, wish):
            return "its guarantee is weaker than the wish"
        bound = line["identified_bound"]
        if line["mu"] is not None and line.get("candidates"):
            bound = identification_bound(line["mu"], int(line["candidates"]))
        return "attackers picked more images than its guarantee allows" if breaks(dict(line), bound) else ""
    if line.get("identified") is None:
        return "no attacker of ours could be run on it, which shows nothing"
    return "attackers picked images" if line["identified"] > wish.identified else ""


def within(line: Mapping[str, Any], wish: Wish) -> bool:
    """Return whether the guarantee of a row is as strong as the wish."""
    if line["mu"] is not None:
        return bool(line["mu"] <= wish.mu * ROUNDING)
    return line["epsilon"] is not None and bool(line["epsilon"] <= wish.whole_epsilon * ROUNDING)


def check_of(
    chosen: Protection, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], figures: Figures, wish: Wish
) -> Line:
    """Return the verification of a chosen candidate; ``pairs`` are the last rows with and without it, one per seed."""
    ours, theirs = ([float(pair[which]["accuracy"]) for pair in pairs] for which in (0, 1))
    losses = [100 * (other - mine) for mine, other in zip(ours, theirs, strict=True)]
    mean = sum(losses) / len(losses)
    last = pairs[0][0]
    line = {"proven": chosen.proven, "epsilon": last.get("epsilon"), "mu": last.get("mu")} | figures
    line["identified_bound"] = picked_of(line["epsilon"], line["mu"])
    why = broken(line, wish)
    if not why and mean > wish.max_loss:
        why = f"loses {mean:.1f} points on test images, more than {wish.max_loss:g}"
    return line | {
        "seeds": list(range(wish.seed, wish.seed + len(pairs))), "accuracies": ours,
        "references": theirs, "losses": [round(loss, 3) for loss in losses],
        "loss": round(mean, 3), "lowest": round(min(losses), 3), "highest": round(max(losses), 3),
        "holds": not why, "why": why,
    }  # fmt: skip
