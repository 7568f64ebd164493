"""Shadow models of whole trainings: the attacked federation, played again by its server with public images."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from gradveil.audits.shadows import SHARE, Shadows, keep, kept, load
from gradveil.config import TrainSettings
from gradveil.data.datasets import Split
from gradveil.engines.devices import defended, make_network
from gradveil.engines.simulation import Simulation, chosen_normalisation
from gradveil.errors import DivergedError
from gradveil.federated.server import Round


@dataclass(frozen=True)
class TrainingShadows(Shadows):
    """Shadow models of whole trainings, from the initial weights of the attacked one. All clients have iid images.

    Attributes:
        rounds: the attacked rounds.
    """

    rounds: tuple[int, ...] = ()
    _trained: dict[int, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def models(
        self, simulation: Simulation, played: Round, network: nn.Module, labels: Tensor, images: int
    ) -> Iterator[nn.Module]:
        """Yield the networks of trainings from the initial weights; those that diverged are left out."""
        shadow, size = copy.deepcopy(network), self.size(images)
        for place in range(self.attack.shadows):
            if place not in self._trained:
                self._trained[place] = self._training(place, size)
            prefix = f"{played.number}/"
            own = {n.removeprefix(prefix): t for n, t in self._trained[place].items() if n.startswith(prefix)}
            if own:
                load(shadow, {name: own[name] for name in played.received})
                yield shadow

    def _training(self, place: int, size: int) -> dict[str, Tensor]:
        """Return the models of one shadow training after its attacked rounds, named ``round/tensor``."""
        seed = self.seed("training", place)
        name = f"shadow-{self.key([size, place, self.rounds], {})}"
        found = kept(name)
        if found is not None:
            return found
        settings = replace(
            self.settings,
            seed=seed,
            defence=self.plays.spec if self.known else "none",
            aux=self.settings.aux if self.known else "",
            partition=f"iid:images={size}",
            sensitive="1.0" if self.settings.sensitive else "",
            rounds=max(self.rounds),
            save_rounds=self.rounds,
            eval_every=max(self.rounds),
            canaries=0,
        )
        found = {}
        with suppress(DivergedError):
            found = self._models_of(settings, seed)
        keep(name, found)
        return found

    def _models_of(self, settings: TrainSettings, seed: int) -> dict[str, Tensor]:
        own, found = self.public, dict[str, Tensor]()
        order = np.random.default_rng(seed).permutation(len(own))[: int(SHARE * len(own))]
        dataset = replace(self.dataset, train=Split(own.images[order], own.labels[order]), test=own)
        with Simulation(settings, workers=0, dataset=dataset, network=self._initial) as simulation:
            for number in range(1, settings.rounds + 1):
                played = simulation.step(number)[1]
                if number in self.rounds:
                    guards = simulation.defence.early_clients(settings.clients)
                    client = next(client for client in played.clients if client not in guards)
                    update = played.recovered[client] if settings.aggregation == "none" else played.mean
                    change = {**update.tensors, **update.buffers}
                    found |= {f"{number}/{name}": t + change[name] for name, t in played.received.items()}
        return found

    def _initial(self) -> nn.Module:
        """Return the initial network of the attacked training, which its server chose.

        Who does not know the defence trains the network as the defence changed it.
        """
        normalisation = chosen_normalisation(self.settings.normalise, self.dataset)
        network = make_network(self.settings, self.dataset.shape, self.dataset.num_classes, normalisation)
        if not self.known and self.defence.overrides("on_model"):
            return defended(network, self.defence, self.settings.seed, "server")
        return network
