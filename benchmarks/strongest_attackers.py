"""Set every defence against its strongest attacker, with and without `standard` and `lti`, and write a page of it.

    python benchmarks/strongest_attackers.py --out runs/strongest            (resumes what an earlier call finished)
    python benchmarks/strongest_attackers.py --page                          (writes the page from the data again)

Digits of mnist-5k, one image behind each update (four if a defence mixes images), the first round of lenet-dlg in
the lab protocol. *Before* is gradient matching with settings that a person chose, with the defence's own countermove
if the attacker knows the defence. *After* adds `standard` and `lti`, which need no setting.
"""

import argparse
import datetime
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import gradveil
from gradveil.registry import components

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "strongest-attackers.json", ROOT / "docs" / "strongest-attackers.md"
BEFORE = "gs:iterations=600,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
AFTER = ("standard:effort=quick", "lti:samples=1000")
SETTINGS = {
    "soteria": "soteria:probes=32",
    "gaussian": "gaussian:where=gradient,std=0.1",
    "dcs2": "dcs2:steps=100",
    "veil": "veil:rounds=60",
}
"""Defences whose settings here are not their defaults: cheaper ones, noise on the gradient as in the papers, and one
round out of the 60 for which veil's mu is meant."""
INTRODUCTION = """# Every defence and its strongest attacker

Mean PSNR in dB of what attackers recover of private digits: the first update of lenet-dlg in the lab protocol,
{targets} clients, seeds {seeds}. *Before*: gradient matching with settings that a person chose; who knows the defence
uses the countermove in its file. *After*: the best of that, `standard` (quick) and `lti`, which need no countermove.
The strongest attacker of a cell is the one with the largest mean, chosen with the truth at hand. A blind guess knows
only the label. *Identified* is the share of images that the strongest attacker's guess picks out among 1,000 others
(chance: 0.1 %).

- Each client has one image, four under `mixup` and `instahide`, which mix them. Nobody trains: these are first updates.
- `dcs2` has 100 of its 1,000 steps, so that learned inversion can play it, and `soteria` ranks by 32 probes.
- `gaussian` adds its noise to the gradient, as in the papers. `laplace`, `pogz` and `ca-fl` have their defaults, which
  act on the update, so that noise is twenty times as strong there.
- `dp-sgd` draws its own images. Here a client has only one, which it may leave out; then there is nothing to rebuild.
- `veil` is meant for a head on frozen features and for clients with many images. Here it protects all of lenet-dlg and
  clients with a single image, which is the worst case for it; the noise is that of one round of 60 at μ = 1. Its price
  on the model it is meant for: [defences.md](defences.md#a-protection-that-holds-veil-on-public-features).
- One seed and few images: differences of a few tenths of a dB mean nothing.

This page is made from `results/strongest-attackers.json` ({date}, gradveil {version}, {machine}):
`{command}`.

| defence | blind | before, plain | before, adaptive | after, plain | after, adaptive | identified |
|---|---|---|---|---|---|---|"""
MIXING, MARKED = ("mixup", "instahide"), ("dcs2",)
"""Defences that need several images behind an update, and those that start from images that are not sensitive."""


def groups() -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Return the defences of each audit and its settings: defences of one audit share pilots and inverters."""
    every = [SETTINGS.get(name, name) for name in components("defences") if name not in ("none", "chain")]
    apart = {"mixing": MIXING, "marked": MARKED}
    own = {key: [spec for spec in every if spec.partition(":")[0] in names] for key, names in apart.items()}
    rest = [spec for spec in every if not any(spec in some for some in own.values())]
    return {
        "single": (rest, {}),
        "marked": (own["marked"], {"sensitive": "none"}),
        "mixing": (own["mixing"], {"images": 4}),
    }


def measured(name: str, folder: Path, targets: int) -> list[dict[str, Any]]:
    """Return the lines of one audit: the best mean PSNR of each attacker of each of its defences."""
    specs, own = groups()[name]
    known = {} if folder.exists() else {
        "defences": ["none", *specs], "attacks": [BEFORE, *AFTER], "adaptive": True, "rounds": 0, "targets": targets,
        "metrics": ["psnr", "ssim"], **own,
    }  # fmt: skip
    result = gradveil.audit(**known, out=folder, resume=folder.exists(), workers=0)
    return lines(result.rows, specs)


def lines(rows: list[dict[str, Any]], specs: list[str]) -> list[dict[str, Any]]:
    """Return a line per defence: the strongest attacker of each kind, and ``why`` if its attacks were not all run."""
    found = []
    for spec in specs:
        own = [row for row in rows if row["kind"] == "privacy" and row["defence"] == spec]
        line: dict[str, Any] = {"defence": spec, "blind": _mean(own, "blind_psnr")}
        for key, attacks in (("before", [BEFORE]), ("after", [BEFORE, *AFTER])):
            for adaptive in (False, True):
                some = [row for row in own if row["attack"] in attacks and row["adaptive"] is adaptive]
                line[f"{key} {'adaptive' if adaptive else 'plain'}"] = _strongest(some)
        failed = sorted({f"{row['attack'].partition(':')[0]}: {row['why']}" for row in own if row["failed"]})
        found.append(line | ({"failed": failed} if failed else {}))
    return found


def _strongest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the attack with the largest mean PSNR, or None if none has a guess."""
    by_attack = {attack: [row for row in rows if row["attack"] == attack] for attack in {row["attack"] for row in rows}}
    figures = {a: figure for a, some in by_attack.items() if (figure := _mean(some, "psnr")) is not None}
    if not figures:
        return None
    best = max(sorted(figures), key=lambda attack: figures[attack])
    return {
        "attack": best.partition(":")[0],
        "psnr": figures[best],
        "identified": _mean(by_attack[best], "identified"),
        "all": {attack.partition(":")[0]: figure for attack, figure in sorted(figures.items())},
    }


def _mean(rows: list[dict[str, Any]], field: str) -> float | None:
    values = [row[field] for row in rows if row.get(field) is not None]
    return round(sum(values) / len(values), 3) if values else None


def page(data: dict[str, Any]) -> str:
    """Return docs/strongest-attackers.md."""
    head = INTRODUCTION.format(**data | {"seeds": ", ".join(map(str, data["seeds"]))})
    return "\n".join([head, *map(_row, data["lines"]), ""])


def _row(line: dict[str, Any]) -> str:
    """Return a line of the page's table."""
    blind = "-" if line["blind"] is None else f"{line['blind']:.1f}"
    cells = [_cell(line[f"{when} {who}"]) for when in ("before", "after") for who in ("plain", "adaptive")]
    after = [found for found in (line["after plain"], line["after adaptive"]) if found]
    best = max(after, key=lambda found: found["psnr"], default={"identified": None})["identified"]
    share = "-" if best is None else f"{best:.0%}".replace("%", " %")
    return "| " + " | ".join([f"`{line['defence']}`", blind, *cells, share]) + " |"


def _cell(found: dict[str, Any] | None) -> str:
    return f"{found['psnr']:.1f} ({found['attack']})" if found else "-"


def main() -> None:
    """Measure all defences, one audit after another, and write data and page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "strongest", help="Folder of the audits.")
    parser.add_argument("--targets", type=int, default=8, help="Attacked clients.")
    parser.add_argument("--page", action="store_true", help="Only write the page from the data.")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))
        return
    data: dict[str, Any] = {
        "command": f"python benchmarks/strongest_attackers.py --targets {options.targets}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "version": version("gradveil"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "seeds": [0],
        "targets": options.targets,
        "lines": [],
    }
    for name in groups():
        data["lines"] += measured(name, options.out / name, options.targets)
        data["lines"].sort(key=lambda line: line["defence"])
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
