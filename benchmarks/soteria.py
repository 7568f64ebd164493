"""Measure time and quality of Soteria's feature ranking: loops of backward passes, batched products, random probes.

The network is an untrained convnet in evaluation mode on 3x32x32 images (padded digits of mnist-5k). Every contender
computes the norm of each row of the Jacobian of the last layer's input, 2,304 features at the default width:

- the authors' loop: one `backward` per feature, which also computes the gradients of all weights;
- the plain loop: one `torch.autograd.grad` per feature, with respect to the images only; the baseline of all speed-ups;
- exact: the defence with `probes=0`, which batches the same products;
- N probes: the defence with N forward-mode products.

A loop does the same work for every feature, so it is timed on some features, and the time is scaled to all of them. All
contenders take turns in one process, except exact, which runs once and is the reference for all scores. Quality is
Spearman's correlation of the scores |r| / norm, and the share of the pruned features that the exact ranking also
prunes. In a ReLU network half of the features are zero and carry no information, so both are also given for the other
(live) features only. `r alone` is the quality of a ranking without any Jacobian.

    python benchmarks/soteria.py [--model convnet] [--images 1] [--features 48] [--rounds 3] [--prune 0.5]
                                 [--probes 16,32,64,128,256] [--threads 2] [--json FILE]

A quick run: `--model convnet:width=16 --rounds 1`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from gradveil import create_model, load_dataset
from gradveil.data.pixels import to_unit
from gradveil.defences.soteria import Soteria, feature_scores
from gradveil.networks.grads import layer_inputs

SHAPE, CLASSES, SEED = (3, 32, 32), 10, 0


def look(model: str, images: int) -> tuple[nn.Module, str, Tensor]:
    """Return the network, the name of its last Linear layer, and the images."""
    digits = load_dataset("mnist-5k").train
    pixels = F.pad(to_unit(digits.images[:images]), (2, 2, 2, 2)).expand(-1, *SHAPE)
    network = create_model(model, SHAPE, CLASSES, seed=SEED).eval()
    return network, [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)][-1], pixels


def plain_loop(network: nn.Module, layer: str, images: Tensor, features: list[int]) -> Tensor:
    """Return the norms of the given features, (N, features), by one backward pass to the images for each."""
    leaf = images.clone().requires_grad_()
    inputs = layer_inputs(network, [layer], leaf)[0]
    columns = []
    for feature in features:
        (slope,) = torch.autograd.grad(inputs[:, feature].sum(), leaf, retain_graph=True)
        columns.append(slope.flatten(1).norm(dim=1))
    return torch.stack(columns, 1)


def authors_loop(network: nn.Module, layer: str, images: Tensor, features: list[int]) -> None:
    """Compute norms as in the authors' code: `backward` with a one-hot cotangent, then clear all gradients."""
    leaf = images.clone().requires_grad_()
    inputs = layer_inputs(network, [layer], leaf)[0]
    cotangent = torch.zeros_like(inputs)
    for feature in features:
        cotangent[:, feature] = 1
        inputs.backward(cotangent, retain_graph=True)
        leaf.grad.flatten(1).norm(dim=1)
        network.zero_grad()
        leaf.grad.zero_()
        cotangent[:, feature] = 0


def seconds(run: Callable[[], object]) -> float:
    """Return the wall-clock time of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def overlap(one: Tensor, other: Tensor, share: float) -> float:
    """Return the share of one image's top-ranked features that both rankings have in common."""
    count = round(share * len(one))
    tops = [set(scores.argsort(descending=True, stable=True)[:count].tolist()) for scores in (one, other)]
    return len(tops[0] & tops[1]) / count


def quality(inputs: Tensor, exact: Tensor, norms: Tensor, share: float) -> list[float]:
    """Return means over images: Spearman's correlation (live features), overlap of all and of live ones, norm error."""
    rows = []
    for r, one, other in zip(inputs, exact, norms, strict=True):
        truth, guess, live = feature_scores(r, one), feature_scores(r, other), r != 0
        rows.append(
            [
                float(spearmanr(truth[live].numpy(), guess[live].numpy()).statistic),
                overlap(truth, guess, share),
                overlap(truth[live], guess[live], share),
                float((other / one - 1)[live].square().mean().sqrt()),
            ]
        )
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all contenders, and return one row for each."""
    network, layer, images = look(options.model, options.images)
    with torch.no_grad():
        inputs = layer_inputs(network, [layer], images)[0]
    size = inputs.shape[1]
    some = torch.linspace(0, size - 1, min(options.features, size)).long().tolist()
    dead = float((inputs == 0).float().mean())
    print(
        f"{options.model}, {options.images} images, {size} features ({dead:.0%} zero), {options.threads} threads on "
        f"{os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}, torch {torch.__version__}; "
        f"{options.rounds} rounds, loops timed on {len(some)} features.\n"
    )
    found: dict[str, Tensor] = {}

    def ranked(name: str, probes: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        found[name] = Soteria(probes=probes)._row_norms(network, [layer], images, [size], rng)[0]

    ranked("r alone", 1, 0)  # warm-up: torch prepares forward mode in its first call
    found["r alone"] = torch.ones_like(inputs)
    times: dict[str, list[float]] = {"exact": [seconds(lambda: ranked("exact", 0, 0))]}
    torch.testing.assert_close(plain_loop(network, layer, images, some), found["exact"][:, some], rtol=1e-3, atol=1e-6)
    scores: dict[str, list[list[float]]] = {}
    for number in range(options.rounds):
        runs = {
            "authors' loop": lambda: authors_loop(network, layer, images, some),
            "plain loop": lambda: plain_loop(network, layer, images, some),
        }
        for name, run in runs.items():
            times.setdefault(name, []).append(seconds(run) * size / len(some))
        for probes in options.probes:
            name = f"{probes} probes"
            times.setdefault(name, []).append(seconds(lambda n=name, p=probes, s=number: ranked(n, p, s)))
            scores.setdefault(name, []).append(quality(inputs, found["exact"], found[name], options.prune))
    scores["r alone"] = [quality(inputs, found["exact"], found["r alone"], options.prune)]
    scores["exact"] = [[1.0, 1.0, 1.0, 0.0]]
    order = ["authors' loop", "plain loop", "exact", "r alone", *(f"{probes} probes" for probes in options.probes)]
    return [{"name": name, "seconds": times.get(name, []), "quality": scores.get(name, [])} for name in order]


def print_rows(rows: list[dict[str, object]], prune: float) -> None:
    """Print a Markdown table."""
    base = statistics.median(next(row["seconds"] for row in rows if row["name"] == "plain loop"))
    head = "contender | s (median; range) | speed-up | Spearman, live | same pruned, "
    head += f"{prune:.0%} of all | of live | norm error"
    print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row in rows:
        times, marks = row["seconds"], ["-"] * 4
        clock, speed = "0", "-"
        if times:
            clock = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
            speed = f"{base / statistics.median(times):.1f}"
        if row["quality"]:
            rho, of_all, of_live, error = (statistics.mean(column) for column in zip(*row["quality"], strict=True))
            marks = [f"{rho:.3f}", f"{of_all:.1%}", f"{of_live:.1%}", f"{error:.1%}"]
        if row["name"] == "r alone":
            marks[3] = "-"
        print(f"| {' | '.join([row['name'], clock, speed, *marks])} |")


def main() -> None:
    """Read the options, measure, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="convnet")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--features", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prune", type=float, default=0.5)
    parser.add_argument(
        "--probes", type=lambda text: [int(part) for part in text.split(",")], default="16,32,64,128,256"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options)
    print_rows(rows, options.prune)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
