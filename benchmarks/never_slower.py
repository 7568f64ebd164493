"""Compare the step of gradient matching with a plain autograd loop, over all networks and sizes of batches.

::

    python benchmarks/never_slower.py --out results/never-slower.json     (continues what an earlier call has measured)

A step is what every search repeats: the gradient that guessed images would have caused, its cosine distance from the
one seen, and the derivative of the distance by the images. *gradveil* computes it with `example_gradients`, *loop*
target by target with `torch.autograd.grad`. Both take turns in one process with one thread; the time is CPU time, and
the least of the repeats counts, so that other load on the machine matters little. Sizes whose loop would take longer
than ``--longest`` seconds per step are left out and listed.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil import create_model
from gradveil.heap import keep_freed_memory
from gradveil.networks.grads import example_gradients
from gradveil.networks.work import work_per_example

MODELS = (
    "logistic", "mlp", "lenet-dlg", "lenet5", "convnet:width=32", "resnet20", "resnet32", "resnet18", "resnet34",
    "vgg16", "densenet121",
)  # fmt: skip
TARGETS, IMAGES, SHAPE, CLASSES = (1, 8, 32), (1, 8, 32), (3, 32, 32), 10
RATE = 2e10
"""Multiplications per second that a loop roughly reaches on one core, to estimate its time beforehand."""
PASSES = 9
"""Multiplications of a step for each one of a forward pass, roughly."""


def distance(gradients: list[Tensor], wanted: list[Tensor]) -> Tensor:
    """Return one cosine distance per target."""
    pairs = [(ours.flatten(1), theirs.flatten(1)) for ours, theirs in zip(gradients, wanted, strict=True)]
    product = sum((ours * theirs).sum(1) for ours, theirs in pairs)
    lengths = [sum(pair[side].square().sum(1) for pair in pairs) for side in (0, 1)]
    return 1 - product / torch.sqrt(lengths[0] * lengths[1])


def ours(network: nn.Module, images: Tensor, labels: Tensor, size: int, wanted: list[Tensor]) -> Tensor:
    """Return the derivative of all distances by the images, all targets together."""
    leaf = images.detach().requires_grad_()
    found = example_gradients(network, leaf, labels, group_size=size, create_graph=True)
    return torch.autograd.grad(distance(list(found.values()), wanted).sum(), leaf)[0]


def loop(network: nn.Module, images: Tensor, labels: Tensor, size: int, wanted: list[Tensor]) -> Tensor:
    """Return the same, target by target, by plain autograd."""
    weights, found = list(network.parameters()), []
    for target, (some, own) in enumerate(zip(images.split(size), labels.split(size), strict=True)):
        leaf = some.detach().requires_grad_()
        gradients = torch.autograd.grad(F.cross_entropy(network(leaf), own), weights, create_graph=True)
        seen = [tensor[target : target + 1] for tensor in wanted]
        found += torch.autograd.grad(distance([one[None] for one in gradients], seen).sum(), leaf)
    return torch.cat(found)


def measured(model: str, targets: int, size: int, repeats: int, longest: float) -> dict[str, Any]:
    """Return one line: milliseconds per step and target, and how far the results are apart."""
    network = create_model(model, SHAPE, CLASSES, seed=0).eval()
    rng = torch.Generator().manual_seed(1)
    images = torch.rand(targets * size, *SHAPE, generator=rng)
    labels = torch.randint(CLASSES, (targets * size,), generator=rng)
    line: dict[str, Any] = {"model": model, "targets": targets, "images": size}
    if work_per_example(network, images[:1]) * PASSES * targets * size / RATE > longest:
        return line | {"why": "left out: a step of the loop takes too long"}
    wanted = [torch.randn(targets, *weight.shape, generator=rng) for weight in network.parameters()]
    times: dict[str, list[float]] = {"gradveil": [], "loop": []}
    contenders: dict[str, Callable[..., Tensor]] = {"gradveil": ours, "loop": loop}
    results = {name: contender(network, images, labels, size, wanted) for name, contender in contenders.items()}
    for _ in range(repeats):
        for name, contender in contenders.items():
            started = time.process_time()
            contender(network, images, labels, size, wanted)
            times[name].append((time.process_time() - started) / targets * 1e3)
    apart = float((results["gradveil"] - results["loop"]).norm() / results["loop"].norm())
    least = {name: round(min(some), 3) for name, some in times.items()}
    ratios = sorted(theirs / mine for mine, theirs in zip(*times.values(), strict=True))
    return line | least | {
        "ratio": round(least["loop"] / least["gradveil"], 2),
        "ratios": [round(ratios[0], 2), round(ratios[-1], 2)],
        "apart": float(f"{apart:.1e}"),
    }  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """Return the table of docs/performance.md: speed against the loop, by network, targets and images per target."""
    sizes = [(targets, size) for size in IMAGES for targets in TARGETS]
    lines = ["| network | " + " | ".join(f"{targets} x {size}" for targets, size in sizes) + " |"]
    lines.append("|---" * (1 + len(sizes)) + "|")
    found = {(line["model"], line["targets"], line["images"]): line.get("ratio") for line in document["figures"]}
    for model in MODELS:
        cells = [found.get((model, *size)) for size in sizes]
        lines.append(f"| `{model}` | " + " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure all sizes, small ones first, and write the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=float, default=1.5, help="Seconds of a step of the loop, at most.")
    parser.add_argument("--out", type=Path, default=Path("results/never-slower.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    document: dict[str, Any] = {
        "command": f"python benchmarks/never_slower.py --repeats {options.repeats} --longest {options.longest:g}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"gradveil": version("gradveil"), "torch": torch.__version__, "python": platform.python_version()},
        "settings": "images 3x32x32, 10 classes, one thread, CPU time, least of the repeats, seed 0 and 1",
        "figures": json.loads(options.out.read_text())["figures"] if options.out.exists() else [],
    }
    done = {(line["model"], line["targets"], line["images"]) for line in document["figures"]}
    for model in MODELS:
        for targets in TARGETS:
            for size in IMAGES:
                if (model, targets, size) not in done:
                    document["figures"].append(measured(model, targets, size, options.repeats, options.longest))
                    print(document["figures"][-1], flush=True)
                    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
