"""The league table: every defence against its strongest attacker, from our measurements and from entries sent in.

``python -m gradveil.reproduce.leaderboard`` writes docs/leaderboard.md and its schema from results/ in the working
directory; ``python -m gradveil.reproduce.leaderboard FILE ...`` checks entries and names what is missing.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from gradveil.catalogue import catalogue
from gradveil.storage import write_atomic

Entry = Mapping[str, Any]
"""One defence in one setting against one attacker; its fields are `FIELDS`."""
NOT_MEASURED = "not measured"


class EntryField(NamedTuple):
    """A field of an entry: its type in JSON, its meaning, whether it must be there, and the values it may have."""

    kind: str
    means: str
    required: bool = True
    least: float | None = None
    most: float | None = None


FIELDS: Mapping[str, EntryField] = {
    "defence": EntryField("string", "the defence with its settings, such as soteria:prune=0.6"),
    "dataset": EntryField("string", "the data set of the private images"),
    "model": EntryField("string", "the network"),
    "protocol": EntryField("string", "lab (one gradient in an update) or fedavg (a whole local training)"),
    "round": EntryField("string", "which update is attacked: first, or such as 1/500"),
    "attack": EntryField("string", "the attack with its settings"),
    "knows_the_defence": EntryField("boolean", "whether the attacker knows the defence and its settings"),
    "targets": EntryField("integer", "number of attacked images", least=1),
    "seeds": EntryField("array", "the seeds, each with images and a network of its own"),
    "psnr": EntryField("number", "mean PSNR of the attacker's images in dB"),
    "blind_psnr": EntryField("number", "mean PSNR of a guess that knows the label only"),
    "identified": EntryField(
        "number", "share of images that the attacker's image picks out among the candidates", True, 0, 1
    ),
    "candidates": EntryField("integer", "number of images among which it is picked out", least=2),
    "command": EntryField("string", "the command that measures it again"),
    "date": EntryField("string", "the day of the measurement, as 2026-11-18"),
    "version": EntryField("string", "the version of gradveil"),
    "points_lost": EntryField("number", "accuracy lost against no defence, in percentage points", required=False),
    "overhead": EntryField("number", "time of a round, divided by that without defence", required=False, least=0),
    "epsilon": EntryField("number", "epsilon of differential privacy of the whole training", required=False, least=0),
    "delta": EntryField("number", "its delta", required=False, least=0, most=1),
}
KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "array": (list,),
}  # fmt: skip
PROTOCOLS = ("lab", "fedavg")
SCENES = {
    ("mnist-5k", "lab"): "MNIST digits, one gradient in an update",
    ("mnist-5k", "fedavg"): "MNIST digits, local trainings",
    ("cifar10", "lab"): "CIFAR-10, one gradient in an update",
    ("cifar10", "fedavg"): "CIFAR-10, local trainings",
}


def schema() -> dict[str, Any]:
    """Return the JSON schema of an entry."""
    properties: dict[str, dict[str, Any]] = {}
    for name, field in FIELDS.items():
        properties[name] = {"type": field.kind, "description": field.means}
        properties[name] |= {"minimum": field.least} if field.least is not None else {}
        properties[name] |= {"maximum": field.most} if field.most is not None else {}
    properties["protocol"]["enum"] = list(PROTOCOLS)
    properties["date"]["format"] = "date"
    properties["seeds"] |= {"items": {"type": "integer"}, "minItems": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "An entry of gradveil's league table",
        "type": "object",
        "properties": properties,
        "required": [name for name, field in FIELDS.items() if field.required],
        "additionalProperties": False,
    }


def faults(entry: object) -> list[str]:
    """Return what is missing or wrong in an entry, one sentence each; an empty list accepts it.

    Example:
        >>> faults({"defence": "none"})[0]
        'dataset is missing: the data set of the private images.'
    """
    if not isinstance(entry, dict):
        return [f"An entry must be an object with fields, got {type(entry).__name__}."]
    found = [f"{name} is missing: {f.means}." for name, f in FIELDS.items() if f.required and name not in entry]
    found += [f"{name} is no field of an entry." for name in entry if name not in FIELDS]
    for name, field in FIELDS.items():
        if name in entry:
            found += [
                f"{name} must be {problem}, got {entry[name]!r}." for problem in _problems(entry[name], name, field)
            ]
    return found


def _problems(value: object, name: str, field: EntryField) -> Iterator[str]:
    if not isinstance(value, KINDS[field.kind]) or (isinstance(value, bool) and field.kind != "boolean"):
        yield f"of type {field.kind}"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if field.least is not None and not value >= field.least:
            yield f"at least {field.least:g}"
        if field.most is not None and not value <= field.most:
            yield f"at most {field.most:g}"
    elif name == "protocol" and value not in PROTOCOLS:
        yield " or ".join(PROTOCOLS)
    elif name == "date" and not _is_date(str(value)):
        yield "a date such as 2026-11-18"
    elif isinstance(value, list) and (not value or not all(type(seed) is int for seed in value)):
        yield "a list of at least one seed"


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


# --- Our own measurements ---------------------------------------------------------------------------------------------


def from_strongest(document: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the entries of results/strongest-attackers.json: first updates, strongest plain and knowing attackers."""
    for line in document["lines"]:
        for key, knows in (("after plain", False), ("after adaptive", True)):
            best = line[key]
            yield {
                "defence": line["defence"], "dataset": "mnist-5k", "model": "lenet-dlg", "protocol": "lab",
                "round": "first", "attack": best["attack"], "knows_the_defence": knows, "targets": document["targets"],
                "seeds": document["seeds"], "psnr": best["psnr"], "blind_psnr": line["blind"],
                "identified": best["identified"], "candidates": 1001, "command": document["command"],
                "date": document["date"], "version": document["version"],
            }  # fmt: skip


def from_demo(document: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the entries of results/demo.json: updates of trainings, with accuracy and time."""
    taps = {"demo": "1 and 500 of 500", "demo-veil": "1 of 60"}
    for name, audit in document["audits"].items():
        for line in audit["lines"]:
            if line["blind_psnr"] is None:
                continue
            entry = {
                "defence": line["defence"], "dataset": "mnist-5k", "model": audit["model"], "protocol": "lab",
                "round": taps[name], "attack": line["attack"], "knows_the_defence": bool(line["adaptive"]),
                "targets": line["n"], "seeds": document["seeds"], "psnr": line["psnr"],
                "blind_psnr": line["blind_psnr"], "identified": line["identified"],
                "candidates": int(line["candidates"]), "command": audit["command"], "date": document["date"],
                "version": document["version"], "points_lost": line["points_lost"], "overhead": line["overhead"],
                "epsilon": line["epsilon_training"], "delta": line["delta_training"],
            }  # fmt: skip
            yield {key: value for key, value in entry.items() if value is not None}


def from_veil_attacked(document: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the entries of results/veil-attacked.json: all rounds of a training, every image known but one."""
    found: dict[float, list[Mapping[str, Any]]] = {}
    for row in document["attacked"]:
        if (row["view"], row["partition"]) == ("client", "iid") and row["bound"] < 1:
            found.setdefault(row["mu"], []).append(row)
    for mu, rows in found.items():
        means = {name: statistics.fmean(row["psnr"][name] for row in rows) for name in rows[0]["psnr"]}
        blind = means.pop("blind")
        images = sum(row["images"] for row in rows)
        yield {
            "defence": f"veil:mu={mu:g}", "dataset": "mnist-5k", "model": "patches", "protocol": "fedavg",
            "round": "all of 10", "attack": f"{max(means, key=means.__getitem__)} (every image known but one)",
            "knows_the_defence": True, "targets": images, "seeds": [row["seed"] for row in rows],
            "psnr": max(means.values()), "blind_psnr": blind, "identified": sum(row["picked"] for row in rows) / images,
            "candidates": 1000, "command": document["command"], "date": document["date"],
            "version": document["versions"]["gradveil"],
        }  # fmt: skip


def entries(results: Path) -> list[Entry]:
    """Return our own entries, and those of results/leaderboard/*.json, each a list of entries."""
    found = [
        *from_strongest(json.loads((results / "strongest-attackers.json").read_bytes())),
        *from_demo(json.loads((results / "demo.json").read_bytes())),
        *from_veil_attacked(json.loads((results / "veil-attacked.json").read_bytes())),
    ]
    for path in sorted((results / "leaderboard").glob("*.json")):
        found += json.loads(path.read_bytes())
    return found


# --- The page ---------------------------------------------------------------------------------------------------------


def gain(entry: Entry) -> float:
    """Return by how many dB the attacker beats a blind guess."""
    return float(entry["psnr"] - entry["blind_psnr"])


def strongest(found: Iterable[Entry]) -> list[Entry]:
    """Return the entry of the strongest attacker for each defence, network and round, most leaking first.

    The strongest attacker identifies most images and, among equals, is farthest above the blind guess.
    """
    best: dict[tuple[str, ...], Entry] = {}
    for entry in found:
        key = tuple(entry[name] for name in ("defence", "model", "round"))
        best[key] = max(best.get(key, entry), entry, key=_strength)
    return sorted(best.values(), key=_strength, reverse=True)


def _strength(entry: Entry) -> tuple[float, float]:
    return entry["identified"], gain(entry)


def sentence(entry: Entry) -> str:
    """Say what an entry means."""
    if entry["identified"] >= 0.5:
        return "Does not hide whose image it is."
    if entry["identified"] * entry["targets"] >= 2 or gain(entry) > 3:  # a single one may be luck
        return "Hides some images, not all."
    return "Nothing is gained over guessing by these attackers, which proves nothing about others."


def page(found: Sequence[Entry]) -> str:
    """Return the page of the league table."""
    parts = [
        "# League table",
        "Written by `make results` from `results/`; don't edit it.",
        "Every defence against the strongest attacker that was tried on it, most leaking first. *Identified* is the "
        "share of images that the attacker's image picks out among 1,000 others; *above blind* compares its PSNR with "
        "that of a guess that knows the label only. *Points lost* are negative where the training without defence had "
        "learned less by then. What is not measured says so. Settings are the published ones or those in the first "
        "column; the best settings by `gradveil recommend` are not measured yet.",
    ]
    for (dataset, protocol), title in SCENES.items():
        own = [entry for entry in found if (entry["dataset"], entry["protocol"]) == (dataset, protocol)]
        parts += [f"## {title}", _table(own) if own else f"{NOT_MEASURED.capitalize()}."]
    parts.append(
        "## Send an entry\n\nAn entry is a JSON object as described in "
        "[leaderboard.schema.json](leaderboard.schema.json); a file holds a list of them. "
        "`python -m gradveil.reproduce.leaderboard FILE` accepts it or names what is "
        "missing. Accepted files go to `results/leaderboard/`."
    )
    return "\n\n".join(parts) + "\n"


def _table(found: Sequence[Entry]) -> str:
    titles = ("defence", "network, update", "strongest attacker", "identified", "above blind", "points lost", "time",
              "epsilon", "in a sentence")  # fmt: skip
    rows = [_cells(entry) for entry in strongest(found)]
    seen = {entry["defence"].partition(":")[0] for entry in found}
    rows += [[f"`{name}`", *[NOT_MEASURED] * 8] for name in catalogue("defences").entries if name not in seen]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def _cells(entry: Entry) -> list[str]:
    def shown(name: str, text: str) -> str:
        return text.format(entry[name]) if name in entry else NOT_MEASURED

    knows = ", knows the defence" if entry["knows_the_defence"] else ""
    epsilon = f"{shown('epsilon', '{:.2g}')} at delta {entry['delta']:g}" if "epsilon" in entry else NOT_MEASURED
    return [
        f"`{entry['defence']}`", f"{entry['model']}, {entry['round']}", f"{entry['attack'].partition(':')[0]}{knows}",
        f"{entry['identified']:.1%}", f"{gain(entry):+.1f} dB", shown("points_lost", "{:.1f}"),
        shown("overhead", "{:.1f} times"), epsilon, sentence(entry),
    ]  # fmt: skip


def write_page(results: Path = Path("results"), docs: Path = Path("docs")) -> None:
    """Write docs/leaderboard.md and docs/leaderboard.schema.json."""
    write_atomic(docs / "leaderboard.md", page(entries(results)).encode())
    write_atomic(docs / "leaderboard.schema.json", f"{json.dumps(schema(), indent=1)}\n".encode())


def check(paths: Sequence[Path]) -> list[str]:
    """Return the faults of all entries of files, each with its place."""
    found = []
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            found.append(f"{path}: {error}")
            continue
        several = content if isinstance(content, list) else [content]
        found += [f"{path}, entry {n}: {fault}" for n, entry in enumerate(several, 1) for fault in faults(entry)]
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        wrong = check([Path(name) for name in sys.argv[1:]])
        sys.exit("\n".join(wrong) or 0)
    write_page()
