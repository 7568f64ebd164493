"""One page per component, made from its docstring, its settings and what was measured of it."""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradveil.catalogue import FOLDERS, Entry, catalogue
from gradveil.registry import find
from gradveil.source import NO_DEFAULT, Unclear
from website.drawings import bars
from website.maths import markdown

ROOT = Path(__file__).parents[1]
PAGES = {
    "defences": "defences.md",
    "attacks": "attacks.md",
    "metrics": "report.md",
    "models": "data-and-models.md",
    "datasets": "data-and-models.md",
    "partitions": "data-and-models.md",
    "generators": "generators.md",
}
"""The page that compares the components of each kind."""
LABELS = "Threat model|Does not protect|Guarantee|Reference|Differs from the paper|Needs|Fails|Range|Edge cases"
LEAGUE = "strongest-attackers.json"


def pages() -> Iterator[tuple[str, str, str]]:
    """Yield kind, path and Markdown of the page of each component, after that of the list of its kind."""
    league = json.loads((ROOT / "results" / LEAGUE).read_text())["lines"]
    for kind in FOLDERS:
        entries = catalogue(kind).entries
        yield kind, f"components/{kind}/index.md", _overview(kind, entries)
        for name, entry in entries.items():
            yield kind, f"components/{kind}/{name}.md", page_of(entry, league)


def page_of(entry: Entry, league: list[dict[str, Any]]) -> str:
    """Return a component's page."""
    doc = inspect.cleandoc(entry.doc)
    text, _, attributes = doc.partition("\nAttributes:\n")
    text, _, example = text.partition("\nExample:\n")
    first, _, rest = text.partition("\n")
    rest, _, more = attributes_end(rest, attributes)
    parts = [f"# {entry.name}", _sentence(markdown(first)), verdict(entry, league), body(rest)]
    if example:
        parts += ["## Example", f"```pycon\n{textwrap.dedent(example).strip()}\n```"]
    parts.append(settings(entry, more))
    typed = {"defences": "--defences", "attacks": "--attacks", "metrics": "--metrics", "models": "--model"}
    typed |= {"datasets": "--dataset", "partitions": "--partition"}
    if entry.kind in typed:
        parts += ["## Type it", f"```\ngradveil audit {typed[entry.kind]} {entry.name}\n```"]
    parts.append(f"All of its kind, compared: [{PAGES[entry.kind].removesuffix('.md')}](../../{PAGES[entry.kind]}).")
    return "\n\n".join(filter(None, parts)) + "\n"


def attributes_end(rest: str, attributes: str) -> tuple[str, str, str]:
    """Return the text, nothing, and the lines of ``Attributes:``; what follows these is part of the text."""
    lines = attributes.split("\n")
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return "\n".join([rest, *lines[end:]]), "", "\n".join(lines[:end])


def body(text: str) -> str:
    """Return a docstring's paragraphs, each labelled one with its label in bold, and links that can be clicked."""
    text = re.sub(rf"^({LABELS}): ", r"\n**\1:** ", markdown(text), flags=re.MULTILINE)
    lines = [line.strip() if "$$" not in line else line for line in text.split("\n")]
    return re.sub(r"(?<![<(])(https?://[^\s,;)]+[^\s,;).])", r"<\1>", "\n".join(lines)).strip()


def settings(entry: Entry, attributes: str) -> str:
    """Return a table of the settings with defaults and meaning."""
    try:
        defaults = entry.settings
    except Unclear:
        import dataclasses

        fields = [field for field in dataclasses.fields(find(entry.kind, entry.name)) if field.init]
        defaults = {f.name: NO_DEFAULT if f.default is dataclasses.MISSING else f.default for f in fields}
    if not defaults:
        return ""
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", attributes, re.MULTILINE)
    meaning = {name: re.sub(r"\s+", " ", markdown(text)).strip() for name, text in found}
    lines = [f"| `{name}` | {_shown(value)} | {_cell(meaning.get(name, ''))} |" for name, value in defaults.items()]
    return "\n".join(["## Settings", "", "| setting | default | meaning |", "|---|---|---|", *lines])


def verdict(entry: Entry, league: list[dict[str, Any]]) -> str:
    """Return what the league table of strongest attackers says of a defence or an attack, with a drawing."""
    if entry.kind == "defences":
        for line in league:
            if line["defence"].partition(":")[0] == entry.name:
                return _judged(line)
    if entry.kind == "attacks":
        won = [
            line["defence"].partition(":")[0]
            for line in league
            if entry.name in (line["after plain"]["attack"], line["after adaptive"]["attack"])
        ]
        if won:
            names = ", ".join(f"[{name}](../defences/{name}.md)" for name in won)
            return (
                f'!!! abstract "Verdict"\n    In the [league table](../../strongest-attackers.md) it is the strongest '
                f"attack on {names}."
            )
    return ""


def _judged(line: dict[str, Any]) -> str:
    plain, knowing, blind = line["after plain"], line["after adaptive"], line["blind"]
    strongest = max(plain, knowing, key=lambda row: row["psnr"])
    picked = max(plain["identified"], knowing["identified"])
    holds = strongest["psnr"] < blind + 1 and not picked
    said = "No attack here did clearly better than a blind guess" if holds else "Images are recovered"
    lines = [("blind guess", blind), (f"plain: {plain['attack']}", plain["psnr"])]
    lines.append((f"knows it: {knowing['attack']}", knowing["psnr"]))
    drawing = bars(lines, "PSNR of recovered images in dB; longer leaks more")
    text = (
        f"{said}: the strongest attacker (`{strongest['attack']}`) reaches {strongest['psnr']:.1f} dB, "
        f"a blind guess {blind:.1f} dB, and {picked:.0%} of the images are picked out of many. "
        f"`{line['defence']}`, one seed, few images: [league table](../../strongest-attackers.md)."
    )
    mark = "success" if holds else "danger"
    return f'!!! {mark} "Verdict"\n    {text}\n\n    {drawing}'


def _overview(kind: str, entries: dict[str, Entry] | Any) -> str:  # noqa: ANN401 - a mapping
    lines = [
        f"| [`{name}`]({name}.md) | {_cell(markdown(inspect.cleandoc(entry.doc).partition(chr(10))[0]))} |"
        for name, entry in entries.items()
    ]
    head = f"# {kind.capitalize()}\n\nEvery one exists because its file exists; its page is made from its docstring.\n"
    return "\n".join([head, "| name | what it does |", "|---|---|", *lines]) + "\n"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shown(value: object) -> str:
    return "needed" if value is NO_DEFAULT else f"`{value}`" if value != "" else "empty"
