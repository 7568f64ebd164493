"""Measure what a server reads of a private image by asking a site to score weights that it chose.

The attack of tests/security/test_evaluate_oracle.py, in this process: one question per pixel of an 8x8 image, against
scores without any rule (gradveil 0.1), against a site with the default policy, and against a site that gives noisy
scores of its training images. Run from the root of the repository: PYTHONPATH=. python
benchmarks/evaluate_oracle.py
"""

import argparse
import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from flwr.supercore.task_identity import TaskIdentity
from tests.security.sites import OneSite, private_set
from tests.security.test_evaluate_oracle import plain_scores, psnr, rebuild, scores_of

SEEDS = range(5)


def measured() -> dict[str, dict[str, float]]:
    """Return the mean PSNR and the number of answers for each kind of site, over the seeds."""
    found: dict[str, list[tuple[float, int]]] = {}
    for seed in SEEDS:
        data = private_set(images=1, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            plain = OneSite(Path(folder) / "a", data=data)
            noisy = OneSite(Path(folder) / "b", data=data, training_scores=0.5, training_budget=1.0)
            for site in (plain, noisy):
                site.train(1)
            ways = {
                "no rule": plain_scores(data),
                "default policy": scores_of(plain, "own", after=1),
                "training-scores=0.5": scores_of(noisy, "own", after=1),
            }
            for name, loss_of in ways.items():
                guess, answers = rebuild(loss_of)
                found.setdefault(name, []).append((psnr(guess, data), answers))
    return {
        name: {"psnr": round(sum(p for p, _ in runs) / len(runs), 1), "answers": max(count for _, count in runs)}
        for name, runs in found.items()
    }


def main() -> None:
    """Measure and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/evaluate-oracle.json"))
    out = parser.parse_args().out
    for name in ("_task_id", "_run_id", "_node_id"):  # Flower expects a task of a process that makes messages
        setattr(TaskIdentity, name, 1)
    document = {
        "command": "PYTHONPATH=. python benchmarks/evaluate_oracle.py",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seeds": list(SEEDS),
        "figures": measured(),
    }
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
