"""Table 1 of Soteria: do updates reveal class-wise representations?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.representations import (
    ROWS,
    class_representations,
    linear_chain,
    trained_classes,
)
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.engines.simulation import Simulation
from gradveil.networks.watch import inputs_of
from gradveil.threat import Observation
from gradveil.threat.received import received
from gradveil.types import Batch


@dataclass
class Figures:
    """The measurements that one row of the table averages.

    Attributes:
        own: correlations per layer with the same class's true representation, by the method that finds rows.
        other: correlations per layer with the true representation of another class of the client.
        exact: whether exactly the classes of a client were found, per update.
    """

    own: dict[str, list[Tensor]] = field(default_factory=lambda: {rows: [] for rows in ROWS})
    other: dict[str, list[Tensor]] = field(default_factory=lambda: {rows: [] for rows in ROWS})
    exact: list[bool] = field(default_factory=list)

    def mean(self, which: dict[str, list[Tensor]], rows: str) -> str:
        """Format the mean of each layer; constant representations have no correlation and are left out."""
        return " / ".join(f"{value:.2f}" for value in torch.stack(which[rows]).nanmean(0).tolist())


def measure_representations(settings: TrainSettings, data: Dataset, progress: Callable[[float], None]) -> Figures:
    """Play the rounds and compare the inferred representations of each client with the true ones.

    The true representation of a class is the mean input of each Linear layer over the client's images of that class,
    under the model that the client received.
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
            inferred = class_representations(seen, held[None], rows)  # of the client's classes, as in the paper
            for kind, another in zip(kinds, kinds[1:] + kinds[:1], strict=True):
                ours = {name: inferred[name][0, kind] for name in chain}
                figures.own[rows].append(_correlations(ours, {name: truth[name][kind] for name in chain}))
                figures.other[rows].append(_correlations(ours, {name: truth[name][another] for name in chain}))
    return figures


def _correlations(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Return Pearson's correlation for each layer, (layers,)."""
    return torch.stack([torch.corrcoef(torch.stack([ours[name], theirs[name]]))[0, 1] for name in ours])


def _observations(
    settings: TrainSettings, data: Dataset, progress: Callable[[float], None]
) -> Iterator[tuple[Observation, Batch]]:
    """Yield what the server sees of each client in each round, with the client's private data."""
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
    """Return the mean input of each layer by class, (classes, features); NaN for a class without images."""
    with torch.no_grad(), inputs_of(network, chain) as reached:
        network(private.images)
    return {
        name: torch.stack([reached[name][private.labels == kind].mean(0) for kind in range(num_classes)])
        for name in chain
    }
