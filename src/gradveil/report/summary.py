"""Sum rows up in lines: what each attack recovers under each defence, and what the defence costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from gradveil.metrics import schema_of
from gradveil.metrics.epsilon_hat import EXCEEDS, MEASURED
from gradveil.metrics.recognition import OTHER_IMAGES, RECOGNISABLE
from gradveil.report.flags import flagged
from gradveil.rows import KINDS, Row, Schema

NO_PRICE = (
    "price not known: the undefended training did not learn (try more --rounds, another --lr or, with --protocol "
    "fedavg, a lower --momentum)"
)
NOT_LEARNED = "the training under this defence did not learn: it is no better than a guess"


def summarise(rows: Iterable[Mapping[str, Any]], schema: Schema | None = None) -> list[Row]:
    """Return one line per defence, attack and kind of attacker, in the order in which they first occur.

    Failed rows count only in ``failed``. A row without a guess counts in ``n`` and in no mean. ``psnr`` is the mean of
    the seeds' means, ``psnr_low`` and ``psnr_high`` its 95 % interval (None for one seed), and ``psnr_worst`` the
    largest of all rows, where the leak is worst. Figures that no row has are None. ``not_decoded`` says what the
    attacker lacked to decode what the defence hides, if none of the guesses was decoded, and is "" otherwise.

    Args:
        rows: the rows of an audit.
        schema: their columns; by default those of an audit with the standard metrics.

    Example:
        >>> row = {"kind": "privacy", "defence": "none", "attack": "gs", "seed": 0, "psnr": 30.0, "ssim": 0.9}
        >>> line, = summarise([row, row | {"psnr": 20.0, "ssim": 0.3}])
        >>> line["n"], line["psnr"], line["psnr_worst"], line["recognisable"]
        (2, 25.0, 30.0, 1)
    """
    schema, rows = schema or schema_of(), list(rows)
    broken = {row["defence"] for row in rows if row.get("canaries_exceed")}
    groups = _grouped(rows, "privacy", schema, lambda row: (row.get("attack") or "", bool(row.get("adaptive"))))
    lines = flagged(
        [_line(defence, attack, adaptive, group, schema) for (defence, attack, adaptive), group in groups.items()],
        {key: mean(group, "attack_steps") for key, group in groups.items()},
        {key for key, group in groups.items() if any(OTHER_IMAGES in (row.get("flags") or ()) for row in group)},
    )
    return [line | {"flags": [*line["flags"], *[EXCEEDS] * (line["defence"] in broken)]} for line in lines]


def utility(rows: Iterable[Mapping[str, Any]], schema: Schema | None = None) -> list[Row]:
    """Return one line per defence: means over the seeds of what it costs, and the largest epsilon.

    ``points_lost`` is the mean of the seeds' differences to the undefended accuracy, in percentage points, with its
    95 % interval (None for one seed). ``overhead`` is the ratio of the line's two times.
    If a training did not learn, ``why`` says so; if it was the undefended one, no price is known.
    """
    schema = schema or schema_of()
    lines = []
    groups = _grouped(rows, "utility", schema, lambda row: ())
    undefended = [row for row in groups.get(("none",), []) if not row.get("failed")]
    if any(row.get("at_chance") for row in undefended):
        undefended = []  # a guess is no reference
    for (defence,), group in groups.items():
        whole = [row for row in group if not row.get("failed")]
        why = "; ".join(dict.fromkeys(row["why"] for row in group if row.get("why")))
        guessed = any(row.get("at_chance") for row in whole)
        own = {"defence": defence, "seeds": len(whole), "at_chance": guessed, **_budget(whole), "why": why}
        own |= _canaries(whole)
        line = _means(whole, "costs", schema) | own | _lost(whole, undefended if defence != "none" else [])
        if line["round_seconds_undefended"]:
            line["overhead"] = line["round_seconds"] / line["round_seconds_undefended"]
        lines.append(schema.row("costs", line))
    unknown = price_unknown(lines)
    for line in lines:
        unlearned = NO_PRICE if unknown else NOT_LEARNED if line["at_chance"] else ""
        line["why"] = "; ".join(filter(None, (unlearned, line["why"])))
    return lines


def price_unknown(costs: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the undefended training did not learn, so that there is nothing to compare others with."""
    return any(line["defence"] == "none" and line.get("at_chance") for line in costs)


def _lost(rows: Sequence[Mapping[str, Any]], undefended: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the percentage points of accuracy that a defence costs, with the interval of the seeds' differences."""
    before = {row.get("seed"): row["accuracy"] for row in undefended if row.get("accuracy") is not None}
    pairs = [(before[row.get("seed")], row["accuracy"]) for row in rows if row.get("seed") in before]
    lost = [100 * (none - own) for none, own in pairs if own is not None]
    low, high = interval(lost) or (None, None)
    return {"points_lost": fmean(lost) if lost else None, "points_lost_low": low, "points_lost_high": high}


def membership(rows: Iterable[Mapping[str, Any]], schema: Schema | None = None) -> list[Row]:
    """Return one line per defence, attack on membership and kind of attacker.

    Figures are means over rounds and seeds; ``auc_worst`` is the largest. Accuracy and overhead are
    those of the defence, from the utility rows.
    """
    schema, rows = schema or schema_of(), list(rows)
    costs = {cost["defence"]: cost for cost in utility(rows, schema)}
    priced = set(schema.keys("price"))
    lines = []
    groups = _grouped(rows, "membership", schema, lambda row: (row["attack"], bool(row.get("adaptive"))))
    for (defence, attack, adaptive), group in groups.items():
        whole = [row for row in group if not row.get("failed")]
        right, others = mean(whole, "accuracy_members"), mean(whole, "accuracy_non_members")
        own = {
            "defence": defence,
            "attack": attack,
            "adaptive": adaptive,
            "n": sum(row.get("images") != 0 for row in whole),
            "seeds": len({row.get("seed") for row in whole}),
            "failed": len(group) - len(whole),
            "auc_worst": max((row["auc"] for row in whole if row.get("auc") is not None), default=None),
            "gap": None if right is None or others is None else right - others,
            "knows": _all_known(group),
        }
        price = {key: costs.get(defence, {}).get(key) for key in schema.keys("members") if key in priced}
        lines.append(schema.row("members", _means(whole, "members", schema) | own | price))
    return lines


def with_costs(summary: Iterable[Mapping[str, Any]], costs: Iterable[Mapping[str, Any]], schema: Schema) -> list[Row]:
    """Return the lines of the summary, each with what its defence costs."""
    by_name = {cost["defence"]: cost for cost in costs}
    lines = []
    for line in summary:
        cost = by_name.get(line["defence"], {})
        price = {key: cost.get(key) for key in schema.keys("price")}
        budget = {"epsilon_training": cost.get("epsilon"), "delta_training": cost.get("delta")}
        lines.append({**line, **price, **budget})
    return lines


def seeks_pictures(line: Mapping[str, Any]) -> bool:
    """Return whether the attack of a row or line looks for pictures; those of earlier versions do."""
    return (line.get("seeks") or "pictures") == "pictures"


def strongest(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the line whose attack recovers most: by the share of recognisable pictures, then by mean PSNR.

    Lines whose attacks all failed, or look for no pictures, do not count.
    """

    def recovered(line: Mapping[str, Any]) -> tuple[float, float]:
        psnr = line["psnr"]
        return (line["recognisable"] or 0) / line["images"], -1.0 if psnr is None else psnr

    return max((line for line in lines if line["n"] and seeks_pictures(line)), key=recovered, default=None)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    r"""Return the 95 % t interval of the mean, or None for fewer than two values.

    .. math:: \bar x \pm t_{0.975, k-1}\, s / \sqrt k

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
    """Return the mean over the rows that have the figure, or None if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return fmean(values) if values else None


def _grouped(
    rows: Iterable[Mapping[str, Any]], kind: str, schema: Schema, key: Callable[[Mapping[str, Any]], tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the rows of a kind by defence and ``key``. Raise ValueError if a row has a field that is no column."""
    known = set(schema.keys(*KINDS))
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind", "privacy") == kind:
            if not row.keys() <= known:
                schema.check(kind, row)
            groups.setdefault((row["defence"], *key(row)), []).append(row)
    return groups


def _means(rows: Sequence[Mapping[str, Any]], table: str, schema: Schema) -> Row:
    """Return the means of all columns of a line that are means."""
    found: Row = {}
    for column in schema.of(table):
        if column.mean and column.type == "mapping":
            mappings = [row[column.key] for row in rows if row.get(column.key)]
            names = dict.fromkeys(name for each in mappings for name in each)
            found[column.key] = {name: mean(mappings, name) for name in names} or None
        elif column.mean:
            found[column.key] = mean(rows, column.key)
    return found


def _all_known(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(item for row in rows for item in row.get("knows") or ()))


def _line(defence: str, attack: str, adaptive: bool, group: Sequence[Mapping[str, Any]], schema: Schema) -> Row:
    whole = [row for row in group if not row.get("failed")]
    seeds = dict.fromkeys(row.get("seed") for row in whole)
    of_seeds = [mean((row for row in whole if row.get("seed") == seed), "psnr") for seed in seeds]
    psnrs = [value for value in of_seeds if value is not None]
    low, high = interval(psnrs) or (None, None)
    own = {
        "defence": defence,
        "attack": attack,
        "adaptive": adaptive,
        "seeks": next((row["seeks"] for row in group if row.get("seeks")), None),
        "n": sum(row.get("images") != 0 for row in whole),
        "seeds": len(seeds),
        "failed": len(group) - len(whole),
        "images": sum(map(_images, whole)),
        "recognisable": _recognisable(whole),
        "psnr": fmean(psnrs) if psnrs else None,
        "psnr_low": low,
        "psnr_high": high,
        "psnr_worst": max(
            (max(row.get("image_psnr") or [row["psnr"]]) for row in whole if row.get("psnr") is not None), default=None
        ),
        "not_converged": sum(row.get("converged") is False and not recovered(row) for row in whole),
        "blind": ", ".join(dict.fromkeys(row["blind"] for row in whole if row.get("blind"))),
        "flags": [],
        "not_decoded": _not_decoded(whole),
        "knows": _all_known(group),
        **_budget(whole),
    }
    return schema.row("summary", _means(whole, "summary", schema) | own)


def _recognisable(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many images are recognisable; None if nobody looked, or if SSIM was not measured on any guess.

    Rows of earlier versions have no blind guess. A target counts there as one image if its mean SSIM is at least 0.5;
    images of a batch without a guess count with an SSIM of 0.
    """
    if rows and not any(map(seeks_pictures, rows)):
        return None
    if not any(row.get("ssim") is not None for row in rows) and any(
        row.get("psnr") is not None or row.get("guessed") for row in rows
    ):
        return None
    return sum(_recognised(row) for row in rows)


def _recognised(row: Mapping[str, Any]) -> int:
    """Return how many images of a row are recognisable."""
    if row.get("images_recognisable") is not None:
        return int(row["images_recognisable"])
    return int(row.get("ssim") is not None and row["ssim"] * _guessed(row) >= RECOGNISABLE)


def _images(row: Mapping[str, Any]) -> int:
    """Return the number of images that a row counts; a row of an earlier version counts as one."""
    counted = row.get("images_recognisable") is not None or not seeks_pictures(row)
    return int(row["images"]) if counted and row.get("images") else 1


def recovered(row: Mapping[str, Any]) -> bool:
    """Return whether all images of a row are known to be recognisable and above blind."""
    return row.get("images_recognisable") is not None and _recognised(row) == _images(row)


def _guessed(row: Mapping[str, Any]) -> float:
    """Return the share of a target's images that have a guess; rows of earlier versions don't say, and get 1."""
    share = row.get("guessed")
    return 1.0 if share is None else float(share)


def _not_decoded(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return why no row's guess was decoded although the defence hides images; "" if one was."""
    reasons = [row.get("not_decoded") or "" for row in rows]
    return reasons[0] if reasons and all(reasons) else ""


def _canaries(rows: Iterable[Mapping[str, Any]]) -> Row:
    """Return what canaries measured in the seed with the largest epsilon, and whether they exceed it in any seed."""
    measured = [row for row in rows if row.get("epsilon_hat") is not None]
    largest = max(measured, key=lambda row: float(row["epsilon_hat"]), default={})
    verdicts = [row["canaries_exceed"] for row in measured if row.get("canaries_exceed") is not None]
    found: Row = {key: largest.get(key) for key in MEASURED}
    return found | {"canaries_exceed": any(verdicts) if verdicts else None}


def _budget(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the largest epsilon with its delta, and what else the same row states about it."""
    spent = [row for row in rows if row.get("epsilon") is not None]
    worst = max(spent, key=lambda row: float(row["epsilon"]), default={})
    return {key: worst.get(key) for key in ("epsilon", "delta", "mu", "identified_bound")}
