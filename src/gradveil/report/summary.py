"""Rows brought down to lines: what each attack gets out of each defence, and what the defence costs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

RECOGNISABLE = 0.5
"""A picture counts as recognisable from this SSIM to the truth."""


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each defence, attack and adaptive, in the order in which they first occur.

    Failed rows count only in ``failed``. A row without a guess counts in ``n`` and in no mean. ``psnr`` is the mean of
    the seeds' means, ``psnr_low`` and ``psnr_high`` its 95 % interval, None for one seed; ``psnr_worst`` is the largest
    of all rows, for the leak is worst there. Figures that no row has are None. ``not_decoded`` says why none of an
    attack's guesses was decoded, where the defence hides images.

    Example:
        >>> row = {"kind": "privacy", "defence": "none", "attack": "gs", "seed": 0, "psnr": 30.0, "ssim": 0.9}
        >>> line, = summarise([row, row | {"psnr": 20.0, "ssim": 0.3}])
        >>> line["n"], line["psnr"], line["psnr_worst"], line["recognisable"]
        (2, 25.0, 30.0, 1)
    """
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind", "privacy") == "privacy":
            key = (row["defence"], row.get("attack") or "", bool(row.get("adaptive")))
            groups.setdefault(key, []).append(row)
    return [_line(*key, group) for key, group in groups.items()]


def utility(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each defence that was trained with: figures are means over the seeds, epsilon the largest."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind") == "utility":
            groups.setdefault(row["defence"], []).append(row)
    lines = []
    for defence, group in groups.items():
        whole = [row for row in group if not row.get("failed")]
        means = {
            key: mean(whole, key) for key in ("accuracy", "accuracy_sensitive", "round_seconds", "overhead", "rounds")
        }
        why = "; ".join(dict.fromkeys(row["why"] for row in group if row.get("why")))
        lines.append({"defence": defence, "seeds": len(whole), **means, **_budget(whole), "why": why})
    return lines


def membership(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each defence and attack on membership: means over rounds and seeds, and the largest area of all."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind") == "membership":
            groups.setdefault((row["defence"], row["attack"]), []).append(row)
    keys = ("auc", "tpr_at_1_fpr", "advantage", "auc_loss", "auc_confidence", "members", "seconds")
    lines = []
    for (defence, attack), group in groups.items():
        whole = [row for row in group if not row.get("failed")]
        right, others = mean(whole, "accuracy_members"), mean(whole, "accuracy_non_members")
        lines.append(
            {
                "defence": defence,
                "attack": attack,
                "adaptive": False,
                "n": len(whole),
                "seeds": len({row.get("seed") for row in whole}),
                "failed": len(group) - len(whole),
                **{key: mean(whole, key) for key in keys},
                "auc_worst": max((row["auc"] for row in whole if row.get("auc") is not None), default=None),
                "gap": None if right is None or others is None else right - others,
                "knows": list(dict.fromkeys(item for row in group for item in row.get("knows") or ())),
            }
        )
    return lines


def strongest(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The line whose attack recovers most: the largest share of recognisable pictures, then the highest mean PSNR."""

    def recovered(line: Mapping[str, Any]) -> tuple[float, float]:
        psnr = line["psnr"]
        return (line["recognisable"] or 0) / line["n"], -1.0 if psnr is None else psnr

    return max((line for line in lines if line["n"]), key=recovered, default=None)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    r"""95 % t interval of the mean, :math:`\bar x \pm t_{0.975, k-1}\, s / \sqrt k`; None for fewer than two values.

    Example:
        By hand: of 1, 2, 3 the mean is 2, s = 1, t = 4.303, so 2 ± 2.484.

        >>> [round(end, 3) for end in interval([1.0, 2.0, 3.0])]
        [-0.484, 4.484]
    """
    if len(values) < 2:
        return None
    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def mean(rows: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Mean of the rows that have the figure; None if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return fmean(values) if values else None


def _line(defence: str, attack: str, adaptive: bool, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = [row for row in group if not row.get("failed")]
    seeds = dict.fromkeys(row.get("seed") for row in whole)
    of_seeds = [mean((row for row in whole if row.get("seed") == seed), "psnr") for seed in seeds]
    psnrs = [value for value in of_seeds if value is not None]
    low, high = interval(psnrs) or (None, None)
    return {
        "defence": defence,
        "attack": attack,
        "adaptive": adaptive,
        "n": len(whole),
        "seeds": len(seeds),
        "mse": mean(whole, "mse"),
        "psnr": fmean(psnrs) if psnrs else None,
        "psnr_low": low,
        "psnr_high": high,
        "psnr_worst": max((row["psnr"] for row in whole if row.get("psnr") is not None), default=None),
        "ssim": mean(whole, "ssim"),
        "lpips": mean(whole, "lpips"),
        "recognisable": _recognisable(whole),
        "guessed": mean(whole, "guessed"),
        "label_accuracy": mean(whole, "label_accuracy"),
        "not_converged": sum(row.get("converged") is False for row in whole),
        "not_decoded": _not_decoded(whole),
        **_budget(whole),
        "certificate": mean(whole, "certificate"),
        "knows": list(dict.fromkeys(item for row in group for item in row.get("knows") or ())),
        "seconds": mean(whole, "seconds"),
        "failed": len(group) - len(whole),
    }


def _recognisable(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """How many are recognisable; None where guesses are there but SSIM was not measured on any.

    Of a batch, images without a guess count as not alike at all.
    """
    measured = [row["ssim"] * _guessed(row) for row in rows if row.get("ssim") is not None]
    if not measured and any(row.get("psnr") is not None for row in rows):
        return None
    return len([value for value in measured if value >= RECOGNISABLE])


def _guessed(row: Mapping[str, Any]) -> float:
    """The share of a target's images that there is a guess for; rows of earlier versions don't say."""
    share = row.get("guessed")
    return 1.0 if share is None else float(share)


def _not_decoded(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why no row's guess was decoded, as an attack on images that a defence hides must; "" where one was."""
    reasons = [re.search(r"not decoded: ([^;]*)", row.get("why") or "") for row in rows]
    return reasons[0][1] if reasons and reasons[0] and all(reasons) else ""


def _budget(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """The largest epsilon with its delta."""
    spent = [(row["epsilon"], row.get("delta")) for row in rows if row.get("epsilon") is not None]
    epsilon, delta = max(spent, key=lambda pair: pair[0], default=(None, None))
    return {"epsilon": epsilon, "delta": delta}
