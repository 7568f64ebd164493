"""Compare the bounds of `gradveil score` with what attacks reach, on digits, colour pictures and X-rays.

Attackers know the label, the defence and public images. Networks are untrained; one image per update. Run from the root
of the repository: python benchmarks/score_bound.py --data-root DIR --out results/score-bound.json; DIR holds the data
sets, also pneumoniamnist.npz (Yang et al. 2023, MedMNIST v2, as an own set of 28 x 28 chest X-rays).
"""

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import gradveil

SETTINGS: dict[str, dict[str, Any]] = {
    "mnist-5k": {"model": "lenet-dlg", "targets": 8},
    "pneumoniamnist.npz": {"model": "lenet-dlg", "targets": 8},
    "cifar10": {"model": "lenet-dlg", "targets": 4},
}
DEFENCES = ("gaussian:std=0.02", "gaussian:std=0.1", "gaussian:std=0.5", "pogz", "quantise")
SEARCH = "gs:iterations=1200,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
ATTACKS = {
    "gs": SEARCH,
    "gs, prior=normal": f"{SEARCH},prior=normal",
    "gs, prior=denoiser": f"{SEARCH},prior=denoiser",
    "ggl": "ggl:optimiser=adam,iterations=600",
    "lti": "lti:samples=1000",
}
RATE = 1.0
"""The clients' learning rate: noise on updates is noise on gradients."""


def attacked(dataset: str, defences: Sequence[str], root: Path | None) -> list[dict[str, Any]]:
    """Return the rows of adaptive attacks on first updates."""
    with tempfile.TemporaryDirectory() as folder:
        return list(
            gradveil.audit(
                dataset=dataset,
                defences=list(defences),
                attacks=list(ATTACKS.values()),
                adaptive=True,
                rounds=0,
                lr=RATE,
                metrics="psnr",
                workers=0,
                data_root=root,
                out=Path(folder) / "audit",
                **SETTINGS[dataset],
            ).rows
        )


def compared(dataset: str, defences: Sequence[str], root: Path | None) -> list[dict[str, Any]]:
    """Return a row per defence: both bounds, and the mean PSNR of each attack."""
    bounds = gradveil.score(dataset=dataset, defences=list(defences), lr=RATE, data_root=root, **SETTINGS[dataset])
    rows = attacked(dataset, defences, root)
    found = []
    for line in bounds.summary:
        if line["defence"] == "none" or line["psnr_cap"] is None:
            continue
        reached = {name: _mean(rows, line["defence"], spec) for name, spec in ATTACKS.items()}
        caps = {key: round(line[key], 2) for key in ("psnr_cap_white", "psnr_cap_covariance", "psnr_unseen")}
        found.append({"dataset": dataset, "defence": line["defence"], "targets": line["n"], **caps, "psnr": reached})
        print(found[-1], flush=True)
    return found


def _mean(rows: Sequence[dict[str, Any]], defence: str, attack: str) -> float | None:
    own = [row for row in rows if (row["defence"], row.get("attack"), row["adaptive"]) == (defence, attack, True)]
    values = [float(row["psnr"]) for row in own if row["psnr"] is not None]
    return round(statistics.fmean(values), 2) if values else None


def table(document: dict[str, Any]) -> str:
    """Return the figures as they stand in docs/score.md."""
    heads = ["data", "defence", "blind guess", "white bound", "covariance bound", *ATTACKS]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in document["figures"]:
        caps = [row[key] for key in ("psnr_unseen", "psnr_cap_white", "psnr_cap_covariance")]
        figures = ["-" if value is None else f"{value:.1f}" for value in (*caps, *row["psnr"].values())]
        lines.append(f"| {row['dataset']} | `{row['defence']}` | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the figures to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="Where data sets are.")
    parser.add_argument("--datasets", default=",".join(SETTINGS), help="Some of the data sets.")
    parser.add_argument("--defences", default="", help="Some of the defences, separated by semicolons.")
    parser.add_argument("--out", type=Path, default=Path("results/score-bound.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    defences = options.defences.split(";") if options.defences else DEFENCES
    figures = [row for dataset in options.datasets.split(",") for row in compared(dataset, defences, options.data_root)]
    document = {
        "command": "python benchmarks/score_bound.py --out results/score-bound.json",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradveil": version("gradveil"),
        "seed": 0,
        "attacks": ATTACKS,
        "settings": SETTINGS,
        "lr": RATE,
        "figures": figures,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
