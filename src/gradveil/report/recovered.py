"""What an audit recovered of labels, of membership and of pictures, apart, each beside what a guess would get."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.metrics import schema_of
from gradveil.report.blind import blind_lines
from gradveil.report.headline import MOST, members_sentence, percent
from gradveil.report.names import for_people
from gradveil.report.summary import seeks_pictures, strongest, summarise
from gradveil.rows import Schema

UNTRIED = "not attacked."
ABOVE = 0.01
"""Share of the labels by which an attack must beat a guess for the page to say that it did."""


def recovered(
    rows: Sequence[Mapping[str, Any]], schema: Schema | None = None, left_out: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a sentence about Labels, one about Membership and one about Pictures.

    Args:
        rows: the rows of an audit.
        schema: their columns; by default those of an audit with the standard metrics.
        left_out: the attacks that were not run, each with its reason.

    Example:
        >>> row = {"kind": "privacy", "defence": "none", "attack": "labels", "seeks": "labels", "knows": []}
        >>> recovered([row | {"label_accuracy": 0.9, "blind_label_accuracy": 0.3}])["Labels"]
        "90.0 % are right undefended; a guess by the classes' shares of public images gets 30.0 %."
    """
    schema, rows = schema or schema_of(), for_people(rows)
    lines = summarise(rows, schema)
    return {
        "Labels": _labels(lines),
        "Membership": " ".join(members_sentence(rows, schema)) or UNTRIED,
        "Pictures": _pictures(lines, blind_lines(rows, schema), left_out or {}),
    }


def _labels(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the share of labels that attackers found who were not given any."""
    best: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        name, share = line["defence"], line["label_accuracy"]
        if share is None or "labels" in line["knows"]:
            continue
        if name not in best or share > best[name]["label_accuracy"]:
            best[name] = line
    if not best:
        given = any("labels" in line["knows"] for line in lines if line["n"])
        return "not attacked: the attackers were given them." if given else UNTRIED
    shown = _few(best, "label_accuracy")
    told = ", ".join(f"{percent(best[name]['label_accuracy'])} {_under(name)}" for name in shown)
    blind = next((line["blind_label_accuracy"] for line in best.values() if line["blind_label_accuracy"]), None)
    if blind is None:
        return f"{_right(told)}{_of_many(best)}."
    nothing = all(line["label_accuracy"] < blind + ABOVE for line in best.values())
    verdict = ": no attack did better" * nothing
    guess = f"a guess by the classes' shares of public images gets {percent(blind)}{verdict}"
    return f"{_right(told)}{_of_many(best)}; {guess}."


def _right(told: str) -> str:
    """Return the shares with a verb behind the first."""
    return told.replace(" %", " % are right", 1)


def _pictures(
    lines: Sequence[Mapping[str, Any]], blind: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]
) -> str:
    """Return how many pictures the strongest attack made recognisable, or why none was looked for."""
    names = dict.fromkeys(line["defence"] for line in lines if seeks_pictures(line))
    best = {name: line for name in names if (line := strongest(own for own in lines if own["defence"] == name))}
    if not best:
        reasons = "; ".join(f"{spec} {why}" for spec, why in left_out.items())
        return f"not attacked: {reasons}" if reasons else UNTRIED
    told = ", ".join(f"{_score(best[name])} {_under(name)}" for name in _few(best, "recognisable"))
    beside = [f"{line['attack']}: {line['psnr']:.1f} dB" for line in blind if line["psnr"] is not None]
    return f"recognisable and closer to the truth than a blind guess{_in_brackets(beside)}: {told}{_of_many(best)}."


def _score(line: Mapping[str, Any]) -> str:
    return "not measured" if line["recognisable"] is None else f"{line['recognisable']} of {line['images']}"


def _in_brackets(texts: Sequence[str]) -> str:
    return f" ({', '.join(texts)})" if texts else ""


def _few(best: Mapping[str, Mapping[str, Any]], key: str) -> list[str]:
    """Return `none` and the defences, of many only the one that leaks least and the one that leaks most."""
    rest = sorted((name for name in best if name != "none"), key=lambda name: best[name][key] or 0)
    return ["none"] * ("none" in best) + (rest if len(rest) <= MOST else [rest[0], rest[-1]])


def _of_many(best: Mapping[str, object]) -> str:
    """Return that only two defences are told, if there are more than `_few` tells."""
    rest = [name for name in best if name != "none"]
    return f" (least and most of {len(rest)} defences)" * (len(rest) > MOST)


def _under(name: str) -> str:
    return "undefended" if name == "none" else f"under {name}"
