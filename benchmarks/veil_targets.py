"""Measure what veil costs at full size: MNIST and CIFAR-10, even and uneven clients, beside a convolutional network.

It continues where an earlier run of the same command stopped: every finished training is in the file already.

::

    python benchmarks/veil_targets.py --data-root DATA --out results/veil-targets.json
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.engines import feature_store
from gradveil.engines.simulation import Simulation
from gradveil.models.trunk import FeatureMemo, Trunk, image_hashes, learn_features
from gradveil.storage import write_atomic

QUIET = "veil:mu=1000000,at=sum"
MNIST, CIFAR, SVHN = "mnist", "cifar10", "svhn.npz"
EVEN, UNEVEN = "iid", "dirichlet:alpha=0.5"
FROZEN = "frozen:network=resnet20,weights=cifar10_resnet20.safetensors"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    """One training with 10 clients; ``rounds`` of full batches under veil, of one local epoch without a defence."""

    dataset: str
    model: str
    defence: str
    partition: str = EVEN
    seed: int = 0
    rounds: int = 60

    def settings(self, root: Path) -> TrainSettings:
        """Return the settings; files are looked for below ``root``."""
        dataset = str(root / self.dataset) if self.dataset.endswith(".npz") else self.dataset
        return TrainSettings(
            dataset=dataset,
            model=self.model.replace("weights=", f"weights={root / 'weights'}/"),
            defence=self.defence,
            partition=self.partition,
            seed=self.seed,
            rounds=self.rounds,
            eval_every=self.rounds,
            aggregation="secure" if "at=sum" in self.defence else "none",
        )


def veiled(dataset: str, mu: int, partition: str = EVEN, model: str = "patches", rounds: int = 60) -> list[Case]:
    """Return the trainings of one figure, one per seed."""
    return [Case(dataset, model, f"veil:mu={mu},at=sum", partition, seed, rounds) for seed in SEEDS]


CASES = [
    Case(MNIST, "patches", QUIET),
    *(Case(MNIST, "patches", f"veil:mu={mu},at=sum") for mu in (1, 3)),
    Case(CIFAR, "patches", QUIET),
    *veiled(CIFAR, 3),
    Case(MNIST, "lenet5", "none", rounds=10),
    Case(CIFAR, "lenet5", "none", rounds=20),
    *veiled(MNIST, 1),
    *veiled(MNIST, 3),
    *veiled(CIFAR, 3, UNEVEN),
    *veiled(MNIST, 1, UNEVEN),
    Case(SVHN, FROZEN, QUIET),
    Case(SVHN, FROZEN, "veil:mu=3,at=sum"),
    Case(SVHN, "patches", QUIET),
    Case(SVHN, "patches", "veil:mu=3,at=sum"),
    *veiled(MNIST, 3, UNEVEN),
    *veiled(SVHN, 3, model=FROZEN),
    *veiled(SVHN, 3),
    Case(MNIST, "patches", QUIET, rounds=240),
    Case(MNIST, "patches", "veil:mu=1,at=sum", rounds=240),
]
"""Without noise nothing of veil is random: its sum is that of all images, whoever has them. One training is enough."""


class Remembered:
    """Features of all images seen so far, so that other seeds and later runs do not compute them again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, dict[str, dict[int, tuple[int, Tensor]]]()

    def __call__(self, network: nn.Module, trunk: Trunk, images: Tensor) -> FeatureMemo:
        """Return what `learn_features` does."""
        known, numbers = self._of(trunk.fingerprint), image_hashes(images).tolist()
        if not all(number in known for number in numbers):
            learned = learn_features(network, trunk, images)
            file = self._folder / trunk.fingerprint[:16] / f"{len(known)}.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save((numbers, learned.keys, learned.features), file)
            known |= dict(zip(numbers, zip(learned.keys.tolist(), learned.features, strict=True), strict=True))
        keys, features = zip(*(known[number] for number in numbers), strict=True)
        return FeatureMemo(torch.tensor(keys), torch.stack(features))

    def _of(self, fingerprint: str) -> dict[int, tuple[int, Tensor]]:
        """Return the features of a trunk by the images' hashes; only one trunk's are kept in memory."""
        if fingerprint not in self._known:
            self._known.clear()
            self._known[fingerprint] = found = {}
            for file in (self._folder / fingerprint[:16]).glob("*.pt"):
                numbers, keys, features = torch.load(file)
                found |= dict(zip(numbers, zip(keys.tolist(), features, strict=True), strict=True))
        return self._known[fingerprint]


def trained(case: Case, root: Path) -> dict[str, Any]:
    """Train in this process; return the figures of the last row, and the median computing time of later rounds."""
    with Simulation(case.settings(root), workers=0, data_root=root) as simulation:
        simulation.clock = time.process_time
        rows = list(simulation.run())
        images = sum(simulation.sizes)
    last = {key: rows[-1].get(key) for key in ("accuracy", "loss", "mu", "epsilon", "delta", "identified_bound")}
    later = statistics.median(row["seconds"] for row in rows[1:])
    return asdict(case) | last | {"images": images, "round_seconds": later}


def mean(document: dict[str, Any], **wanted: object) -> float | None:
    """Return the mean accuracy of the trainings with these settings, or None if there are none."""
    found = [row["accuracy"] for row in chosen(document, **wanted)]
    return statistics.fmean(found) if found else None


def chosen(document: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    """Return the trainings with these settings."""
    return [row for row in document["trainings"] if all(row[key] == value for key, value in wanted.items())]


def table(document: dict[str, Any]) -> str:
    """Return the result as the table of docs/defences.md."""
    lines = [
        "| data | clients | rounds | frozen part | no noise | μ = 1 | points lost | μ = 3 | points lost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    places = dict.fromkeys(
        (row["dataset"], row["partition"], row["rounds"], row["model"])
        for row in document["trainings"]
        if row["defence"] != "none" and row["defence"] != QUIET
    )
    for dataset, partition, rounds, model in places:
        same = {"dataset": dataset, "rounds": rounds, "model": model}
        plain = mean(document, defence=QUIET, **same)
        images = chosen(document, **same)[0]["images"]
        cells = [f"{dataset.removesuffix('.npz')}, {images:,}", partition.partition(":")[0], str(rounds), _short(model)]
        cells.append("" if plain is None else f"{plain:.2%}")
        for mu in (1, 3):
            rows = chosen(document, partition=partition, defence=f"veil:mu={mu},at=sum", **same)
            noisy = statistics.fmean(row["accuracy"] for row in rows) if rows else None
            cells.append("" if noisy is None else f"{noisy:.2%}" + ("" if len(rows) == len(SEEDS) else " (one seed)"))
            cells.append("" if noisy is None or plain is None else f"{100 * (plain - noisy):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gaps(document: dict[str, Any]) -> str:
    """Return the undefended networks beside the heads, and the times, as the list of docs/defences.md."""
    lines = []
    for row in chosen(document, defence="none"):
        heads = chosen(document, dataset=row["dataset"], defence="veil:mu=3,at=sum", partition=EVEN, rounds=60)
        head = statistics.fmean(one["accuracy"] for one in heads)
        cost = statistics.median(one["round_seconds"] for one in heads)
        gap = 100 * (row["accuracy"] - head)
        lines.append(
            f"- {row['dataset']}: {row['model']} without a defence has {row['accuracy']:.2%} after {row['rounds']} "
            f"rounds of FedAvg, {abs(gap):.1f} points {'more' if gap > 0 else 'less'} than veil at μ = 3. A round "
            f"costs {row['round_seconds']:.2f} s of computing, one of veil {cost:.2f} s."
        )
    return "\n".join(lines)


def _short(model: str) -> str:
    return "resnet20, trained on CIFAR-10" if model == FROZEN else model


def main() -> None:
    """Run the trainings that are not in the file yet, and write it after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--features", type=Path, default=Path("runs/features"), help="Folder for features.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Begin no training after this much time.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    feature_store.learn_features = Remembered(given.features)  # type: ignore[assignment]
    document: dict[str, Any] = {
        "command": "python benchmarks/veil_targets.py --data-root DATA --out results/veil-targets.json",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"gradveil": version("gradveil"), "torch": torch.__version__},
        "settings": "10 clients, one thread; seconds are computing time per round, the median without the first",
        "trainings": json.loads(given.out.read_text())["trainings"] if given.out.exists() else [],
    }
    for case in CASES:
        if time.process_time() > given.seconds or chosen(document, **asdict(case)):
            continue
        document["trainings"].append(row := trained(case, given.data_root))
        write_atomic(given.out, (json.dumps(document, indent=1) + "\n").encode())
        print(f"{time.process_time():.0f} s", row, flush=True)


if __name__ == "__main__":
    main()
