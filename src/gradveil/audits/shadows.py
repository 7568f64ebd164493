"""Shadow models: what a client's model looks like if it was trained on a server's public images.

A shadow model never sees a private image or a candidate. It is a client's round, played from the same broadcast model
by the same `play_client` (`RoundShadows`), or a whole federated training of clients with public images from the same
initial weights (`gradveil.audits.shadow_trainings`). An attacker who knows the defence plays it, with new private
draws; one who does not plays clients without a defence.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks.shadow import ShadowAttack
from gradveil.audits.views import PUBLIC_IMAGES, nobodys
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.data.datasets import Split
from gradveil.data.pixels import to_batch
from gradveil.defences import Defence
from gradveil.engines.devices import make_network
from gradveil.engines.simulation import Simulation, chosen_normalisation
from gradveil.errors import ConfigError, DataError
from gradveil.federated.protocol import Protocol
from gradveil.federated.server import Round, learning_rate
from gradveil.randomness import derive_seed, stream
from gradveil.registry import own_files
from gradveil.scratch import scratch_file
from gradveil.storage import digest_of, load_tensors, save_tensors
from gradveil.threat import ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch, Tensors

FEWEST = 20
"""Public images below which no shadow model is played."""
SHARE = 0.8
"""Share of the public images that one shadow model may train on, so that shadow models differ."""


def public_positions(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the test images that are public, and of those that are left to be non-members."""
    free = nobodys(dataset)
    count = min(PUBLIC_IMAGES, len(free) // 2)
    return free[:count], free[count:]


def shadow_size(images: int, public: int, clients: int = 1) -> int:
    """Return the images of each client behind a shadow model: as many as real clients have, if there are as many.

    Example:
        >>> shadow_size(200, 500), shadow_size(600, 500), shadow_size(200, 500, clients=10)
        (200, 400, 40)
    """
    return min(images, int(SHARE * public) // clients)


@dataclass(frozen=True)
class Shadows(ABC):
    """Base of the two ways to play shadow models.

    Attributes:
        attack: the attack that compares models with them.
        settings: of the attacked training.
        dataset: the data set, of which some test images are public.
        defence: the defence of the attacked training.
        known: whether the attacker knows the defence.
    """

    attack: ShadowAttack
    settings: TrainSettings
    dataset: Dataset
    defence: Defence
    known: bool = False

    @property
    def plays(self) -> Defence:
        """The defence that shadow clients play."""
        return self.defence if self.known else Defence()

    @property
    def public(self) -> Split:
        """The public images."""
        chosen, test = public_positions(self.dataset)[0], self.dataset.test
        return Split(test.images[chosen], test.labels[chosen])

    @property
    def clients(self) -> int:
        """Number of clients with public images behind one shadow model."""
        training = self.attack.play == "training"
        summed = self.settings.aggregation == "secure"
        return self.settings.clients if training else self.settings.num_sampled if summed else 1

    def size(self, images: int) -> int:
        """Return the images of each shadow client, where real clients have ``images``. Raise if they are too few."""
        public = len(self.public)
        size = shadow_size(images, public, self.clients)
        if public < FEWEST or size < 1:
            raise ConfigError(
                f"Attack {self.attack.spec!r} needs at least {max(FEWEST, math.ceil(self.clients / SHARE))} public "
                f"images here, got {public}: half of the test images that are no training images. Use a data set with "
                "more test images, or drop the attack."
            )
        return size

    def check(self, fewest: int) -> None:
        """Raise ConfigError before any work if shadow models can't be played; a client has ``fewest`` images or more.

        The defence must work with as many images as shadow clients have.
        """
        if self.attack.play == "round" and self.settings.algorithm == "fedsgd" and self.settings.batch_size:
            raise ConfigError(
                f"play must be training for attack {self.attack.spec!r} if a round uses only some images of a client "
                f"(fedsgd, --protocol lab), got 'round'. Use {self.attack.name}:play=training, or --protocol fedavg."
            )
        size = self.size(fewest)
        try:
            self.plays.check_images(size, aux=bool(self.settings.aux))
        except ConfigError as error:
            raise ConfigError(
                f"Attack {self.attack.spec!r} can't play defence {self.defence.spec!r} with the {size} public images "
                f"of a shadow client: {error}"
            ) from error

    @abstractmethod
    def models(
        self, simulation: Simulation, played: Round, network: nn.Module, labels: Tensor, images: int
    ) -> Iterator[nn.Module]:
        """Yield one network per shadow model, the same object with other weights each time.

        Args:
            simulation: the attacked training, after the round.
            played: the round.
            network: the attacked model; not changed.
            labels: of the candidates; shadow clients have the same classes, as far as there are public images.
            images: of the attacked client.
        """

    def told(self, labels: Tensor, images: int) -> str:
        """Return what was played for candidates with these labels and a client with ``images``, for the row."""
        size = self.size(images)
        if self.attack.play == "round":
            own = sum(_counts(torch.from_numpy(self.public.labels), labels, size * self.clients))
            size = (own if own >= max(FEWEST, self.clients) else size * self.clients) // self.clients
        what = "trainings" if self.attack.play == "training" else "clients' rounds"
        return f"{self.attack.shadows} shadow {what} with {size} public images per client; this client has {images}"

    def seed(self, *names: str | int) -> int:
        """Return the seed of a shadow model's draws, unrelated to those of the attacked training."""
        return derive_seed(self.settings.seed, "shadow", *names) % 2**62

    def key(self, facts: list[object], tensors: Tensors) -> str:
        """Return a digest of all that a shadow model depends on, the code of one's own defence included."""
        spec = self.plays.spec if self.known else ""
        settings = repr(replace(self.settings, defence=spec or "none"))
        files = [*own_files(spec), *own_files(self.settings.model), *filter(None, [self.settings.weights])]
        public = {"images": torch.from_numpy(self.public.images), "labels": torch.from_numpy(self.public.labels)}
        return digest_of([version("gradveil"), settings, repr(facts)], files, {**tensors, **public})


@dataclass(frozen=True)
class RoundShadows(Shadows):
    """Shadow models that begin at the model which was broadcast in the attacked round."""

    def models(
        self, simulation: Simulation, played: Round, network: nn.Module, labels: Tensor, images: int
    ) -> Iterator[nn.Module]:
        """Yield the networks of clients' rounds that begin at the broadcast model; those that diverged are left out."""
        shadow, size = copy.deepcopy(network), self.size(images)
        broadcast = copy.deepcopy(simulation.net.module).eval()
        key = self.key([size, played.number, labels.bincount().tolist()], {**played.received, **played.public})
        for place in range(self.attack.shadows):
            found = kept(f"shadow-{key}-{place}")
            if found is None:
                found = self._update(simulation, played, broadcast, labels, size, place)
                keep(f"shadow-{key}-{place}", found)
            if all(bool(tensor.isfinite().all()) for tensor in found.values()):
                load(shadow, {name: tensor + found[name] for name, tensor in played.received.items()})
                yield shadow

    def _update(
        self, simulation: Simulation, played: Round, broadcast: nn.Module, labels: Tensor, size: int, place: int
    ) -> dict[str, Tensor]:
        """Return what the server would get of clients with public images in this round, by name."""
        settings, seed = self.settings, self.seed("round", played.number, place)
        device, aux = next(broadcast.parameters()).device, simulation.data.aux
        batches = drawn(self.public, labels, size, self.clients, stream(seed, "images"))
        seen = observe(
            self._undefended(broadcast) if self.known else broadcast,
            [batch.to(device) for batch in batches],
            threat=ThreatModel(),
            num_classes=self.dataset.num_classes,
            defence=self.plays,
            protocol=Protocol(
                Protocol.of(settings).local,
                learning_rate(settings, played.number),
                played.number,
                aggregation=settings.aggregation,
            ),
            federation=Federation(
                aux=aux.to(device) if aux is not None and self.plays.uses_aux else None,
                num_clients=settings.clients,
                seed=seed,
                state=broadcast.state_dict(),
                public=played.public,
            ),
        )
        both = {**seen.updates, **seen.buffers}
        return {name: both[name][0] for name in played.received}

    def _undefended(self, broadcast: nn.Module) -> nn.Module:
        """Return the network before ``on_model``, with the broadcast weights where the defence left layers in place."""
        normalisation = chosen_normalisation(self.settings.normalise, self.dataset)
        network = make_network(self.settings, self.dataset.shape, self.dataset.num_classes, normalisation)
        own = network.state_dict()
        sent = broadcast.state_dict()
        fits = {name: tensor for name, tensor in sent.items() if name in own and own[name].shape == tensor.shape}
        network.load_state_dict(fits, strict=False)
        return network.to(next(broadcast.parameters()).device)


def drawn(public: Split, labels: Tensor, size: int, clients: int, rng: torch.Generator) -> list[Batch]:
    """Draw images for clients of equal size: at most ``size`` each, with the classes of ``labels`` in the same shares.

    No more than `SHARE` of the public images of a class are taken. If a class has too few, clients get fewer images; if
    hardly any image is left, those of other classes are taken too. All are marked.
    """
    order = torch.randperm(len(public), generator=rng)
    classes = torch.from_numpy(public.labels)[order]
    places = [order[classes == label][:count] for label, count in enumerate(_counts(classes, labels, size * clients))]
    chosen = torch.cat(places)
    if len(chosen) < max(FEWEST, clients):
        chosen = torch.cat([chosen, order[~torch.isin(order, chosen)]])[: size * clients]
    chosen = chosen[torch.randperm(len(chosen), generator=rng)]
    each = len(chosen) // clients
    return [_batch(public, chosen[start : start + each]) for start in range(0, each * clients, each)]


def _counts(public: Tensor, labels: Tensor, wanted: int) -> list[int]:
    """Return how many images of each class to draw from public ones with these labels.

    Example:
        >>> _counts(torch.tensor([0] * 10 + [1] * 10 + [2] * 10), torch.tensor([0, 0, 0, 1]), 12)
        [8, 3, 0]
    """
    classes = int(max(public.max(), labels.max())) + 1
    there = public.bincount(minlength=classes).tolist()
    share = labels.bincount(minlength=classes).double() / len(labels)
    return [min(round(s * wanted), round(SHARE * n)) for s, n in zip(share.tolist(), there, strict=True)]


def _batch(split: Split, chosen: Tensor) -> Batch:
    places = chosen.numpy()
    return to_batch(split.images[places], split.labels[places], np.ones(len(places), bool))


def kept(name: str) -> dict[str, Tensor] | None:
    """Return the tensors that an earlier try kept in the scratch folder, or None."""
    path = scratch_file(f"{name}.safetensors")
    if path is not None and path.exists():
        with suppress(DataError):
            return load_tensors(path)
    return None


def keep(name: str, tensors: Tensors) -> None:
    """Keep tensors in the scratch folder, if there is one."""
    path = scratch_file(f"{name}.safetensors")
    if path is not None:
        save_tensors(path, tensors)


def load(network: nn.Module, tensors: Tensors) -> None:
    """Set some parameters and buffers of a network."""
    places = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
