"""Compare the bounds of `gradveil score` with what attacks reach, on digits, colour pictures and X-rays.

Attackers know the label, the defence and public images. Networks are untrained; one image per update. Run from the root
of the repository: python benchmarks/score_bound.py --data-root DIR --out results/score-bound.json; DIR holds the data
sets, also pneumoniamnist.npz (Yang et al. 2023, MedMNIST v2, as an own set of 28 x 28 chest X-rays).
"""

import argparse
import json
import platform
import statistics
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import gradveil
from gradveil import load_dataset
from gradveil.attacks import build_attack
from gradveil.audits.plan import Cell
from gradveil.audits.settings import make_audit_settings
from gradveil.audits.views import observed, private_batches
from gradveil.defences import build_defence
from gradveil.metrics import score_targets
from gradveil.randomness import stream

SETTINGS: dict[str, dict[str, Any]] = {
    "mnist-5k": {"model": "lenet-dlg", "targets": 4},
    "pneumoniamnist.npz": {"model": "lenet-dlg", "targets": 2},
    "cifar10": {"model": "lenet-dlg", "targets": 2},
}
DEFENCES = {
    "mnist-5k": ("gaussian:std=0.1", "gaussian:std=0.5", "pogz"),
    "pneumoniamnist.npz": ("gaussian:std=0.1",),
    "cifar10": ("gaussian:std=0.02",),
}
MANY = (
    "soteria:prune=0.5", "entangle", "precode", "fedkl", "prune:fraction=0.9", "gaussian:std=0.01",
    "laplace:scale=0.01", "prune:fraction=0.9+gaussian:std=0.01", "quantise", "pogz", "ca-fl", "dp-sgd",
)  # fmt: skip
"""Defences whose bounds are shown for one digit."""
SEARCH = "gs:iterations=1200,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
ATTACKS = {
    "gs": SEARCH,
    "gs, prior=normal": f"{SEARCH},prior=normal",
    "gs, prior=denoiser": f"{SEARCH},prior=denoiser",
    "ggl": "ggl:optimiser=adam,iterations=400",
    "lti": "lti:samples=600",
}
RATE = 1.0
"""The clients' learning rate: noise on updates is noise on gradients."""


def attacked(dataset: str, defence: str, attack: str, root: Path | None) -> float:
    """Return the mean PSNR of an adaptive attack on first updates, which are those of an audit."""
    chosen = {"dataset": dataset, "defences": defence, "attacks": attack, "adaptive": True, "rounds": 0, "lr": RATE}
    settings = make_audit_settings({**chosen, **SETTINGS[dataset]})
    data = load_dataset(dataset, root)
    private = private_batches(settings, data)
    cell = Cell("benchmark", "privacy", defence, settings.seed, adaptive=True, first=0, last=len(private))
    tried = build_attack(attack)
    seen = observed(cell, settings, data, private, build_defence(defence), tried, root)
    guess = tried(seen, stream(settings.seed, "attack")).images
    figures, _ = score_targets(torch.stack([batch.images for batch in private]), guess, root, ("psnr",))
    return round(statistics.fmean(float(row["psnr"]) for row in figures), 2)


def compared(dataset: str, root: Path | None) -> list[dict[str, Any]]:
    """Return a row per defence: both bounds, and the mean PSNR of each attack."""
    bounds = gradveil.score(
        dataset=dataset, defences=list(DEFENCES[dataset]), lr=RATE, data_root=root, **SETTINGS[dataset]
    )
    found = []
    for line in bounds.summary:
        if line["defence"] == "none":
            continue
        reached = {name: attacked(dataset, line["defence"], spec, root) for name, spec in ATTACKS.items()}
        caps = {key: round(line[key], 2) for key in ("psnr_cap_white", "psnr_cap_covariance", "psnr_unseen")}
        found.append({"dataset": dataset, "defence": line["defence"], "targets": line["n"], **caps, "psnr": reached})
        print(found[-1], flush=True)
    return found


def scored(root: Path | None) -> list[dict[str, Any]]:
    """Return both bounds of many defences, for one digit."""
    found = gradveil.score(defences=list(MANY), targets=1, lr=RATE, data_root=root)
    keys = ("defence", "psnr_cap_white", "psnr_cap_covariance", "seen", "bits", "why")
    return [{key: row[key] for key in keys} for row in found.rows]


def table(document: dict[str, Any]) -> str:
    """Return the comparison of bounds and attacks as it stands in docs/score.md."""
    heads = ["data", "defence", "blind guess", "white bound", "covariance bound", *ATTACKS]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in (row for name in SETTINGS for row in document["figures"].get(name, [])):
        caps = [row[key] for key in ("psnr_unseen", "psnr_cap_white", "psnr_cap_covariance")]
        figures = ["-" if value is None else f"{value:.1f}" for value in (*caps, *row["psnr"].values())]
        lines.append(f"| {row['dataset']} | `{row['defence']}` | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def scores(document: dict[str, Any]) -> str:
    """Return the bounds of many defences as they stand in docs/score.md."""
    lines = ["| defence | white bound | covariance bound | directions seen |", "|---|---|---|---|"]
    lines += [
        f"| `{row['defence']}` | {row['psnr_cap_white']:.1f} | {row['psnr_cap_covariance']:.1f} | {row['seen']} |"
        for row in document["figures"]["defences"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen parts, and write them to ``--out`` beside those that it already holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="Where data sets are.")
    parser.add_argument("--parts", default=",".join(["defences", *SETTINGS]), help="What to measure.")
    parser.add_argument("--out", type=Path, default=Path("results/score-bound.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = json.loads(options.out.read_text())["figures"] if options.out.is_file() else {}
    for part in options.parts.split(","):
        figures[part] = scored(options.data_root) if part == "defences" else compared(part, options.data_root)
        document = {
            "command": f"python benchmarks/score_bound.py --parts {','.join(figures)} --out results/score-bound.json",
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
        print(json.dumps(figures[part], indent=1), flush=True)


if __name__ == "__main__":
    main()
