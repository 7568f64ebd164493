"""Measure how often the tripwire raises an alarm on altered and on honest models, in one run.

Honest models: several architectures, seeds, initialisations and normalisations, untrained and after 1 and 3 epochs on
2,000 images at two learning rates; any finding is a false alarm. Altered models: the published imprint and trap
weights, and milder versions that a careful server might try: fewer rows, noise on the rows, permuted rows, a gain per
row, only half of the rows of a layer, random queries. One-shot imprints (a ramp, or two rows of a network's own first
layer) have public images, because a bin that no image of the client reaches reads nothing. The client does not know the
architecture here; if it did, it would notice every inserted layer. Each model is inspected with 256 images of one
client.

    python benchmarks/tripwire.py [--datasets mnist-5k] [--seeds 3] [--first-seed 0] [--data FOLDER] [--quick]
                                  [--kinds imprint one-shot trap-weights honest saturated] [--json FILE]

FOLDER holds the data sets (as GRADVEIL_DATA does). `--quick` takes one seed.
"""

import argparse
import copy
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gradveil import create_model, load_dataset
from gradveil.attacks.base import Scene, build_attack
from gradveil.data import Dataset
from gradveil.data.pixels import to_unit
from gradveil.engines.tripwire import inspect
from gradveil.models.base import Normalisation
from gradveil.types import Batch

HONEST = [
    "mlp",
    "mlp:hidden=64",
    "mlp:hidden=500/100",
    "mlp:activation=sigmoid",
    "mlp:init=uniform",
    "logistic",
    "lenet-dlg",
    "lenet5",
    "lenet5:activation=tanh",
    "convnet:width=8",
]
UNTRAINED_ONLY = ["resnet20", "lenet5:init=uniform"]
BOUNDED = {"mlp, Hardtanh": ("mlp", nn.Hardtanh), "mlp, ReLU6": ("mlp", nn.ReLU6)}
"""Honest models whose activations are constant on both sides, as the ramp of a one-shot imprint is."""
SATURATED = {f"mlp:init=uniform, {kind.__name__}": ("mlp:init=uniform", kind) for kind in (nn.Hardtanh, nn.ReLU6)}
"""The same with large weights, so that most images are on the constant sides: the ramp's known false alarms."""
KINDS = ["imprint", "one-shot", "trap-weights", "honest", "saturated"]
RATES = [0.05, 0.01]
Change = Callable[[nn.Linear, torch.Generator], None]


def batch(dataset: Dataset, first: int, count: int) -> Batch:
    """Return ``count`` training images from ``first`` on."""
    images = to_unit(dataset.train.images[first : first + count])
    labels = torch.from_numpy(dataset.train.labels[first : first + count])
    return Batch(images, labels, torch.zeros(len(labels), dtype=torch.bool))


def train(network: nn.Module, data: Batch, epochs: int, lr: float, rng: torch.Generator) -> nn.Module:
    """Train the network in place by SGD with momentum 0.9 and batches of 32, and return it."""
    optimiser = torch.optim.SGD(network.parameters(), lr, momentum=0.9)
    network.train()
    for _ in range(epochs):
        for some in torch.randperm(len(data), generator=rng).split(32):
            optimiser.zero_grad()
            F.cross_entropy(network(data.images[some]), data.labels[some]).backward()
            optimiser.step()
    return network.eval()


def honest(
    spec: str, dataset: Dataset, data: Batch, seeds: range, activation: type[nn.Module] | None = None
) -> Iterator[nn.Module]:
    """Yield an untrained model, and the same at several points of its training; odd seeds do not normalise.

    ``activation`` replaces the model's own.
    """
    for seed in seeds:
        normalisation = Normalisation(dataset.mean, dataset.std) if seed % 2 == 0 else None
        start = create_model(spec, dataset.shape, dataset.num_classes, seed, normalisation)
        for name in [name for name, layer in start.named_modules() if isinstance(layer, nn.ReLU)] if activation else []:
            start.set_submodule(name, activation())
        yield start.eval()
        rng = torch.Generator().manual_seed(seed)
        for lr in RATES if spec not in UNTRAINED_ONLY else []:
            network = train(copy.deepcopy(start), data, 1, lr, rng)
            yield network
            yield train(network, data, 2, lr, rng)


def noisy(share: float) -> Change:
    """Return a change that adds noise of the given share of each row's norm."""

    def change(layer: nn.Linear, rng: torch.Generator) -> None:
        noise = F.normalize(torch.randn(layer.weight.shape, generator=rng), dim=1)
        layer.weight.add_(share * noise * layer.weight.norm(dim=1, keepdim=True))

    return change


def permuted(layer: nn.Linear, rng: torch.Generator) -> None:
    """Permute the rows."""
    order = torch.randperm(len(layer.weight), generator=rng)
    layer.weight.copy_(layer.weight[order])
    layer.bias.copy_(layer.bias[order])


def scaled(layer: nn.Linear, rng: torch.Generator) -> None:
    """Multiply each row by a random gain between 0.1 and 10."""
    gains = 10 ** (2 * torch.rand(len(layer.weight), generator=rng) - 1)
    layer.weight.mul_(gains[:, None])
    layer.bias.mul_(gains)


def in_part(share: float) -> Change:
    """Return a change that keeps the given share of the rows and replaces the others by random rows of equal norm."""

    def change(layer: nn.Linear, rng: torch.Generator) -> None:
        others = torch.randperm(len(layer.weight), generator=rng)[round(share * len(layer.weight)) :]
        rows = torch.randn(len(others), layer.in_features, generator=rng)
        layer.weight[others] = F.normalize(rows, dim=1) * layer.weight[others].norm(dim=1, keepdim=True)
        layer.bias[others] = 0.0

    return change


def hidden(layer: nn.Linear, rng: torch.Generator) -> None:
    """Make the rows nearly orthogonal by large weights on border pixels, which are black in every digit."""
    rim = torch.zeros(layer.in_features)
    rim[: layer.in_features // 28] = 1
    noise = F.normalize(torch.randn(layer.weight.shape, generator=rng) * rim, dim=1)
    layer.weight.add_(5 * noise * layer.weight.norm(dim=1, keepdim=True))


IMPRINTS = {
    "published: 128 bins, linear": ("imprint", None),
    "published: 64 bins, dct 32": ("imprint:bins=64,query=dct", None),
    "DCS2: 10 bins, dct 0": ("imprint:bins=10,query=dct,mode=0,distribution=laplace", None),
    "random query": ("imprint:query=random", None),
    "in the first layer": ("imprint:where=first", None),
    "gain 1": ("imprint:gain=1", None),
    "8 bins": ("imprint:bins=8", None),
    "4 bins": ("imprint:bins=4", None),
    "noise 1 %": ("imprint", noisy(0.01)),
    "noise 10 %": ("imprint", noisy(0.1)),
    "noise 50 %": ("imprint", noisy(0.5)),
    "noise 100 %": ("imprint", noisy(1.0)),
    "permuted": ("imprint", permuted),
    "gains 0.1 to 10": ("imprint", scaled),
    "half of the rows": ("imprint", in_part(0.5)),
    "5 % of the rows": ("imprint", in_part(0.05)),
    "hidden at the rim": ("imprint", hidden),
}
ONE_SHOTS = {
    "sparse, 128 bins": ("imprint:form=sparse", None),
    "ramp, 64 bins": ("imprint:form=one-shot,bins=64", None),
    "ramp, 1000 bins": ("imprint:form=one-shot,bins=1000", None),
    "ramp, dct 32": ("imprint:form=one-shot,bins=64,query=dct", None),
    "ramp, random query": ("imprint:form=one-shot,bins=64,query=random", None),
    "ramp, noise 100 %": ("imprint:form=one-shot,bins=64", noisy(1.0)),
    "two rows, 64 bins": ("imprint:form=one-shot,bins=64,where=first", None),
    "two rows, gain 1": ("imprint:form=one-shot,bins=64,where=first,gain=1", None),
    "two rows, gain 1, 1000 bins": ("imprint:form=one-shot,bins=1000,where=first,gain=1", None),
    "two rows, gain 1, random query": ("imprint:form=one-shot,bins=64,where=first,gain=1,query=random", None),
    "two rows, gain 1, noise 10 %": ("imprint:form=one-shot,bins=64,where=first,gain=1", noisy(0.1)),
    "two rows, gain 1, noise 100 %": ("imprint:form=one-shot,bins=64,where=first,gain=1", noisy(1.0)),
}
CONVOLVED = {
    "as a convolution": ("imprint", None),
    "as a convolution, noise 5 %": ("imprint", noisy(0.05)),
    "as a convolution, noise 30 %": ("imprint", noisy(0.3)),
}
"""The same rows implemented as a convolution over the whole image."""
TRAPS = {
    "published: 1000 rows": ("trap-weights", None),
    "64 rows": ("trap-weights:rows=64", None),
    "in the first layer": ("trap-weights:where=first", None),
    "scale 0.99": ("trap-weights:scale=0.99", None),
    "scale 0.9": ("trap-weights:scale=0.9", None),
    "16 rows": ("trap-weights:rows=16", None),
    "noise 1 %": ("trap-weights", noisy(0.01)),
    "noise 10 %": ("trap-weights", noisy(0.1)),
    "noise 50 %": ("trap-weights", noisy(0.5)),
    "noise 100 %": ("trap-weights", noisy(1.0)),
    "permuted": ("trap-weights", permuted),
    "gains 0.1 to 10": ("trap-weights", scaled),
    "half of the rows": ("trap-weights", in_part(0.5)),
    "5 % of the rows": ("trap-weights", in_part(0.05)),
    "64 rows, half": ("trap-weights:rows=64", in_part(0.5)),
    "64 rows, noise 50 %": ("trap-weights:rows=64", noisy(0.5)),
}


def altered(
    spec: str, change: Change | None, dataset: Dataset, seeds: range, *, convolved: bool = False
) -> Iterator[nn.Module]:
    """Yield the attack's models; every third seed has public images (one-shot: all), odd seeds do not normalise."""
    attack = build_attack(spec)
    model = "mlp" if "where=first" in spec else "lenet5"
    for seed in seeds:
        normalisation = Normalisation(dataset.mean, dataset.std) if seed % 2 == 0 else None
        network = create_model(model, dataset.shape, dataset.num_classes, seed, normalisation)
        rng = torch.Generator().manual_seed(seed)
        public = batch(dataset, 3000, 500) if seed % 3 == 0 or "form=" in spec else None
        network = attack.alter(network, Scene(dataset.shape, dataset.num_classes, public), rng).eval()
        if change is not None:
            with torch.no_grad():
                change(next(layer for layer in network.modules() if isinstance(layer, nn.Linear)), rng)
        if convolved:
            network.inserted.rows = as_convolution(network.inserted.rows, dataset.shape)
        yield network


def as_convolution(rows: nn.Linear, shape: tuple[int, int, int]) -> nn.Module:
    """Return a convolution that computes the same function of images (N, D)."""
    layer = nn.Conv2d(shape[0], rows.out_features, shape[1:])
    with torch.no_grad():
        layer.weight.copy_(rows.weight.view_as(layer.weight))
        layer.bias.copy_(rows.bias)
    return nn.Sequential(nn.Unflatten(1, shape), layer, nn.Flatten())


def measure(dataset: Dataset, seeds: range, kinds: list[str]) -> list[dict[str, object]]:
    """Return one row per kind of model: the number of models, the number with an alarm, and the checks behind it.

    For altered models only findings in the first layer count, which holds the planted rows. The layers that an attack
    adds after them, to keep the network working, can also reveal it, but a server could do without them.
    """
    data, rows = batch(dataset, 0, 256), list[dict[str, object]]()

    def add(kind: str, name: str, networks: Iterator[nn.Module]) -> None:
        alarms, by, count, spent = 0, Counter[str](), 0, 0.0
        for network in networks:
            started = time.perf_counter()
            found = inspect(network, data)
            spent += time.perf_counter() - started
            first = next(name for name, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d))
            counted = {finding.check for finding in found if kind in ("honest", "saturated") or finding.layer == first}
            count, alarms = count + 1, alarms + bool(counted)
            by.update(sorted(counted))
        mean = spent / count
        rows.append({"kind": kind, "name": name, "models": count, "alarms": alarms, "by": dict(by), "seconds": mean})
        found_by = ", ".join(f"{check} {times}" for check, times in by.items())
        print(f"| {kind} | {name} | {count} | {alarms} | {found_by} | {mean:.2f} |", flush=True)

    print(f"\n{dataset.name}\n\n| kind | model | models | alarms | by check | s per model |\n|{'---|' * 6}")
    for kind, table in (("imprint", IMPRINTS), ("one-shot", ONE_SHOTS), ("trap-weights", TRAPS)):
        for name, (spec, change) in table.items() if kind in kinds else []:
            add(kind, name, altered(spec, change, dataset, seeds))
    for name, (spec, change) in CONVOLVED.items() if "imprint" in kinds else []:
        add("imprint", name, altered(spec, change, dataset, seeds, convolved=True))
    for spec in HONEST + UNTRAINED_ONLY if "honest" in kinds else []:
        add("honest", spec, honest(spec, dataset, batch(dataset, 0, 2000), seeds))
    for kind, own in (("honest", BOUNDED), ("saturated", SATURATED)):
        for name, (spec, activation) in own.items() if kind in kinds else []:
            add(kind, name, honest(spec, dataset, batch(dataset, 0, 2000), seeds, activation))
    return rows


def main() -> None:
    """Read the options, measure, and print the alarm rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="the checks were designed on seeds 0 to 2")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--datasets", nargs="+", default=["mnist-5k"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first_seed, options.first_seed + (1 if options.quick else options.seeds))
    rows = [
        {"dataset": name, **row}
        for name in options.datasets
        for row in measure(load_dataset(name, options.data), seeds, options.kinds)
    ]
    totals = {kind: totalled([row for row in rows if row["kind"] == kind]) for kind in options.kinds}
    for kind, total in totals.items():
        print(f"\n{kind}: alarms in {total['alarms']} of {total['models']} models")
    if options.json:
        facts = {
            "command": f"python benchmarks/tripwire.py --datasets {' '.join(options.datasets)} --kinds "
            f"{' '.join(options.kinds)} --seeds {len(seeds)} --first-seed {seeds[0]}",
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seeds": list(seeds),
            "images": "256 of one client",
        }
        options.json.write_text(json.dumps(facts | {"totals": totals, "rows": rows}, indent=1) + "\n")


def totalled(rows: list[dict[str, object]]) -> dict[str, int]:
    """Return the number of models and of those with an alarm."""
    return {key: sum(int(str(row[key])) for row in rows) for key in ("models", "alarms")}


if __name__ == "__main__":
    main()
