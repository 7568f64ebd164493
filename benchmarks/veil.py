"""Measure what veil costs: accuracy of a private head over three seeds, and the time of a round.

::

    python benchmarks/veil.py --out results/veil.json
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gradveil.config import TrainSettings
from gradveil.engines.simulation import Simulation

BASE = TrainSettings(dataset="mnist-5k", model="patches", clients=10, rounds=60, eval_every=60)
QUIET = "veil:mu=1000000"
SPECS = (QUIET, *(f"veil:mu={mu}{more}" for mu in (1, 2, 3) for more in ("", ",at=sum")))
SEEDS = (0, 1, 2)
TIMED = 6


def trained(settings: TrainSettings, root: Path | None) -> dict[str, Any]:
    """Train in this process; return the last row, and the median computing time of a round without the first."""
    with Simulation(settings, workers=0, data_root=root) as simulation:
        simulation.clock = time.process_time
        rows = list(simulation.run())
    return rows[-1] | {"round_seconds": statistics.median(row["seconds"] for row in rows[1:])}


def table(document: dict[str, Any]) -> str:
    """Return the result as the table of docs/defences.md."""
    found, lines = (
        document["trainings"],
        ["| μ | ε at δ = 1e-5 | picked out of 1,000 at most | `at=client` | `at=sum` |"],
    )
    lines.append("|---|---|---|---|---|")
    for mu in (1, 2, 3):
        own, shared = (found[f"veil:mu={mu}{more}"] for more in ("", ",at=sum"))
        facts = f"{own['epsilon']:.3g} | {own['identified_bound']:.1%}"
        lines.append(f"| {mu} | {facts} | {own['mean']:.1%} | {shared['mean']:.1%} |")
    lines.append(f"| no noise | | | {found[QUIET]['mean']:.1%} | |")
    return "\n".join(lines)


def sentence(document: dict[str, Any]) -> str:
    """Return the times as the sentence of docs/defences.md."""
    slowest = max(one["round_seconds"] for one in document["trainings"].values())
    plain = document["lenet5_undefended_round_seconds"]
    return f"{slowest:.2f} s of computing for a round of veil, {plain:.2f} s for one of lenet5 without a defence"


def main() -> None:
    """Run all trainings, print them, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data-root", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for spec in SPECS:
        secure = "secure" if "at=sum" in spec else "none"
        settings = replace(BASE, defence=spec, aggregation=secure)
        rows = [trained(replace(settings, seed=seed), given.data_root) for seed in SEEDS]
        found[spec] = {
            "accuracy": [row["accuracy"] for row in rows],
            "mean": statistics.fmean(row["accuracy"] for row in rows),
            **{key: rows[0].get(key) for key in ("mu", "epsilon", "delta", "identified_bound")},
            "round_seconds": statistics.median(row["round_seconds"] for row in rows),
        }
        print(spec, found[spec], flush=True)
    plain = trained(replace(BASE, model="lenet5", rounds=TIMED, eval_every=TIMED), given.data_root)
    result = {
        "command": "python benchmarks/veil.py --out results/veil.json",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"gradveil": version("gradveil"), "torch": torch.__version__},
        "seeds": list(SEEDS),
        "settings": "mnist-5k, patches, 10 clients, 60 rounds, one thread; seconds are computing time per round",
        "trainings": found,
        "lenet5_undefended_round_seconds": plain["round_seconds"],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
