"""Collect the attacks on FedKL with BatchNorm frozen and as in training, from the folders of two audits.

Run from the root of the repository, after ``gradveil audit`` with --batch-norm freeze and with --batch-norm average:
python benchmarks/batch_norm.py FOLDER FOLDER
"""

import argparse
import json
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch

COMMAND = (
    "gradveil audit --dataset mnist-5k --model lenet-dlg --targets 4 --rounds 0 --lr 1 --adaptive --defences fedkl "
    "--batch-norm freeze|average --attacks gs:iterations=500,restarts=4,sign=none,schedule=cosine,lr=0.3,tv=1e-6"
)


def main() -> None:
    """Read the rows of both audits, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/batch-norm.json"))
    options = parser.parse_args()
    found: dict[tuple[str, str, bool], list[float]] = {}
    for folder in options.folders:
        for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
            if row.get("attack") and row.get("psnr") is not None and row["defence"] in ("none", "fedkl"):
                key = row["defence"], row["batch_norm"], row["adaptive"]
                found.setdefault(key, []).append(round(row["psnr"], 2))
    rows = [
        {"defence": defence, "batch_norm": mode, "adaptive": adaptive, "psnr": round(statistics.fmean(each), 2),
         "each": each}
        for (defence, mode, adaptive), each in found.items()
    ]  # fmt: skip
    facts = {"command": COMMAND, "date": datetime.now(UTC).date().isoformat(), "seeds": [0]}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    options.out.write_text(json.dumps(facts | versions | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
