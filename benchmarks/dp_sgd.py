"""Measure accuracy against epsilon for dp-sgd on a whole network, by a published recipe, beside published figures.

It continues where an earlier run of the same command stopped: every finished training is in the file already.

::

    python benchmarks/dp_sgd.py --data-root DATA --out results/dp-sgd.json
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.defences.parts.accounting import poisson_noise
from gradveil.engines.simulation import Simulation
from gradveil.storage import write_atomic

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 8.0)
RECIPES = {"mnist": (512, 0.5, 1), "cifar10": (1024, 1.0, 2)}
"""Batch and rate of Tramer and Boneh's own command for each set (tanh, clip 0.1, momentum 0.9), and our epochs."""
PUBLISHED = (
    ("Tramèr and Boneh 2021, a linear model on ScatterNet features", {"mnist": {3: 0.987}, "cifar10": {3: 0.693}}),
    ("De et al. 2022, WRN-40", {"cifar10": {8: 0.814}}),
)


@dataclass(frozen=True)
class Case:
    """One training by one client, which has all images, as in the papers."""

    dataset: str
    epsilon: float
    seed: int = 0

    def settings(self, images: int) -> TrainSettings:
        """Return the settings, with the noise that gives this epsilon over all steps."""
        batch, rate, epochs = RECIPES[self.dataset]
        steps = epochs * -(-images // batch)
        noise = poisson_noise(self.epsilon, batch / images, steps, DELTA)
        return TrainSettings(
            dataset=self.dataset,
            model="lenet5:activation=tanh",
            defence=f"dp-sgd:clip=0.1,noise={noise:.4f},delta={DELTA}",
            clients=1,
            rounds=epochs,
            eval_every=epochs,
            batch_size=batch,
            lr=rate,
            seed=self.seed,
        )


CASES = [Case(dataset, epsilon) for epsilon in (3.0, 8.0, 1.0) for dataset in RECIPES]


def trained(case: Case, root: Path) -> dict[str, Any]:
    """Train in this process; return the figures of the last row."""
    settings = case.settings(len(load_dataset(case.dataset, root).train))
    with Simulation(settings, workers=0, data_root=root) as simulation:
        simulation.clock = time.process_time
        rows = list(simulation.run())
        images = sum(simulation.sizes)
    facts = {"images": images, "epochs": settings.rounds, "batch_size": settings.batch_size, "rate": settings.lr}
    spent = {"reached_epsilon": rows[-1]["epsilon"], "round_seconds": rows[-1]["seconds"]}
    return asdict(case) | facts | {"defence": settings.defence, "accuracy": rows[-1]["accuracy"]} | spent


def table(document: dict[str, Any]) -> str:
    """Return the result as the table of docs/defences.md."""
    heads = [f"{name}, ε = {epsilon:g}" for name in RECIPES for epsilon in EPSILONS]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    ours = {(row["dataset"], row["epsilon"]): row["accuracy"] for row in document["trainings"]}
    cells = [ours.get((name, epsilon)) for name in RECIPES for epsilon in EPSILONS]
    lines.append("| `dp-sgd` on lenet5, here | " + " | ".join(map(_percent, cells)) + " |")
    for title, figures in PUBLISHED:
        known = [figures.get(name, {}).get(int(epsilon)) for name in RECIPES for epsilon in EPSILONS]
        lines.append(f"| {title} | " + " | ".join(map(_percent, known)) + " |")
    return "\n".join(lines)


def scale(document: dict[str, Any]) -> str:
    """Return at which scale this was measured, for docs/defences.md."""
    found = {row["dataset"]: row for row in document["trainings"]}
    return "; ".join(
        f"{name}: {row['images']:,} images, {row['epochs']} epoch{'s' * (row['epochs'] > 1)}, "
        f"batches of {row['batch_size']}, "
        f"rate {row['rate']:g}"
        for name, row in found.items()
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def main() -> None:
    """Run the trainings that are not in the file yet, and write it after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--most", type=int, default=len(CASES), help="Stop after this many trainings.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {
        "command": "python benchmarks/dp_sgd.py --data-root DATA --out results/dp-sgd.json",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"gradveil": version("gradveil"), "torch": torch.__version__},
        "seeds": [0],
        "settings": "one client with all images, lenet5 with tanh, clip 0.1, momentum 0.9 per epoch, one thread",
        "trainings": json.loads(given.out.read_text())["trainings"] if given.out.exists() else [],
    }
    done = {(row["dataset"], row["epsilon"], row["seed"]) for row in document["trainings"]}
    for case in CASES[: given.most]:
        if (case.dataset, case.epsilon, case.seed) in done:
            continue
        document["trainings"].append(row := trained(case, given.data_root))
        write_atomic(given.out, (json.dumps(document, indent=1) + "\n").encode())
        print(f"{time.process_time():.0f} s", row, flush=True)


if __name__ == "__main__":
    main()
