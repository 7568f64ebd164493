"""Set every defence against its strongest attacker, with and without `standard` and `lti`, and write a page of it.

    python benchmarks/strongest_attackers.py --out runs/strongest            (resumes what an earlier call finished)
    python benchmarks/strongest_attackers.py --page                          (writes the page from the data again)

Eight digits of mnist-5k, one image behind each update (four if a defence mixes images), the first round of lenet-dlg in
the lab protocol. *Before* is gradient matching with settings that a person chose, with the defence's own countermove
if the attacker knows the defence. *After* adds `standard` and `lti`, which need no setting.
"""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import gradveil
from gradveil.defences import build_defence
from gradveil.errors import GradveilError
from gradveil.registry import components

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "strongest-attackers.json", ROOT / "docs" / "strongest-attackers.md"
BEFORE = "gs:iterations=600,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
AFTER = ("standard:effort=quick", "lti:samples=1000")
SETTINGS = {"soteria": "soteria:probes=32", "gaussian": "gaussian:where=gradient,std=0.1", "dcs2": "dcs2:steps=100"}
"""Defences whose settings here are not their defaults: cheaper ones, or noise on the gradient as in the papers."""
INTRODUCTION = """# Every defence and its strongest attacker

Mean PSNR in dB of what attackers recover of private digits: the first update of lenet-dlg in the lab protocol,
{targets} clients, seed {seed}. *Before*: gradient matching with settings that a person chose; who knows the defence
uses the countermove in its file. *After*: the best of that, `standard` (quick) and `lti`, which need no countermove.
The strongest attacker of a line is the one with the largest mean, chosen with the truth at hand. A blind guess knows
only the label. *Identified* is the share of images that the strongest attacker's guess picks out among 1,000 others
(chance: 0.1 %).

This page is made from `results/strongest-attackers.json` ({date}, {machine}):
`{command}`.

| defence | blind | before, plain | before, adaptive | after, plain | after, adaptive | identified |
|---|---|---|---|---|---|---|"""
MIXING = {"mixup": 4, "instahide": 4}
"""Defences that need several images behind an update."""


def defences() -> list[str]:
    """Return one spec per defence of the folder."""
    return [SETTINGS.get(name, name) for name in components("defences") if name not in ("none", "chain")]


def measured(spec: str, folder: Path, targets: int) -> dict[str, Any]:
    """Return one line of the table: the best mean PSNR of each attacker of one defence."""
    name = spec.partition(":")[0]
    known = {} if folder.exists() else {
        "defences": spec, "attacks": [BEFORE, *AFTER], "adaptive": True, "rounds": 0, "targets": targets,
        "images": MIXING.get(name, 1), "sensitive": "none" if name == "dcs2" else "0.1",
    }  # fmt: skip
    result = gradveil.audit(**known, out=folder, resume=folder.exists(), workers=0)
    rows = [row for row in result.rows if row["kind"] == "privacy" and row["defence"] == spec]
    line: dict[str, Any] = {"defence": spec, "blind": _mean(rows, "blind_psnr")}
    for key, attacks in (("before", [BEFORE]), ("after", [BEFORE, *AFTER])):
        for adaptive in (False, True):
            own = {a: [r for r in rows if r["attack"] == a and r["adaptive"] is adaptive] for a in attacks}
            figures = {a: _mean(some, "psnr") for a, some in own.items() if _mean(some, "psnr") is not None}
            best = max(figures, key=lambda a: figures[a], default=None)
            line[f"{key} {'adaptive' if adaptive else 'plain'}"] = best and {
                "attack": best.partition(":")[0],
                "psnr": figures[best],
                "identified": _mean(own[best], "identified"),
            }
    return line


def _mean(rows: list[dict[str, Any]], field: str) -> float | None:
    values = [row[field] for row in rows if row.get(field) is not None]
    return round(sum(values) / len(values), 3) if values else None


def page(data: dict[str, Any]) -> str:
    """Return docs/strongest-attackers.md."""
    lines = [INTRODUCTION.format(**data)]
    for line in data["lines"]:
        cells = [f"`{line['defence']}`"]
        if "why" in line:
            lines.append(f"| {cells[0]} | not run: {line['why']} | | | | | |")
            continue
        cells.append(f"{line['blind']:.1f}")
        cells += [_cell(line[f"{when} {who}"]) for when in ("before", "after") for who in ("plain", "adaptive")]
        best = max(filter(None, (line["after plain"], line["after adaptive"])), key=lambda found: found["psnr"])
        cells.append("-" if best["identified"] is None else f"{best['identified']:.0%}".replace("%", " %"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _cell(found: dict[str, Any] | None) -> str:
    return f"{found['psnr']:.1f} ({found['attack']})" if found else "-"


def main() -> None:
    """Measure all defences, one after another, and write data and page after each."""
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
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "seed": 0,
        "targets": options.targets,
        "lines": [],
    }
    for spec in defences():
        build_defence(spec)
        try:
            line = measured(spec, options.out / spec.replace(":", "-"), options.targets)
        except GradveilError as error:
            line = {"defence": spec, "why": str(error)}
        data["lines"].append(line)
        print(json.dumps(line), file=sys.stderr)
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
