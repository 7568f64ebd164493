"""What a server sees in a cell of an audit: tapped updates, rounds that branch off at a tap, or first updates."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, Scene
from gradveil.audits.plan import Cell
from gradveil.audits.settings import AuditSettings
from gradveil.audits.tapping import World, load_tap, world_of
from gradveil.data import Dataset, load_dataset
from gradveil.data.auxiliary import image_keys, joined
from gradveil.data.pixels import to_batch, to_unit
from gradveil.defences import Defence
from gradveil.engines.devices import defended, local_settings, make_network
from gradveil.engines.simulation import chosen_normalisation, usable_device
from gradveil.errors import ConfigError
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.randomness import derive_seed, stream
from gradveil.threat import Knowledge, Observation, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.threat.seen import Seen
from gradveil.threat.tap import TappedRound, observation
from gradveil.types import Batch, Update

GUARDED = 64
"""Images at most of a guard that trains locally."""
PUBLIC_IMAGES = 500
"""Test images that stand for public data of the same kind."""
SECRETS = (Knowledge.KEY, Knowledge.LOCK, Knowledge.PRIVATE_STATE)
"""Secrets of a defence, useless to an attacker who does not know the defence."""


@dataclass(frozen=True)
class CellView:
    """What a server sees of some targets, whose updates have equally many images.

    Attributes:
        seen: what the attack gets.
        private: the images behind each update.
        targets: their numbers.
        clients: the number of each client.
        digests: the digest of each attacked update.
        sizes: how many images each client has in all.
        local: how they train.
        branched: whether the round was played again, and is not itself part of the training.
        noise: the signal-to-noise ratio of each update, or None if no noise was added.
    """

    seen: Observation
    private: list[Batch]
    targets: list[int]
    clients: list[int]
    digests: list[str]
    sizes: list[int]
    local: LocalSettings
    branched: bool
    noise: list[float | None]


def views(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    defence: Defence,
    attack: Attack,
    root: Path | None,
    out: Path | None,
) -> list[CellView]:
    """Return what the server sees of a cell's targets; ``out`` is the audit's folder, which holds the taps."""
    if not cell.needs or out is None:
        private = private_batches(settings, dataset)[cell.first : cell.last]
        seen = observed(cell, settings, dataset, private, defence, attack, root)
        count, targets = len(private), list(range(cell.first, cell.last))
        digests, local = digests_of(seen), local_of(settings, cell)
        sizes = [settings.images] * count
        return [CellView(seen, private, targets, targets, digests, sizes, local, False, [None] * count)]
    world = world_of(settings, cell.defence, cell.seed, dataset, root)
    tapped = load_tap(out / "trainings" / cell.needs, cell.round, out / "cells")
    clients = world.chosen[cell.round][cell.first : cell.last]
    groups: dict[int, list[int]] = {}
    for target, client in enumerate(clients, cell.first):
        groups.setdefault(len(tapped.of(client).private), []).append(target)
    stage = _Stage(cell, settings, dataset, defence, world, tapped)
    branches = settings.looks > 1 or Knowledge.ALTERS_MODEL in attack.needs
    return [(stage.branch(own, attack) if branches else stage.tap(own)) for own in groups.values()]


@dataclass(frozen=True)
class _Stage:
    """A tapped round, and all that is needed to look at it or to play it again."""

    cell: Cell
    settings: AuditSettings
    dataset: Dataset
    defence: Defence
    world: World
    tapped: TappedRound

    @property
    def local(self) -> LocalSettings:
        return local_settings(self.world.training)

    def tap(self, targets: list[int]) -> CellView:
        """Return the view of what was sent."""
        clients = self._clients(targets)
        seen = observation(
            self.tapped,
            clients,
            defended(self._network(), self.defence, self.cell.seed, "server"),
            defence=self.defence,
            protocol=Protocol(self.local, self.tapped.lr),
            threat=_threat(self.cell, self.settings, None),
            num_classes=self.dataset.num_classes,
            public=_public_knowledge(self.settings, self.dataset),
        )
        played = [self.tapped.of(client) for client in clients]
        noise = [self._noise(one) if self.defence.adds_noise else None for one in played]
        digests = [self.tapped.digests[client] for client in clients]
        return self._view(seen, targets, digests, noise, branched=False)

    def branch(self, targets: list[int], attack: Attack) -> CellView:
        """Return the view of a round that is played again from the tapped model, altered or seen several times.

        Clients draw the same batches and random numbers as in the training, but begin with fresh private state.
        """
        device, training = usable_device(self.settings.device), self.world.training
        network, clients = self._network(), self._clients(targets)
        own = network.state_dict()
        fits = {n: t for n, t in self.tapped.model.items() if n in own and own[n].shape == t.shape}
        network.load_state_dict(fits, strict=False)
        guards = self.defence.early_clients(training.clients)
        aux = self.world.data.aux if self.defence.uses_aux else None
        seen = observe(
            network,
            [self.tapped.of(client).private.to(device) for client in clients],
            threat=_threat(self.cell, self.settings, attack),
            num_classes=self.dataset.num_classes,
            defence=self.defence,
            protocol=Protocol(self.local, self.tapped.lr, self.cell.round, self.settings.looks),
            public=_public_knowledge(self.settings, self.dataset),
            federation=Federation(
                guards=[self.world.private(self.cell.round, guard).to(device) for guard in guards],
                aux=None if aux is None else aux.to(device),
                num_clients=training.clients,
                clients=tuple(clients),
                seed=self.cell.seed,
                alter=_alteration(self.cell, self.settings, self.dataset, attack),
            ),
        )
        return self._view(seen, targets, digests_of(seen), [None] * len(targets), branched=True)

    def _clients(self, targets: Sequence[int]) -> list[int]:
        return [self.world.chosen[self.cell.round][target] for target in targets]

    def _network(self) -> nn.Module:
        return _undefended(self.settings, self.cell, self.dataset)

    def _view(
        self, seen: Observation, targets: list[int], digests: list[str], noise: list[float | None], *, branched: bool
    ) -> CellView:
        clients = self._clients(targets)
        private = [self.tapped.of(client).private for client in clients]
        sizes = [self.world.data.sizes[client] for client in clients]
        return CellView(seen, private, targets, clients, digests, sizes, self.local, branched, noise)

    def _noise(self, one: Seen) -> float | None:
        """Return the norm of the undefended update over that of what the defence changed."""
        network = self._network()
        network.load_state_dict(self.tapped.model)
        net, device = FlatModel(network), usable_device(self.settings.device)
        broadcast = Broadcast(net.shared_vector(dict(network.state_dict())), self.tapped.lr, self.tapped.number)
        streams = Streams.of(self.cell.seed, one.client, self.tapped.number)
        plain = play_client(net, Device(one.private.to(device), one.client), broadcast, Defence(), self.local, streams)
        sent = Update({name: tensor.to(device) for name, tensor in one.update.tensors.items()}, 0)
        apart = float((sent - Update(plain.update.tensors, 0)).norm())
        return float(plain.update.norm()) / apart if apart else None


def digests_of(seen: Observation) -> list[str]:
    """Return the digest of each client's first update."""
    return [
        Update({n: t[row] for n, t in seen.updates.items()}, 0, {n: t[row] for n, t in seen.buffers.items()}).sha256()
        for row in range(0, seen.num_targets, seen.rounds)
    ]


def _undefended(settings: AuditSettings, cell: Cell, dataset: Dataset) -> nn.Module:
    training = settings.training(cell.defence, cell.seed)
    normalisation = chosen_normalisation(settings.normalise, dataset)
    network = make_network(training, dataset.shape, dataset.num_classes, normalisation)
    return network.to(usable_device(settings.device))


def _threat(cell: Cell, settings: AuditSettings, attack: Attack | None) -> ThreatModel:
    """Return what the attacker of a cell knows: secrets only if it knows the defence."""
    alters = attack is not None and Knowledge.ALTERS_MODEL in attack.needs
    useless = {*([] if alters else [Knowledge.ALTERS_MODEL]), *([] if cell.adaptive else SECRETS)}
    knows = [name for name in settings.knows if name not in useless]
    return ThreatModel.of(*knows, *(["defence"] if cell.adaptive else []))


def _alteration(
    cell: Cell, settings: AuditSettings, dataset: Dataset, attack: Attack | None
) -> Callable[[nn.Module], nn.Module] | None:
    """Return how a malicious server's attack changes the network, or None if it does not."""
    if attack is None or Knowledge.ALTERS_MODEL not in attack.needs:
        return None
    public = _public(dataset, usable_device(settings.device)) if Knowledge.PUBLIC_DATA in settings.knows else None
    scene = Scene(dataset.shape, dataset.num_classes, public)
    return lambda network: attack.alter(network, scene, stream(cell.seed, "alter"))


def _public_knowledge(settings: AuditSettings, dataset: Dataset) -> PublicKnowledge:
    device = usable_device(settings.device)
    averages = _class_averages(dataset, device) if "class-averages" in settings.knows else None
    return PublicKnowledge(_public(dataset, device), averages)


def observed(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    private: list[Batch],
    defence: Defence,
    attack: Attack | None,
    root: Path | None,
) -> Observation:
    """Return what a server sees of the first updates of clients that have these images and no others.

    ``attack`` may alter the network. No training follows, so that no price belongs to these updates.
    """
    device = usable_device(settings.device)
    aux = _auxiliary(settings, dataset, root, defence).to(device) if defence.uses_aux else None
    return observe(
        _undefended(settings, cell, dataset),
        [batch.to(device) for batch in private],
        threat=_threat(cell, settings, attack),
        num_classes=dataset.num_classes,
        defence=defence,
        protocol=Protocol(local_of(settings, cell), settings.lr, rounds=settings.looks),
        public=_public_knowledge(settings, dataset),
        federation=Federation(
            guards=_guards(settings, defence, aux),
            aux=aux,
            num_clients=settings.clients,
            first_client=cell.first,
            seed=cell.seed,
            alter=_alteration(cell, settings, dataset, attack),
        ),
    )


def _auxiliary(settings: AuditSettings, dataset: Dataset, root: Path | None, defence: Defence) -> Batch:
    """Return public images for the defence: those of ``aux``, or the last test images that are not private."""
    if settings.aux:
        split = joined(dataset, load_dataset(settings.aux, root), labelled=defence.aux_labels)
        chosen = np.arange(len(dataset.train), len(split))[:PUBLIC_IMAGES]
    else:
        split, chosen = dataset.test, _nobodys(dataset)[-PUBLIC_IMAGES:]
        if not len(chosen):
            raise ConfigError(
                "Public images must not be private ones, got only test images that are also training images. Add --aux."
            )
    return to_batch(split.images[chosen], split.labels[chosen])


def _nobodys(dataset: Dataset) -> np.ndarray:
    """Return the positions of the test images that are not among the training images."""
    return np.flatnonzero(~np.isin(image_keys(dataset.test.images), image_keys(dataset.train.images)))


def _guards(settings: AuditSettings, defence: Defence, aux: Batch | None) -> list[Batch]:
    """Return the images of the defence's guards, taken from the public ones.

    If clients send gradients, a guard has as many images as they have; if they train locally, it has more.
    """
    count = len(defence.early_clients(settings.clients))
    if not count or aux is None:
        return []
    wanted = count * (settings.images if settings.protocol == "lab" else GUARDED)
    return [aux[slice(number, wanted, count)] for number in range(count)]


def local_of(settings: AuditSettings, cell: Cell) -> LocalSettings:
    """Return how clients train that are attacked without a training: as in one, on all of their few images."""
    how = local_settings(settings.training(cell.defence, cell.seed))
    return dataclasses.replace(how, batch_size=0) if how.algorithm == "fedsgd" else how


def _public(dataset: Dataset, device: torch.device) -> Batch:
    """Return test images that are not private."""
    free = _nobodys(dataset)[:PUBLIC_IMAGES]
    return to_batch(dataset.test.images[free], dataset.test.labels[free]).to(device)


def _class_averages(dataset: Dataset, device: torch.device) -> Tensor:
    """Return the mean test image of each class, (classes, C, H, W); of all images if a class has none."""
    images, labels = to_unit(dataset.test.images), torch.from_numpy(dataset.test.labels)
    means = [images[labels == c] if bool((labels == c).any()) else images for c in range(dataset.num_classes)]
    return torch.stack([some.mean(0) for some in means]).to(device)


def refuse_known(attacks: Iterable[Attack], private: list[Batch], dataset: Dataset) -> None:
    """Raise ConfigError if an attack was prepared on a target."""
    for attack in attacks:
        known = attack.prepared_on(dataset.shape, dataset.num_classes)
        targets = image_keys(torch.cat([batch.images for batch in private]).numpy()).tolist() if known else []
        same = sum(key in known for key in targets)
        if same:
            raise ConfigError(
                f"Attack {attack.name!r} must not be prepared on its targets, got {same} of {len(targets)} that its "
                "generator was trained on. Train it on other images: gradveil train-generator --split test."
            )


def private_batches(settings: AuditSettings, dataset: Dataset) -> list[Batch]:
    """Return the private images, one batch per target, drawn from the training images by the first seed."""
    wanted, there = settings.targets * settings.images, len(dataset.train)
    if wanted > there:
        raise ConfigError(
            f"targets times images must be at most the {there:,} training images, got {wanted:,}. Lower --targets."
        )
    order = np.random.default_rng(derive_seed(settings.seed, "targets")).permutation(there)[:wanted]
    marks = np.ones(wanted, bool)  # a client would mark the images that are attacked
    whole = to_batch(dataset.train.images[order], dataset.train.labels[order], marks)
    return [whole[slice(start, start + settings.images)] for start in range(0, wanted, settings.images)]
