"""Do updates carry class-wise representations? Table 1 of Soteria, on CIFAR-10.

    python benchmarks/representations.py --data-root DATA
    python benchmarks/representations.py --data-root DATA --rounds 200 --only 1x32,iid

100 devices, each with 2 classes of 20 images (or 40 of any class, IID); 10 a round train by SGD with rate 0.01. What
each sent is all that `class_representations` gets. The figure is the correlation of what it infers for a class with the
mean representation of the device's images of that class under the model that the device received, at the input of each
Linear layer; the mean over classes, devices and rounds.

The paper's network is in an appendix that the published version lacks; lenet5 stands in for it, with as many Linear
layers. A class's rows are found in two ways, see `class_representations`. "other class" is the correlation with a class
of the device that was not asked for: as far as it is as high, the figure speaks of what all images share.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.representations import (
    ROWS,
    class_representations,
    inputs_of,
    linear_chain,
    trained_classes,
)
from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.engines.simulation import Simulation
from gradveil.received import received
from gradveil.threat import Observation
from gradveil.types import Batch

NON_IID, IID = "by-class:classes=2,per_class=20", "iid:images=40"
TABLE = {
    "1x32": ("E=1, B=32", 1, 32, NON_IID, (0.98, 0.99, 0.99)),
    "5x32": ("E=5, B=32", 5, 32, NON_IID, (0.82, 0.90, 0.92)),
    "10x32": ("E=10, B=32", 10, 32, NON_IID, (0.70, 0.78, 0.82)),
    "1x16": ("E=1, B=16", 1, 16, NON_IID, (0.82, 0.93, 0.99)),
    "1x8": ("E=1, B=8", 1, 8, NON_IID, (0.85, 0.89, 0.92)),
    "iid": ("E=1, B=32 (IID)", 1, 32, IID, (0.48, 0.31, 0.18)),
}


@dataclass
class Figures:
    """What one row of the table is the mean of.

    Attributes:
        own: correlations by layer with the class asked for, by the way rows are found.
        other: those with another class of the device.
        exact: whether all classes of a device and no others were found.
    """

    own: dict[str, list[Tensor]] = field(default_factory=lambda: {rows: [] for rows in ROWS})
    other: dict[str, list[Tensor]] = field(default_factory=lambda: {rows: [] for rows in ROWS})
    exact: list[bool] = field(default_factory=list)


def main() -> None:
    """Print the table as Markdown, one line a row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=20, help="the paper has 200")
    parser.add_argument("--skip", type=int, default=0, help="rounds that are played but not looked at")
    parser.add_argument("--model", default="lenet5", help="with three Linear layers to be compared with the paper")
    parser.add_argument("--only", default="", help=f"of {', '.join(TABLE)}, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    data = load_dataset("cifar10", options.data_root)
    print("| training | paper: FC1 / FC2 / FC3 | errors | other class | elements | other class | classes exact |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only.split(",") if options.only else TABLE:
        title, epochs, batch, partition, paper = TABLE[name]
        settings = TrainSettings(
            dataset="cifar10", model=options.model, clients=100, sampled=10, rounds=options.rounds, partition=partition,
            epochs=epochs, batch_size=batch, lr=0.01, momentum=0.0, eval_every=max(1, options.rounds),
            save_rounds=tuple(range(1, options.rounds + 1)), seed=options.seed,
        )  # fmt: skip
        found = measure(settings, data, options.skip)
        cells = [
            cell(torch.tensor([paper])),
            *(cell(torch.stack(f[r])) for r in ROWS for f in (found.own, found.other)),
        ]
        print(f"| {title} | {' | '.join(cells)} | {sum(found.exact) / len(found.exact):.0%} |", flush=True)


def cell(values: Tensor) -> str:
    """Means of each layer (rows, layers); a representation without any spread has no correlation and is left out."""
    return " / ".join(f"{value:.2f}" for value in values.nanmean(0).tolist())


def measure(settings: TrainSettings, data: Dataset, skip: int) -> Figures:
    """Play the rounds and compare what is inferred with what was there."""
    figures = Figures()
    for seen, private in observations(settings, data, skip):
        chain = linear_chain(seen)
        weight, bias = (seen.updates[f"{chain[-1]}.{key}"] for key in ("weight", "bias"))
        held = torch.nn.functional.one_hot(private.labels, seen.num_classes).any(0)
        figures.exact.append(torch.equal(trained_classes(weight, bias)[0], held))
        truth = true_representations(seen.network, private, chain, seen.num_classes)
        kinds = held.nonzero().flatten().tolist()
        for rows in ROWS:
            inferred = class_representations(seen, held[None], rows)  # of each class that is there, as in the paper
            for kind, another in zip(kinds, kinds[1:] + kinds[:1], strict=True):
                ours = {name: inferred[name][0, kind] for name in chain}
                figures.own[rows].append(correlations(ours, {name: truth[name][kind] for name in chain}))
                figures.other[rows].append(correlations(ours, {name: truth[name][another] for name in chain}))
    return figures


def correlations(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Pearson's, layer by layer, (layers,)."""
    return torch.stack([torch.corrcoef(torch.stack([ours[name], theirs[name]]))[0, 1] for name in ours])


def observations(settings: TrainSettings, data: Dataset, skip: int) -> Iterator[tuple[Observation, Batch]]:
    """What the server sees of each device in each round, and what the device holds."""
    with Simulation(settings, dataset=data, workers=0) as simulation:
        for number in range(1, settings.rounds + 1):
            _, played = simulation.step(number)
            if number <= skip:
                continue
            network = simulation.net.module
            network.load_state_dict(dict(played.received))
            for client, update in played.sent.items():
                seen = received(network, dict(update.tensors), shape=data.shape, num_classes=data.num_classes)
                yield seen, simulation.data.client(client)


def true_representations(network: nn.Module, private: Batch, chain: list[str], num_classes: int) -> dict[str, Tensor]:
    """Mean input (classes, features) of each layer by class, of private images; NaN for a class without any."""
    with torch.no_grad(), inputs_of(network, chain) as reached:
        network(private.images)
    return {
        name: torch.stack([reached[name][private.labels == kind].mean(0) for kind in range(num_classes)])
        for name in chain
    }


if __name__ == "__main__":
    main()
