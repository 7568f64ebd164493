"""Measure what learned inversion (lti) and exact recovery (spear, cpa) find, in what time and memory.

::

    python benchmarks/learned_and_exact.py --data-root DIR       # CIFAR-10 in DIR; writes results and page
    python benchmarks/learned_and_exact.py --data-root DIR --only spear     # keeps the figures of all other attacks
    python benchmarks/learned_and_exact.py --page                # only write the page again from the results

Private images are test images of the named data set; settings were chosen on training images. Every case runs in a
process of its own with one thread: CPU seconds of the attack alone, and the most memory that it added.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import create_model, load_dataset
from gradveil.attacks import build_attack
from gradveil.data import Dataset
from gradveil.data.pixels import to_batch
from gradveil.federated.protocol import Protocol
from gradveil.metrics import align
from gradveil.metrics.psnr import Psnr
from gradveil.metrics.ssim import Ssim
from gradveil.models import Normalisation
from gradveil.randomness import stream
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "learned-and-exact.json", ROOT / "docs" / "batches.md"
SEEDS = [0, 1]
PUBLIC = 2000
"""Training images that an attacker who learns has."""
EXACT_DB, CLEAR_SSIM = 60, 0.5
"""PSNR above which an image counts as exact, and SSIM above which it is recognisable."""
TRAINING_STEPS, TRAINING_BATCH, TRAINING_RATE = 300, 64, 0.05
"""Steps of SGD with which a trained network was trained, on training images."""


@dataclass(frozen=True)
class Case:
    """One line of the page.

    Attributes:
        attack: its spec.
        dataset: name of the data set.
        model: its spec.
        images: images per client.
        clients: clients, each with an update of its own.
        secure: whether the server sees only the sum of their updates.
        trained: whether the network was trained before.
        labels: whether the attacker knows the labels.
    """

    attack: str
    dataset: str
    model: str
    images: int
    clients: int = 1
    secure: bool = False
    trained: bool = False
    labels: bool = False


CASES = [
    Case("lti", "mnist-5k", "lenet-dlg", 1, clients=8, labels=True),
    Case("lti", "cifar10", "lenet-dlg", 1, clients=8, labels=True),
    Case("spear", "mnist-5k", "mlp", 8),
    Case("spear", "mnist-5k", "mlp", 16),
    Case("spear", "mnist-5k", "mlp", 25),
    Case("spear", "mnist-5k", "mlp", 25, trained=True),
    Case("cpa", "mnist-5k", "mlp", 64, trained=True),
    Case("cpa", "cifar10", "mlp", 64),
    Case("cpa", "cifar10", "mlp", 64, trained=True),
    Case("cpa", "cifar10", "mlp", 8, clients=8, secure=True),
    Case("cpa", "cifar10", "mlp", 128),
    Case("cpa", "cifar10", "mlp:activation=tanh", 64),
    Case("cpa:relu=false", "cifar10", "mlp", 64),
    Case("cpa:way=published,relu=false", "cifar10", "mlp", 64),
    Case("cpa", "cifar10", "mlp:hidden=1024", 256),
    Case("cpa", "mnist-5k", "lenet5", 16),
    Case("cpa", "cifar10", "lenet5", 16),
]


# --- one case ---------------------------------------------------------------------------------------------------------


def measure(case: Case, seed: int, root: Path) -> dict[str, Any]:
    """Play the clients, attack, and return figures, CPU seconds and memory."""
    torch.set_num_threads(1)
    data = load_dataset(case.dataset, None if case.dataset == "mnist-5k" else root)
    network = create_model(case.model, data.shape, data.num_classes, seed, Normalisation(data.mean, data.std)).eval()
    if case.trained:
        train(network, data, seed)
    count = case.images * case.clients
    order = torch.randperm(len(data.test.labels), generator=stream(seed, "private"))[:count].numpy()
    private = to_batch(data.test.images[order], data.test.labels[order])
    knows = ["num-examples", *["labels"] * case.labels, *["public-data"] * case.attack.startswith("lti")]
    seen = observe(
        network,
        [private[slice(start, start + case.images)] for start in range(0, count, case.images)],
        threat=ThreatModel.of(*knows),
        num_classes=data.num_classes,
        protocol=Protocol(aggregation="secure") if case.secure else None,
        public=PublicKnowledge(_training_images(data, PUBLIC, seed)),
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kib("VmRSS")
    begin = time.process_time()
    found = build_attack(case.attack)(seen, stream(seed, "attack"))
    seconds = time.process_time() - begin
    facts = {"seed": seed, "seconds": round(seconds, 2), "mib": (_kib("VmHWM") - before) >> 10}
    told = {"converged": found.converged.double().mean().item(), "why": found.why[0]}
    return facts | figures(private.images.view(len(found.images), -1, *data.shape), found.images) | told


def _kib(name: str) -> int:
    """Return memory of this process: VmRSS is what it takes now, VmHWM the most that it took."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def train(network: nn.Module, data: Dataset, seed: int) -> None:
    """Train on random batches of training images."""
    images, rng = _training_images(data, len(data.train.labels), seed), stream(seed, "training")
    optimiser = torch.optim.SGD(network.parameters(), TRAINING_RATE, momentum=0.9)
    for _ in range(TRAINING_STEPS):
        some = torch.randint(len(images), (TRAINING_BATCH,), generator=rng)
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(images.images[some]), images.labels[some]).backward()
        optimiser.step()
    network.zero_grad()


def _training_images(data: Dataset, count: int, seed: int) -> Batch:
    some = torch.randperm(len(data.train.labels), generator=stream(seed, "public"))[:count].numpy()
    return to_batch(data.train.images[some], data.train.labels[some])


def figures(truth: Tensor, guess: Tensor) -> dict[str, Any]:
    """Return mean figures of all images (T, B, C, H, W), matched to the truth, and shares of exact and clear ones."""
    whole, matched = truth.flatten(0, 1), torch.cat([align(*pair) for pair in zip(truth, guess, strict=True)])
    psnr, ssim = Psnr()(whole, matched), Ssim()(whole, matched)  # NaN without a guess
    return {
        "images": len(whole),
        "guesses": int(psnr.isfinite().sum()),
        "psnr": _rounded(psnr.nanmean().item(), 2),
        "ssim": _rounded(ssim.nanmean().item(), 4),
        "above_60_db": int((psnr > EXACT_DB).sum()) / len(whole),
        "recognisable": int((ssim > CLEAR_SSIM).sum()) / len(whole),
    }


def _rounded(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


# --- all cases --------------------------------------------------------------------------------------------------------


def measure_all(root: Path, workers: int, only: str) -> dict[str, Any]:
    """Measure each case in a process of its own, some at a time; of ``only`` one attack, if it is named."""
    old = json.loads(RESULTS.read_text())["rows"] if only else [{}] * len(CASES)

    def row(number: int) -> dict[str, Any]:
        case = CASES[number]
        return asdict(case) | {"seeds": _child(number, root)} if case.attack.startswith(only) else old[number]

    with ThreadPoolExecutor(workers) as pool:
        rows = list(pool.map(row, range(len(CASES))))
    return {
        "command": f"python benchmarks/learned_and_exact.py --data-root DIR --workers {workers}",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seeds": SEEDS,
        "rows": rows,
    }


def _child(number: int, root: Path) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--data-root", str(root), "--one", str(number)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(CASES[number], said, flush=True)
    found: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """Return docs/batches.md."""
    seeds = ", ".join(map(str, results["seeds"]))
    head = f"""# Batches

What learned inversion (`lti`) and exact recovery (`spear`, `cpa`) find of private images, in what time and memory. Made
from `results/learned-and-exact.json` by `benchmarks/learned_and_exact.py`; a test checks that they agree. Measured
{results["date"]} with Python {results["python"]}, torch {results["torch"]}: `{results["command"]}`.

Private images are test images; every update is one local step on all images of a client. Means over seeds {seeds}. The
attacker knows the number of images, and for `lti` the labels and {PUBLIC:,} public images. Networks have initial
weights, or those after {TRAINING_STEPS} steps of SGD where it says trained. Time is CPU time of one thread, of the
attack alone, beside other work; memory is the most that the attack added to that of the process. "Exact" counts images
above {EXACT_DB} dB, "recognisable" those with SSIM above {CLEAR_SSIM}; "converged" is the share of updates of which the
attack itself says so: `spear` and `cpa` only if they believe every image of a batch to be exact.

| attack | data | network | images | PSNR | SSIM | exact | recognisable | converged | seconds | MiB |
|---|---|---|---|---|---|---|---|---|---|---|
"""
    return head + "\n".join(_line(row) for row in results["rows"]) + "\n" + _notes()


def _line(row: Mapping[str, Any]) -> str:
    seeds = row["seeds"]

    def mean(key: str) -> float | None:
        values = [one[key] for one in seeds if one[key] is not None]
        return statistics.fmean(values) if values else None

    def shown(key: str, form: str) -> str:
        value = mean(key)
        return "-" if value is None else format(value, form)

    network = f"`{row['model']}`" + (", trained" if row["trained"] else "")
    several = f" of each of {row['clients']} clients, " + ("summed" if row["secure"] else "each update alone")
    images = f"{row['images']}{several if row['clients'] > 1 else ''}"
    shares = [f"{100 * (mean(key) or 0):.0f} %" for key in ("above_60_db", "recognisable", "converged")]
    cells = [f"`{row['attack']}`", row["dataset"], network, images, shown("psnr", ".1f"), shown("ssim", ".2f"), *shares]
    cells += [shown("seconds", ".1f"), f"{max(one['mib'] for one in seeds):,}"]
    return "| " + " | ".join(cells) + " |"


def _notes() -> str:
    return """
- PSNR is capped at 100 dB. `spear` and `cpa` compute in double precision.
- Behind a ReLU, `cpa` is exact if clearly more neurons are off for every image than the batch has images, so if the
  layer is about three times as wide as the batch is large. Otherwise it stays an estimate, as for other activations
  (`tanh`) or with `relu=false`.
- Training leaves fewer neurons off for some images, and errors of images that are classified confidently drown in
  rounding.
- `cpa:way=published` is the paper's objective with the authors' weights, which they chose for larger images.
- Through convolutions (`lenet5`) features are recovered, and images are searched that have them: max-pooling has thrown
  away the rest.
- A batch as large as the layer is wide, several local steps, or an update with NaN have no guess, and `why` in the row
  says so.
"""


def main() -> None:
    """Measure all cases, or one, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="name of the attack to measure again")
    parser.add_argument("--workers", type=int, default=1, help="cases at a time")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps([measure(CASES[options.one], seed, options.data_root) for seed in SEEDS]))
        return
    if not options.page:
        RESULTS.write_text(json.dumps(measure_all(options.data_root, options.workers, options.only), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
