"""The audit's result in words: what is recognisable under each defence, and what that costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.metrics import schema_of
from gradveil.report.blind import chance
from gradveil.report.names import for_people
from gradveil.report.summary import membership, price_unknown, seeks_pictures, strongest, summarise, utility
from gradveil.rows import Schema

ALIKE = 0.01
"""Accuracies that differ by less than this count as the same: a thousand test images resolve no more."""
HIDDEN, ALMOST = 10.0, 3.0
"""dB by which a defence must lower the plain attacker's PSNR to count as hiding, and dB within which it is undone."""
MOST = 3
"""With more defences than this, only the one that leaks least and the one that leaks most are described."""


def headline(rows: Sequence[Mapping[str, Any]], *, images: int = 1, schema: Schema | None = None) -> str:
    """Return the result in a few sentences, by the attack that recovers most under each defence.

    Args:
        rows: the rows of an audit.
        images: the number of images per target. Rows of earlier versions count batches, not images.
        schema: the columns of the rows; by default those of an audit with the standard metrics.
    """
    return " ".join(sentences(rows, images=images, schema=schema))


def sentences(rows: Sequence[Mapping[str, Any]], *, images: int = 1, schema: Schema | None = None) -> list[str]:
    """Return the sentences of `headline`; the first is about the undefended run, if there is one."""
    schema, rows = schema or schema_of(), for_people(rows)
    every = summarise(rows, schema)
    lines = [line for line in every if seeks_pictures(line)]
    by_image = any(row.get("images_recognisable") is not None for row in rows)
    noun = "pictures" if images == 1 or by_image else "batches"
    prices = utility(rows, schema)
    lost = price_unknown(prices)
    costs = {} if lost else {line["defence"]: line for line in prices}
    names = sorted(dict.fromkeys(line["defence"] for line in lines), key=lambda name: name != "none")
    best = {name: line for name in names if (line := strongest(_of(lines, name)))}
    told = members_sentence(rows, schema)
    if not best:
        return told or [_nobody(every, lines)]
    parts = []
    if "none" in best:
        nothing = best["none"]["recognisable"] == 0
        parts.append(f"Undefended, {_nothing(lines, 'none', noun) if nothing else _got(best['none'], noun)}.")
    rest = [name for name in best if name != "none"]
    starts = {name: f"Under {name}" for name in rest}
    if len(rest) > MOST:
        least, *_, most = sorted(rest, key=lambda name: (_share(best[name]), best[name]["psnr"] or 0.0))
        starts = {least: f"Of {len(rest)} defences, {least} leaks least:", most: f"{most} leaks most:"}
        if best[most]["recognisable"] == 0:
            starts = {most: f"Under all {len(rest)} defences nothing is recognisable; {most} comes nearest:"}
    for name, start in starts.items():
        text = _defended(lines, name, noun, first=not parts)
        parts.append(f"{start} {text}{_price(costs.get('none'), costs.get(name))}.")
    unknown = ["What defences cost is not known: the undefended training did not learn."] * lost
    more = _named(lines, list(best)) + _undone(lines, best.get("none"), rest) + _noticed(rows)
    return parts + unknown + more + told


def _nobody(every: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return why there is nothing to say of pictures."""
    if not every:
        return "No attack has finished yet."
    return "Every attack failed." if lines else "No attack here looked for pictures."


def _named(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return how often a guess picks the true picture out of others, undefended and under defences; [] if unknown."""
    best: dict[str, Mapping[str, Any]] = {}
    for name in names:
        tried = [line for line in _of(lines, name) if line["identified"] is not None]
        if tried:
            best[name] = max(tried, key=lambda line: line["identified"])
    if not best:
        return []
    rest = sorted((name for name in best if name != "none"), key=lambda name: best[name]["identified"])
    few = rest if len(rest) <= MOST else [rest[0], rest[-1]]
    shares = [
        f"{percent(best[name]['identified'])} {'undefended' if name == 'none' else f'under {name}'}"
        for name in ["none"] * ("none" in best) + few
    ]
    line = next(iter(best.values()))
    others = f"{round(line['candidates']) - 1:,}"
    return [f"Guesses pick the true picture among {others} others: {', '.join(shares)} (chance {chance(line)})."]


def _undone(lines: Sequence[Mapping[str, Any]], none: Mapping[str, Any] | None, names: Sequence[str]) -> list[str]:
    """Return which defences hide something from the plain attacker but nothing from one who knows them."""
    undone = []
    for name in names:
        plain, knowing = (strongest(_of(lines, name, adaptive)) for adaptive in (False, True))
        if none and plain and knowing and None not in (plain["psnr"], knowing["psnr"], none["psnr"]):
            hid = none["psnr"] - plain["psnr"] >= HIDDEN
            if hid and knowing["psnr"] >= none["psnr"] - ALMOST:
                figures = [f"{line['psnr']:.1f} dB" for line in (none, plain, knowing)]
                undone.append(f"{name} ({figures[0]} undefended, {figures[1]} under it, {figures[2]} once it is known)")
    return [f"Stopping the naive attacker only: {', '.join(undone)}."] if undone else []


def _noticed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how often clients would have noticed the model that a malicious server altered."""
    looked = [row["tripwire"] for row in rows if row.get("tripwire") is not None]
    if not looked:
        return []
    alarmed = sum(bool(found) for found in looked)
    return [f"The tripwire would have warned of the altered model before {alarmed} of {len(looked)} updates."]


def members_sentence(rows: Sequence[Mapping[str, Any]], schema: Schema) -> list[str]:
    """Return how well members are told from others, undefended and defended; [] if no attack tried."""
    best: dict[str, Mapping[str, Any]] = {}
    for line in membership(rows, schema):
        name = line["defence"]
        if line["auc"] is not None and (name not in best or line["auc"] > best[name]["auc"]):
            best[name] = line
    rest = sorted((name for name in best if name != "none"), key=lambda name: best[name]["auc"])
    shown = rest if len(rest) <= MOST else [rest[0], rest[-1]]
    names = ["none"] * ("none" in best) + shown
    areas = [f"{best[name]['auc']:.3f} {'undefended' if name == 'none' else f'under {name}'}" for name in names]
    if not areas:
        return []
    few = f" (of {len(rest)} defences the best and the worst)" if len(rest) > MOST else ""
    return [f"Members are told from others with an AUC of {', '.join(areas)}{few}, where 0.5 is guessing."]


def _defended(lines: Sequence[Mapping[str, Any]], name: str, noun: str, *, first: bool) -> str:
    """Return what the attacker gets under a defence, without and with knowledge of it."""
    untried = [line for line in _of(lines, name, True) if line["not_decoded"]]
    if untried:
        rest = [line for line in lines if line not in untried]
        why = f"decoding what it hides was not tried ({untried[0]['not_decoded']})"
        return f"{_defended(rest, name, noun, first=first)}; {why}" if _of(rest, name) else why
    plain, adaptive = (strongest(_of(lines, name, knowing)) for knowing in (False, True))
    known = [line for line in (plain, adaptive) if line]
    if all(line["recognisable"] == 0 for line in known):
        return _nothing(lines, name, noun)
    text = _got(known[0], noun) if first else f"it is {_score(known[0])}"
    if plain is None:
        return f"{text} to an attacker who knows the defence"
    if adaptive is None:
        return text
    if _share(adaptive) > _share(plain):
        return f"{text}, and {_score(adaptive)} once the attacker knows the defence"
    before, after = plain["psnr"], adaptive["psnr"]
    if before is not None and after is not None and after > before + 1 and _share(adaptive) == _share(plain):
        return f"{text}, and knowing the defence sharpens them from {before:.1f} to {after:.1f} dB"
    return f"{text}, and knowing the defence does not help the attacker ({_score(adaptive)})"


def _nothing(lines: Sequence[Mapping[str, Any]], name: str, noun: str) -> str:
    """Return what was tried and how often it did not converge; never "safe"."""
    tried = _of(lines, name)
    stuck, runs = sum(line["not_converged"] for line in tried), sum(line["n"] for line in tried)
    most = max(line["images"] for line in tried)
    return f"no attack here recovered any of {most} {noun}; {stuck} of {runs} attacks did not converge"


def _got(line: Mapping[str, Any], noun: str) -> str:
    if line["recognisable"] is None:
        return f"{noun} come back with {_score(line)}"
    return f"{_score(line)} {noun} are recognisable"


def _price(none: Mapping[str, Any] | None, line: Mapping[str, Any] | None) -> str:
    """Return what a defence costs in accuracy, and whether the model is any better than naming one class always."""
    after = line["accuracy"] if line else None
    if line is None or after is None:
        return ""
    before, majority = none["accuracy"] if none else None, line["accuracy_majority"]
    guess = ""
    if majority is not None and after <= majority:
        guess = f", no more than the most frequent class's share of {percent(majority)}"
    if before is None:
        return f"; accuracy is {percent(after)}{guess}"
    if abs(before - after) < ALIKE:
        return f"; accuracy is about the same ({percent(after)}){guess}"
    return f"; accuracy {'falls' if after < before else 'rises'} from {percent(before)} to {percent(after)}{guess}"


def percent(share: float) -> str:
    """Return a share in per cent, with one digit after the point.

    Example:
        >>> percent(0.9691)
        '96.9 %'
    """
    return f"{100 * share:.1f} %"


def _of(lines: Sequence[Mapping[str, Any]], name: str, adaptive: bool | None = None) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["defence"] == name and adaptive in (None, line["adaptive"])]


def _score(line: Mapping[str, Any]) -> str:
    if line["recognisable"] is not None:
        return f"{line['recognisable']} of {line['images']}"
    return "no PSNR or SSIM measured" if line["psnr"] is None else f"a mean PSNR of {line['psnr']:.1f} dB"


def _share(line: Mapping[str, Any]) -> float:
    """Return how much was recovered: the recognisable share, or the PSNR if SSIM was not measured."""
    return float((line["psnr"] or 0.0) if line["recognisable"] is None else line["recognisable"] / line["images"])
