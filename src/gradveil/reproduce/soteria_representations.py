"""Do updates carry class-wise representations? What Table 1 of Soteria measures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from gradveil.data import Dataset
from gradveil.engines.simulation import Simulation
from gradveil.threat import Observation
from gradveil.threat.received import received
from gradveil.types import Batch


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

    def mean(self, which: dict[str, list[Tensor]], rows: str) -> str:
        """Means of each layer; a representation without any spread has no correlation and is left out."""
        return " / ".join(f"{value:.2f}" for value in torch.stack(which[rows]).nanmean(0).tolist())


def measure_representations(settings: TrainSettings, data: Dataset, progress: Callable[[float], None]) -> Figures:
    """Play the rounds and compare what is inferred of each device with what was there.

    The truth is the mean representation of the device's images of a class under the model that the device received, at
    the input of each Linear layer.
    """
    figures = Figures()
    for seen, private in _observations(settings, data, progress):
        chain = linear_chain(seen)
        weight, bias = (seen.updates[f"{chain[-1]}.{key}"] for key in ("weight", "bias"))
        held = torch.nn.functional.one_hot(private.labels, seen.num_classes).any(0)
        figures.exact.append(torch.equal(trained_classes(weight, bias)[0], held))
        truth = _true_representations(seen.network, private, chain, seen.num_classes)
        kinds = held.nonzero().flatten().tolist()
        for rows in ROWS:
            inferred = class_representations(seen, held[None], rows)  # of each class that is there, as in the paper
            for kind, another in zip(kinds, kinds[1:] + kinds[:1], strict=True):
                ours = {name: inferred[name][0, kind] for name in chain}
                figures.own[rows].append(_correlations(ours, {name: truth[name][kind] for name in chain}))
                figures.other[rows].append(_correlations(ours, {name: truth[name][another] for name in chain}))
    return figures


def _correlations(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Pearson's, layer by layer, (layers,)."""
    return torch.stack([torch.corrcoef(torch.stack([ours[name], theirs[name]]))[0, 1] for name in ours])


def _observations(
    settings: TrainSettings, data: Dataset, progress: Callable[[float], None]
) -> Iterator[tuple[Observation, Batch]]:
    """What the server sees of each device in each round, and what the device holds."""
    with Simulation(settings, dataset=data, workers=0) as simulation:
        for number in range(1, settings.rounds + 1):
            _, played = simulation.step(number)
            progress(number / settings.rounds)
            network = simulation.net.module
            network.load_state_dict(dict(played.received))
            for client, update in played.sent.items():
                seen = received(network, dict(update.tensors), shape=data.shape, num_classes=data.num_classes)
                yield seen, simulation.data.client(client)


def _true_representations(network: nn.Module, private: Batch, chain: list[str], num_classes: int) -> dict[str, Tensor]:
    """Mean input (classes, features) of each layer by class, of private images; NaN for a class without any."""
    with torch.no_grad(), inputs_of(network, chain) as reached:
        network(private.images)
    return {
        name: torch.stack([reached[name][private.labels == kind].mean(0) for kind in range(num_classes)])
        for name in chain
    }
