"""Measure what noise and pruning leave of images under the imprint, with rows of several sizes.

As in DCS2's Table 2: 10 bins, dct query of frequency 0, one image per update, an untrained resnet18 on Tiny-ImageNet at
64x64; and a batch of 64 digits in 128 bins before an untrained lenet5, with public digits. The attacker does not know
the defence. Run from the root of the repository: python benchmarks/imprint_strength.py --data FOLDER
"""

import argparse
import hashlib
import json
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch

from gradveil import create_model, load_dataset
from gradveil.attacks import Scene, build_attack
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.metrics import align, score_targets
from gradveil.models import Normalisation
from gradveil.randomness import stream
from gradveil.reproduce.base import Lab
from gradveil.reproduce.dcs2 import IMPRINT
from gradveil.reproduce.dcs2_attacks import attack_case, make_case
from gradveil.reproduce.dcs2_training import TASKS, load_images, partition_of
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe

DEFENCES = [
    "none",
    "gaussian:std=0.5,where=gradient",
    "prune:fraction=0.5,where=gradient",
    "prune:fraction=0.7,where=gradient",
]
GAINS = [1e-3, 1e-5, 1e-8]
"""Sizes of the rows: the authors' (with our slight shift behind it), one between, and the attack's default."""
SEEDS, IMAGES, BATCH = [0, 1], 4, 64


def tiny(data: Path, seed: int) -> list[dict[str, object]]:
    """Return a row per size and defence for single images of Tiny-ImageNet."""
    lab, task = Lab(Path("unused"), "small", seed=seed, data_root=data, workers=0), TASKS["tiny"]
    images = load_images(lab, task)
    case = make_case(images, task.model(lab), partition_of(lab, task, images), IMAGES, seed)
    rows = []
    for gain in GAINS:
        for defence in DEFENCES:
            guess = attack_case(case, defence, f"{IMPRINT},gain={gain}", adaptive=False, seed=seed)
            rows.append(_row("tiny-imagenet", gain, defence, seed, case.truth, guess))
    return rows


def digits(seed: int) -> list[dict[str, object]]:
    """Return a row per size and defence for a batch of digits."""
    data = load_dataset("mnist-5k")
    order = torch.randperm(len(data.train.labels), generator=torch.Generator().manual_seed(seed)).numpy()
    mine, other = order[:BATCH], order[BATCH : BATCH + 500]
    private, public = (to_batch(data.train.images[some], data.train.labels[some]) for some in (mine, other))
    rows = []
    for gain in GAINS:
        attack = build_attack(f"imprint:gain={gain}")
        scene = Scene(data.shape, data.num_classes, public)
        for defence in [*DEFENCES, "dp-sgd"]:
            network = create_model("lenet5", data.shape, data.num_classes, seed, Normalisation(data.mean, data.std))
            seen = observe(
                network.eval(),
                [private],
                threat=ThreatModel.of("num-examples", "alters-model", "public-data"),
                num_classes=data.num_classes,
                defence=build_defence(defence),
                public=PublicKnowledge(public),
                federation=Federation(
                    seed=seed,
                    alter=lambda net, attack=attack, scene=scene: attack.alter(net, scene, stream(seed, "alter")),
                ),
            )
            guess = attack(seen, stream(seed, "attack")).images
            rows.append(_row("mnist-5k", gain, defence, seed, private.images[None], guess))
    return rows


def _row(
    dataset: str, gain: float, defence: str, seed: int, truth: torch.Tensor, guess: torch.Tensor
) -> dict[str, object]:
    matched = torch.stack([align(*pair) for pair in zip(truth, guess, strict=True)])
    figures, _ = score_targets(truth, matched, None)
    facts: dict[str, object] = {"dataset": dataset, "gain": gain, "defence": defence, "seed": seed}
    for name in ("psnr", "ssim"):
        values = [row[name] for row in figures if row[name] is not None]
        facts[name] = round(statistics.fmean(values), 3) if values else None
    print(facts, flush=True)
    return facts


def main() -> None:
    """Measure and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/imprint-strength.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for seed in SEEDS for row in tiny(options.data, seed) + digits(seed)]
    stored = options.data / "tiny-imagenet-1600.npz"
    facts = {
        "command": "python benchmarks/imprint_strength.py --data FOLDER",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seeds": SEEDS,
        "images": f"{IMAGES} of Tiny-ImageNet one by one, {BATCH} digits in one batch",
        "sha256": {stored.name: hashlib.sha256(stored.read_bytes()).hexdigest()},
    }
    options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
