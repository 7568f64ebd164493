"""Measure what an attacker gains from knowing public images, if updates are noisy.

The gradient of one digit behind an untrained lenet-dlg gets Gaussian noise, whose strength the attacker knows. Gradient
matching then looks for the likeliest picture, with one of three priors: neighbouring pixels are alike (``smooth``, no
public images), the mean and covariance of public images (``normal``), or a denoiser trained on them (``denoiser``). Run
from the root of the repository: python benchmarks/noise_priors.py --data-root DIR --out results/noise-priors.json
"""

import argparse
import json
import platform
import statistics
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import gradveil

STDS = (0.1, 0.5)
PRIORS = ("smooth", "normal", "denoiser")
SEARCH = "gs:iterations=1200,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
TARGETS = 8


def audited(defence: str, attack: str, folder: Path, root: Path | None) -> list[Any]:
    """Return the rows of an audit of first updates; one that is already in the folder is not repeated."""
    if (folder / "rows.jsonl").is_file():
        return list(gradveil.audit(out=folder, resume=True, workers=0, data_root=root).rows)
    result = gradveil.audit(
        dataset="mnist-5k",
        model="lenet-dlg",
        defences=defence,
        attacks=attack,
        adaptive=True,
        targets=TARGETS,
        rounds=0,
        metrics="psnr,ssim",
        workers=0,
        data_root=root,
        out=folder,
    )
    return list(result.rows)


def measured(std: float, prior: str, folder: Path, root: Path | None) -> dict[str, Any]:
    """Return the figures of one prior under noise of one strength, means over targets."""
    defence, attack = f"gaussian:std={std},where=gradient", f"{SEARCH},prior={prior}"
    everything = audited(defence, attack, folder / f"{std}-{prior}", root)
    rows = [row for row in everything if row["kind"] == "privacy" and row["defence"] == defence and row["adaptive"]]
    psnr, ssim = ([float(row[name]) for row in rows] for name in ("psnr", "ssim"))
    found = {
        "std": std,
        "prior": prior,
        "attack": attack,
        "targets": len(rows),
        "psnr": round(statistics.fmean(psnr), 2),
        "psnr_least": round(min(psnr), 2),
        "psnr_largest": round(max(psnr), 2),
        "ssim": round(statistics.fmean(ssim), 3),
        "identified": round(statistics.fmean(float(row["identified"]) for row in rows), 3),
        "blind_psnr": round(statistics.fmean(float(row["blind_psnr"]) for row in rows), 2),
    }
    print(found, flush=True)
    return found


def table(document: dict[str, Any]) -> str:
    """Return the figures as they stand in docs/attacks.md."""
    lines = ["| std | prior | mean PSNR | least | SSIM | identified | blind guess |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['std']:g} | `{row['prior']}` | {row['psnr']:.1f} | {row['psnr_least']:.1f} | {row['ssim']:.2f} | "
        f"{row['identified']:.0%} | {row['blind_psnr']:.1f} |"
        for row in document["figures"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the figures to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="Where data sets are.")
    parser.add_argument("--audits", type=Path, help="Folder for the audits; finished ones are not repeated.")
    parser.add_argument("--out", type=Path, default=Path("results/noise-priors.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.audits or Path(temporary)
        figures = [measured(std, prior, folder, options.data_root) for std in STDS for prior in PRIORS]
    document = {
        "command": "python benchmarks/noise_priors.py --out results/noise-priors.json",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradveil": version("gradveil"),
        "seed": 0,
        "targets": TARGETS,
        "figures": figures,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
