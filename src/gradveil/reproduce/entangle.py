"""Model Entanglement (ICLR 2025 submission): its motivation, its cost, and the attacks that it stops."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from gradveil.data import Dataset, load_dataset
from gradveil.data.pixels import to_unit
from gradveil.engines.simulation import Simulation
from gradveil.networks.grads import layer_inputs
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, rounded
from gradveil.reproduce.entangle_attacks import figure_5b, figure_6
from gradveil.reproduce.entangle_training import figure_4, figure_5a, figure_5c, training

# --- Figure 1b: representations of two digits -------------------------------------------------------------------------

DIGITS = (1, 5)


def figure_1b(lab: Lab) -> Result:
    """Project the representations of 500 ones and 500 fives before the output layer onto two dimensions."""
    data = load_dataset(training(lab, "mnist").dataset, lab.data_root)
    chosen, labels = _digits(data, 500)
    rounds = lab.pick(2, 10, 10)
    settings = replace(training(lab, "mnist", partition="iid", rounds=rounds), epochs=1, eval_every=rounds)
    spaces: dict[str, Tensor] = {"pixels, no network": chosen.flatten(1)}
    with Simulation(settings, dataset=data, workers=0) as simulation:
        network = simulation.net.module.eval()
        spaces["lenet5, untrained"] = _before_output(network, chosen)
        for row in simulation.run():
            lab.progress(int(str(row["round"])) / rounds, "training")
        simulation.net.receive(simulation.net.shared_vector(simulation.model))
        title = f"lenet5 at {float(str(row['accuracy'])):.1%} test accuracy"
        spaces[title] = _before_output(network.eval(), chosen)
    rows: list[dict[str, Any]] = []
    figure = Figure(figsize=(1 + 3.4 * len(spaces), 3.6), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(spaces)), spaces.items(), strict=True):
        plane, share = principal_plane(points)
        right = told_apart(plane, labels == DIGITS[0])
        rows.append(
            {"space": name, "features": points.shape[1], "variance_in_two_dimensions": rounded(share),
             "digits_told_apart": rounded(right), "paper": "clearly differentiated" if "lenet5" in name else None}
        )  # fmt: skip
        for digit, marker in zip(DIGITS, "o^", strict=True):
            own = plane[labels == digit]
            axes.plot(own[:, 0].numpy(), own[:, 1].numpy(), marker, ms=3, mew=0, alpha=0.6, label=f"digit {digit}")
        axes.set_title(f"{name}\nseparated: {right:.1%}", fontsize=9)
        axes.set(xticks=[], yticks=[])
        axes.legend(frameon=False, fontsize=8)
    notes = [
        f"{settings.dataset}: the first {len(labels) // 2} ones and fives, test images first (the paper: 500 each; it "
        "does not say whether its network was trained). We use principal components; the paper does not name its "
        "method of reduction.",
        f"Trained: FedAvg on IID data, {rounds} rounds of one epoch, learning rate {settings.lr:g}. "
        "`digits_told_apart`: a least-squares line is fitted to every second point in two dimensions; the value is the "
        "share of the other points that lie on the side of their digit.",
        "Raw pixels are shown for comparison: if they separate the digits equally well, the digits themselves differ, "
        "not only their representations.",
    ]
    return Result(rows, notes, {"representations": figure})


def _digits(data: Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` images of each digit with their labels, test images first."""
    pixels = np.concatenate([data.test.images, data.train.images])
    labels = np.concatenate([data.test.labels, data.train.labels])
    places = np.concatenate([np.flatnonzero(labels == digit)[:count] for digit in DIGITS])
    return to_unit(pixels[places]), torch.from_numpy(labels[places])


def _before_output(network: torch.nn.Module, chosen: Tensor) -> Tensor:
    """Return the input of the last Linear layer, (N, features)."""
    last = [name for name, layer in network.named_modules() if isinstance(layer, torch.nn.Linear)][-1]
    with torch.no_grad():
        return layer_inputs(network, [last], chosen)[0]


def principal_plane(points: Tensor) -> tuple[Tensor, float]:
    """Return the first two principal components (N, 2) of (N, features), and their share of the variance."""
    centred = points.double() - points.double().mean(0)
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    return left[:, :2] * sizes[:2], float(sizes[:2].square().sum() / sizes.square().sum())


def told_apart(points: Tensor, first: Tensor) -> float:
    """Fit a least-squares line to every second point, and return the share of the others on their class's side.

    Args:
        points: (N, dimensions).
        first: (N,) bool, whether a point belongs to the first of two classes.

    Example:
        >>> told_apart(torch.tensor([[0.0], [0.1], [5.0], [5.1]]), torch.tensor([True, True, False, False]))
        1.0
    """
    extended = torch.cat([points, points.new_ones(len(points), 1)], 1)
    sides = first.to(points) * 2 - 1
    line = torch.linalg.lstsq(extended[0::2], sides[0::2, None]).solution
    return float(((extended[1::2] @ line)[:, 0].sign() == sides[1::2]).double().mean())


PAPER = Paper(
    "entangle",
    "Model Entanglement for solving privacy preserving in federated learning, ICLR 2025 submission, anonymous authors",
    {
        "fig1b": Experiment("Representations of ones and fives", figure_1b),
        "fig4": Experiment("Accuracy by beta", figure_4),
        "fig5a": Experiment("Accuracy under four defences", figure_5a),
        "fig5b": Experiment("Membership inference under four defences", figure_5b),
        "fig5c": Experiment("Time per round under four defences", figure_5c),
        "fig6": Experiment("GS under four defences", figure_6),
    },
)
