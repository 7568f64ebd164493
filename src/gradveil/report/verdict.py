"""A verdict for people outside the field: does it leak, and what does that mean for the patients behind the images?"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from gradveil.report.headline import percent
from gradveil.report.markup import section, solid
from gradveil.report.summary import seeks_pictures

Level = Literal["leaks", "open", "bounded"]
WORDS: Mapping[Level, str] = {"leaks": "Leaks", "open": "No leak found, no proof", "bounded": "Bounded by proof"}
MARKS: Mapping[Level, str] = {"leaks": "✖", "open": "?", "bounded": "✔"}
"""A sign beside each word, so that the verdict does not depend on colour."""
RARE = 0.01
"""An identification counts as a leak if blind luck would do as well less often than this."""


@dataclass(frozen=True)
class DefenceVerdict:
    """What an audit says of one defence.

    Attributes:
        defence: its name, ``none`` for no defence.
        level: ``leaks``, ``open`` (nothing recovered, but no proof) or ``bounded`` (nothing recovered, and a proof).
        recognisable: recognisable images of the strongest attack, and all images it attacked.
        identified: the largest share of images that a guess picks out of many, or None.
        bound: the proven largest chance to pick an image out of 1,000, or None.
        epsilon: the proven ε of the training, or None.
    """

    defence: str
    level: Level
    recognisable: tuple[int, int]
    identified: float | None
    bound: float | None
    epsilon: float | None


def judge(summary: Sequence[Mapping[str, Any]], costs: Iterable[Mapping[str, Any]]) -> list[DefenceVerdict]:
    """Return a verdict for each defence whose pictures were attacked; the undefended run comes first."""
    prices = {line["defence"]: line for line in costs}
    lines = [line for line in summary if seeks_pictures(line) and line["n"]]
    names = sorted(dict.fromkeys(line["defence"] for line in lines), key=lambda name: name != "none")
    return [_judged(name, [line for line in lines if line["defence"] == name], prices.get(name, {})) for name in names]


def by_luck(hits: int, images: int, chance: float) -> float:
    """Return how likely blind luck picks at least ``hits`` of ``images`` right.

    Example:
        >>> round(by_luck(1, 4, 0.001), 4), by_luck(0, 4, 0.001)
        (0.004, 1.0)
    """
    fewer = (math.comb(images, k) * chance**k * (1 - chance) ** (images - k) for k in range(hits))
    return 1.0 - math.fsum(fewer) if hits else 1.0


def _judged(name: str, lines: Sequence[Mapping[str, Any]], price: Mapping[str, Any]) -> DefenceVerdict:
    best = max(lines, key=lambda line: (line["recognisable"] or 0) / max(line["images"], 1))
    shares = [line["identified"] for line in lines if line["identified"] is not None]
    bounds = [line["identified_bound"] for line in lines if line.get("identified_bound") is not None]
    epsilon = price.get("epsilon")
    leaks = bool(best["recognisable"]) or any(map(_named, lines))
    level: Level = "leaks" if leaks else "bounded" if epsilon is not None or bounds else "open"
    counted = (best["recognisable"] or 0, best["images"])
    return DefenceVerdict(name, level, counted, max(shares, default=None), max(bounds, default=None), epsilon)


def _named(line: Mapping[str, Any]) -> bool:
    """Return whether guesses pick more images out of many than blind luck would."""
    if line["identified"] is None or not line.get("candidates"):
        return False
    per_target = line["images"] / line["n"]  # in a batch, any guess may be matched to an image
    chance = min(1.0, max(1.0, per_target) / line["candidates"])
    return by_luck(round(line["identified"] * line["images"]), line["images"], chance) < RARE


def badge(level: Level) -> str:
    """Return a verdict as a small mark of word, sign and colour."""
    return f'<span class="badge {level}"><span aria-hidden="true">{MARKS[level]}</span> {WORDS[level]}</span>'


def patients_section(judged: Sequence[DefenceVerdict]) -> str:
    """Return what the verdicts mean for the people behind the images; "" if no pictures were attacked."""
    if not judged:
        return ""
    items = "".join(
        f'<li class="{each.level}">{badge(each.level)} <b>{escape(_under(each.defence))}</b>: '
        f"{solid(meaning(each))}</li>"
        for each in judged
    )
    return section(
        "patients",
        "What this means for my patients",
        f"""<p>The server never gets an image. It gets what the model learned from images, and tries to compute these
back. This is what came of it.</p><ul class="verdicts">{items}</ul>
<p>An image without a name can still be a person's: whoever has the same image elsewhere, such as in a clinic's archive,
can compare. Only a bound holds against attacks that nobody has thought of yet.</p>""",
    )


def meaning(judged: DefenceVerdict) -> str:
    """Return one defence's verdict in plain words."""
    found, images = judged.recognisable
    if judged.level == "leaks" and found:
        return f"{found} of {images} attacked images came back so that people can recognise them."
    if judged.level == "leaks":
        share = percent(judged.identified or 0.0)
        return (
            f"the recovered pictures are poor, yet {share} of them fit the right image better than all others that "
            "they were compared with. Whoever has the image can tell whose update it was."
        )
    nothing = f"none of {images} attacked images came back better than a guess that anybody could make."
    if judged.level == "open":
        return f"{nothing} That is no proof: a better attack may come, and an attack that did not converge says little."
    if judged.bound is not None:
        return (
            f"{nothing} And it is proven: by the attacked update, nobody can pick an image out of 1,000 with a chance "
            f"above {percent(judged.bound)}."
        )
    return f"{nothing} And it is proven how much one image can change what the server sees: ε = {judged.epsilon:.3g}."


def _under(defence: str) -> str:
    return "Without protection" if defence == "none" else f"Under {defence}"
