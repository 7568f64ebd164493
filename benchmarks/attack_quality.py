"""Measure how well the attacks work on real images; each line is an experiment by name.

    python benchmarks/attack_quality.py --data-root DATA --only gs-lenet-dlg-mnist
    python benchmarks/attack_quality.py --data-root DATA --list

An attack sees only what `observe` returns. The true images are used for nothing but the final comparison.
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil import (
    Batch,
    Federation,
    Protocol,
    PublicKnowledge,
    ThreatModel,
    create_model,
    load_dataset,
    observe,
)
from gradveil.attacks import Attack
from gradveil.attacks.parts.labels import counted, distinct, idlg, last_layer, likely_prediction
from gradveil.data import Dataset
from gradveil.data.pixels import to_unit
from gradveil.federated.protocol import ONE_GRADIENT, LocalSettings
from gradveil.metrics import align
from gradveil.metrics.labels import label_accuracy
from gradveil.metrics.psnr import Psnr
from gradveil.metrics.ssim import Ssim
from gradveil.models import Normalisation
from gradveil.registry import build


@dataclass(frozen=True)
class Experiment:
    """One line of a table.

    Attributes:
        dataset: name of the data set, whose test images are attacked.
        model: spec of the network.
        attack: spec of the attack.
        batch: number of images per update.
        knows: what the attacker knows.
        labels: "any", or "repeated" for four classes in each batch of eight.
        how: settings of local training, or None for a single gradient.
        lr: learning rate of local training.
        normalised: whether the network normalises its input with the data set's mean and standard deviation.
        epochs: epochs of training before the attack.
    """

    dataset: str
    model: str
    attack: str
    batch: int = 1
    knows: str = "labels,num-examples"
    labels: str = "any"
    how: LocalSettings | None = None
    lr: float = 1.0
    normalised: bool = False
    epochs: int = 0


FREE = "num-examples,local-steps"
TWENTY, FOUR = LocalSettings(epochs=1, batch_size=4), LocalSettings(epochs=5, batch_size=4)
BEST = "gs:sign=none,schedule=cosine,lr=0.3"
SLOW = "gs:sign=none,schedule=cosine,lr=0.1,tv=1e-3"
EXPERIMENTS = {
    # one image, one gradient
    "gs-mnist": Experiment("mnist", "lenet-dlg", f"{BEST},iterations=3000,tv=1e-6", normalised=True),
    "gs-mnist-published": Experiment("mnist", "lenet-dlg", "gs", normalised=True),
    "gs-mnist-dcs2": Experiment("mnist", "lenet-dlg", "gs:sign=none,boxed=false,iterations=10000", normalised=True),
    "dlg-cifar": Experiment("cifar10", "lenet-dlg", "dlg:restarts=3", knows="num-examples"),
    "idlg-cifar": Experiment("cifar10", "lenet-dlg", "idlg:restarts=3", knows="num-examples"),
    "gs-cifar-lenet5-sigmoid": Experiment(
        "cifar10", "lenet5:activation=sigmoid,init=uniform", f"{SLOW},iterations=4000", normalised=True
    ),
    "gs-cifar-lenet5-relu": Experiment("cifar10", "lenet5", "gs:iterations=3000,tv=1e-2", normalised=True),
    "gs-cifar-convnet": Experiment("cifar10", "convnet:width=16", "gs:iterations=2000,tv=1e-1", normalised=True),
    # batches
    "gs-batch8": Experiment(
        "mnist", "lenet-dlg", f"{BEST},iterations=6000,tv=1e-3", 8, labels="repeated", normalised=True
    ),
    # several local steps, labels unknown
    "fedavg-four": Experiment("mnist", "lenet-dlg", f"{BEST},iterations=1500,tv=1e-4", 4, FREE, how=FOUR, lr=0.01),
    "fedavg-four-line": Experiment(
        "mnist", "lenet-dlg", f"{BEST},iterations=1500,tv=1e-4,local=line", 4, FREE, how=FOUR, lr=0.01
    ),
    "fedavg-four-once": Experiment(
        "mnist", "lenet-dlg", f"{BEST},iterations=1500,tv=1e-4,local=once", 4, FREE, how=FOUR, lr=0.01
    ),
    "fedavg-twenty-mlp": Experiment("mnist", "mlp", f"{SLOW},iterations=1000", 20, FREE, how=TWENTY, lr=0.01),
    "fedavg-twenty-mlp-line": Experiment(
        "mnist", "mlp", f"{SLOW},iterations=1000,local=line", 20, FREE, how=TWENTY, lr=0.01
    ),
    "fedavg-twenty-mlp-once": Experiment(
        "mnist", "mlp", f"{SLOW},iterations=1000,local=once", 20, FREE, how=TWENTY, lr=0.01
    ),
    "fedavg-twenty-lenet-dlg": Experiment(
        "mnist", "lenet-dlg", f"{SLOW},iterations=1000", 20, FREE, how=TWENTY, lr=0.01
    ),
    # BatchNorm statistics as a prior, labels unknown
    "gradinversion": Experiment(
        "cifar10",
        "convnet:width=16",
        "gradinversion:iterations=400,restarts=2",
        4,
        "num-examples,batch-statistics",
        normalised=True,
    ),
    "gradinversion-without": Experiment(
        "cifar10",
        "convnet:width=16",
        "gradinversion:iterations=400,restarts=2,batch_norm=0",
        4,
        "num-examples,batch-statistics",
        normalised=True,
    ),
    # what weakens attacks: default initialisation, ReLU, training
    "weaker-sigmoid-default": Experiment(
        "mnist", "lenet-dlg:init=default", f"{BEST},iterations=3000,tv=1e-6", normalised=True
    ),
    "weaker-sigmoid-default-idlg": Experiment("mnist", "lenet-dlg:init=default", "idlg:iterations=100"),
    "weaker-relu": Experiment("mnist", "lenet5", f"{BEST},iterations=3000,tv=1e-4", normalised=True),
    "weaker-relu-1-epoch": Experiment("mnist", "lenet5", f"{BEST},iterations=3000,tv=1e-4", normalised=True, epochs=1),
    "weaker-relu-5-epochs": Experiment("mnist", "lenet5", f"{BEST},iterations=3000,tv=1e-4", normalised=True, epochs=5),
    "weaker-uniform-1-epoch": Experiment(
        "mnist", "lenet-dlg", f"{BEST},iterations=3000,tv=1e-6", normalised=True, epochs=1
    ),
    "weaker-uniform-5-epochs": Experiment(
        "mnist", "lenet-dlg", f"{BEST},iterations=3000,tv=1e-6", normalised=True, epochs=5
    ),
}


def main() -> None:
    """Run the selected experiments and print one line of a Markdown table for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--only", default="", help="names separated by commas; the beginning of a name is enough")
    parser.add_argument("--targets", type=int, default=32)
    parser.add_argument("--attack", default="", help="attack to run instead of each experiment's own")
    parser.add_argument("--model", default="", help="model to attack instead of each experiment's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--labels", action="store_true", help="only measure how many labels each rule recovers")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    wanted = [n for n in EXPERIMENTS if any(n.startswith(part) for part in options.only.split(","))]
    if options.labels:
        label_table(options.data_root, options.targets, options.seed)
        return
    if options.list:
        print("\n".join(f"{name}: {EXPERIMENTS[name]}" for name in wanted))
        return
    print("| experiment | mean PSNR | lowest | highest | SSIM | MSE < 1e-3 | labels right | class average | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in wanted:
        setting = EXPERIMENTS[name]
        if options.attack:
            setting = replace(setting, attack=options.attack)
        if options.model:
            setting = replace(setting, model=options.model)
        print(line(name, setting, options.data_root, options.targets, options.seed), flush=True)


def line(name: str, setting: Experiment, root: Path | None, targets: int, seed: int) -> str:
    """Run one experiment, and return its line of the table."""
    data = load_dataset(setting.dataset, root)
    normalisation = Normalisation(data.mean, data.std) if setting.normalised else None
    network = create_model(setting.model, data.shape, data.num_classes, seed, normalisation)
    if setting.epochs:
        train(network, data, setting.epochs, seed)
    private = choose(data, targets, setting.batch, setting.labels, seed)
    seen = observe(
        network.eval(),
        private,
        threat=ThreatModel.of(*setting.knows.split(",")),
        num_classes=data.num_classes,
        protocol=Protocol(setting.how or ONE_GRADIENT, setting.lr),
        public=PublicKnowledge(class_averages=averages(data)),
        federation=Federation(seed=seed),
    )
    begun = time.perf_counter()
    guess = build(Attack, setting.attack)(seen, torch.Generator().manual_seed(seed))
    seconds = time.perf_counter() - begun
    truth = torch.stack([batch.images for batch in private])
    found = torch.stack([align(t, g) for t, g in zip(truth, guess.images, strict=True)])
    psnr = Psnr()(truth.flatten(0, 1), found.flatten(0, 1))
    ssim = Ssim()(truth.flatten(0, 1), found.flatten(0, 1)).mean()
    mse = (truth - found).square().flatten(2).mean(2)
    right = [label_accuracy(batch.labels, row) for batch, row in zip(private, guess.labels, strict=True)]
    nothing = torch.cat([Psnr()(batch.images, averages(data)[batch.labels]) for batch in private]).mean()
    if setting.batch == 1:
        print(f"<!-- {name}: " + " ".join(f"{value:.1f}" for value in psnr.tolist()) + " -->")
    return (
        f"| {name} | {psnr.mean():.1f} | {psnr.min():.1f} | {psnr.max():.1f} | {ssim:.3f} | "
        f"{(mse < 1e-3).double().mean():.0%} | {sum(right) / len(right):.0%} | {nothing:.1f} | {seconds:.0f} |"
    )


def label_table(root: Path | None, targets: int, seed: int) -> None:
    """Print the share of labels that each rule recovers on MNIST, for untrained and trained networks."""
    data = load_dataset("mnist", root)
    print(
        "| network | training | idlg, 1 image | distinct, 4 | counted, 4 | counted, 32 | counted, 5 local steps of 4 |"
    )
    print("|---|---|---|---|---|---|---|")
    for model in ("lenet-dlg", "lenet-dlg:init=default", "lenet5", "lenet5:activation=tanh", "mlp"):
        for epochs in (0, 1):
            network = create_model(model, data.shape, data.num_classes, seed)
            if epochs:
                train(network, data, epochs, seed)
            cells = [
                recovered(network, data, targets, seed, batch, rule, how)
                for batch, rule, how in (
                    (1, "idlg", None),
                    (4, "distinct", None),
                    (4, "counted", None),
                    (32, "counted", None),
                    (20, "counted", TWENTY),
                )
            ]
            shares = " | ".join(f"{share:.0%}" for share in cells)
            print(f"| {model} | {epochs} epochs | {shares} |", flush=True)


def recovered(
    network: nn.Module, data: Dataset, targets: int, seed: int, batch: int, rule: str, how: LocalSettings | None
) -> float:
    """Return the share of labels that a rule recovers."""
    private = choose(data, targets, batch, "any", seed)
    grants = ThreatModel.of("num-examples", "local-steps")
    protocol, federation = Protocol(how or ONE_GRADIENT, 0.01), Federation(seed=seed)
    seen = observe(
        network.eval(), private, threat=grants, num_classes=data.num_classes, protocol=protocol, federation=federation
    )
    weight, bias = last_layer(seen, seen.mean_gradients)
    if rule == "idlg":
        found = idlg(weight)[:, None]
    elif rule == "distinct":
        found = distinct(weight, batch)
    else:
        found = counted(weight, bias, batch, likely_prediction(seen))
    right = [label_accuracy(one.labels, row) for one, row in zip(private, found, strict=True)]
    return sum(right) / len(right)


def choose(data: Dataset, targets: int, batch: int, labels: str, seed: int) -> list[Batch]:
    """Draw batches of test images by the seed."""
    rng = torch.Generator().manual_seed(seed)
    images, classes = torch.from_numpy(data.test.images), torch.from_numpy(data.test.labels)
    order = torch.randperm(len(images), generator=rng)
    chosen = []
    for target in range(targets):
        if labels == "repeated":
            kinds = torch.randperm(data.num_classes, generator=rng)[: batch // 2].repeat(2)[:batch]
            some = torch.stack(
                [order[classes[order] == kind][target * 2 + i // (batch // 2)] for i, kind in enumerate(kinds)]
            )
        else:
            some = order[target * batch : (target + 1) * batch]
        chosen.append(Batch(to_unit(images[some]), classes[some], torch.ones(batch) > 0))
    return chosen


def averages(data: Dataset) -> Tensor:
    """Return the mean training image of each class."""
    images, labels = torch.from_numpy(data.train.images), torch.from_numpy(data.train.labels)
    return torch.stack([images[labels == kind].float().mean(0) / 255 for kind in range(data.num_classes)])


def train(network: nn.Module, data: Dataset, epochs: int, seed: int) -> None:
    """Train the network in place, with Adam and batches of 64."""
    rng = torch.Generator().manual_seed(seed)
    images, labels = torch.from_numpy(data.train.images), torch.from_numpy(data.train.labels).long()
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    network.train()
    for _ in range(epochs):
        for some in torch.randperm(len(images), generator=rng).split(64):
            optimiser.zero_grad()
            F.cross_entropy(network(to_unit(images[some])), labels[some]).backward()
            optimiser.step()
    network.eval()
    with torch.no_grad():
        test = to_unit(data.test.images[:2000])
        right = (network(test).argmax(1) == torch.from_numpy(data.test.labels[:2000])).double().mean()
    print(f"<!-- trained for {epochs} epochs: test accuracy {right:.1%} -->")


if __name__ == "__main__":
    main()
