"""What a server sees of a tapped round: the updates that were sent, or the same round played again as a branch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gradveil.attacks import Attack
from gradveil.audits.plan import Cell
from gradveil.audits.settings import AuditSettings
from gradveil.audits.tapping import World, load_tap, world_of
from gradveil.audits.views import (
    CellView,
    alteration,
    digests_of,
    first_view,
    public_knowledge,
    spare_public,
    threat_of,
    undefended_network,
)
from gradveil.data import Dataset
from gradveil.defences import Budget, Defence
from gradveil.engines.devices import defended, draws_own_images
from gradveil.engines.simulation import usable_device
from gradveil.federated.aggregation import mean_of
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.randomness import global_stream
from gradveil.threat import Knowledge, Observation
from gradveil.threat.model import Script
from gradveil.threat.observe import Federation, observe
from gradveil.threat.seen import SUM, Seen
from gradveil.threat.tap import TappedRound, observation
from gradveil.types import Batch, Update

REHEARSED = 4
"""Updates of public images, at most, that an attacker plays to compare ways of attacking."""


class Imageless(NamedTuple):
    """A target without images: its client drew none for this update."""

    target: int
    client: int
    digest: str
    budget: Budget | None


def views(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    defence: Defence,
    attack: Attack,
    root: Path | None,
    out: Path | None,
) -> tuple[list[CellView], list[Imageless]]:
    """Return what the server sees of a cell's targets, and the targets that have no images.

    ``out`` is the audit's folder, which holds the taps.
    """
    if not cell.needs or out is None:
        return [first_view(cell, settings, dataset, defence, attack, root)], []
    world = world_of(settings, cell.defence, cell.seed, dataset, root)
    folder = out / "trainings" / cell.needs
    stage, *later = (
        _Stage(dataclasses.replace(cell, round=number), settings, dataset, defence, world, tapped)
        for number in (cell.round, *cell.later)
        for tapped in [load_tap(folder, number, out / "cells")]
    )
    branches = settings.looks > 1 or Knowledge.ALTERS_MODEL in attack.needs
    groups: dict[int, list[int]] = {}
    for target, client in enumerate(world.attacked(cell.round)[cell.first : cell.last], cell.first):
        images = world.private(cell.round, client) if branches else stage.tapped.of(client).private
        groups.setdefault(len(images), []).append(target)
    empty = [stage.imageless(target) for target in groups.pop(0, [])]
    return [stage.branch(own, attack) if branches else stage.tap(own, later) for own in groups.values()], empty


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
        return Protocol.of(self.world.training).local

    def imageless(self, target: int) -> Imageless:
        """Return a target whose client drew no images."""
        client = self._clients([target])[0]
        size = min(self.world.data.sizes[one] for one in self._members(client))
        entries = sum(tensor.numel() for tensor in self.tapped.of(client).update.tensors.values())
        budget = self.defence.budget(self.local.releases(size, entries=entries))
        return Imageless(target, client, self.tapped.digests[client], budget)

    def tap(self, targets: list[int], later: Sequence["_Stage"] = ()) -> CellView:
        """Return the view of what was sent, together with ``later`` rounds of the same clients and images.

        All targets have equally many images.
        """
        clients = self._clients(targets)
        seen = observation(
            self.tapped,
            clients,
            defended(self._network(), self.defence, self.cell.seed, "server"),
            defence=self.defence,
            protocol=self._protocol(clients),
            threat=threat_of(self.cell, self.settings, None),
            num_classes=self.dataset.num_classes,
            public=public_knowledge(self.settings, self.dataset),
        )
        noise = [self._noise(client) if self.defence.adds_noise else None for client in clients]
        digests = [self.tapped.digests[client] for client in clients]
        private = [self.tapped.of(client).private for client in clients]
        numbers = [one.tapped.number for one in (self, *later)]
        seen = dataclasses.replace(
            seen,
            script=self._script(),
            later=tuple(one.tap(targets).seen for one in later),
            from_the_first=numbers == list(range(1, len(numbers) + 1)),
        )
        after = [[one.tapped.digests[client] for one in later] for client in clients]
        view = self._view(seen, targets, private, digests, noise)
        spare = spare_public(self.dataset, REHEARSED, len(private[0])) if len(private[0]) else []
        return dataclasses.replace(view, later_digests=after, spare=spare)

    def _script(self) -> Script:
        """Return what the server needs to play the tapped round again with its own images."""
        aux = self.world.data.aux if self.defence.uses_aux else None
        protocol = Protocol(self.local, self.tapped.lr, self.cell.round, aggregation=self.settings.aggregation)
        device = usable_device(self.settings.device)
        return Script(self._broadcast(), protocol, self.world.training.clients, None if aux is None else aux.to(device))

    def _broadcast(self) -> nn.Module:
        """Return the undefended network with the broadcast weights, as far as the defence left its layers in place.

        The layers that it replaced get theirs from `Federation.state`, unless the server alters the network.
        """
        network = self._network()
        own = network.state_dict()
        fits = {n: t for n, t in self.tapped.model.items() if n in own and own[n].shape == t.shape}
        network.load_state_dict(fits, strict=False)
        return network

    def branch(self, targets: list[int], attack: Attack) -> CellView:
        """Return the view of a round that is played again from the tapped model, altered or seen several times.

        Clients draw the same batches and random numbers as in the training, but begin with fresh private state.
        """
        device, training = usable_device(self.settings.device), self.world.training
        secure = self.settings.aggregation == "secure"
        clients = list(self.world.chosen[self.cell.round]) if secure else self._clients(targets)
        guards = self.defence.early_clients(training.clients)
        aux = self.world.data.aux if self.defence.uses_aux else None
        seen = observe(
            self._broadcast(),
            [self.world.private(self.cell.round, client).to(device) for client in clients],
            threat=threat_of(self.cell, self.settings, attack),
            num_classes=self.dataset.num_classes,
            defence=self.defence,
            protocol=Protocol(
                self.local,
                self.tapped.lr,
                self.cell.round,
                self.settings.looks,
                aggregation=self.settings.aggregation,
            ),
            public=public_knowledge(self.settings, self.dataset),
            federation=Federation(
                guards=[self.world.private(self.cell.round, guard).to(device) for guard in guards],
                aux=None if aux is None else aux.to(device),
                num_clients=training.clients,
                clients=tuple(clients),
                seed=self.cell.seed,
                alter=alteration(self.cell, self.settings, self.dataset, attack),
                state=self.tapped.model,
            ),
        )
        private = [self.world.private(self.cell.round, client) for client in self._clients(targets)]
        view = self._view(seen, targets, private, digests_of(seen), [None] * len(targets))
        return dataclasses.replace(view, branched=True)

    def _clients(self, targets: Sequence[int]) -> list[int]:
        return [self.world.attacked(self.cell.round)[target] for target in targets]

    def _members(self, client: int) -> tuple[int, ...]:
        """Return the clients behind an update: several for `SUM`."""
        return self.world.chosen[self.cell.round] if client == SUM else (client,)

    def _protocol(self, clients: Sequence[int]) -> Protocol:
        """Return how the attacker simulates the training behind these updates.

        A defence that draws its own batch divides their sum by the expected number of images, not by the number that it
        drew. The rate is scaled so that what arrived is the mean gradient of the drawn images.
        """
        members, local, share = self._members(clients[0]), self.local, 1.0
        if draws_own_images(self.defence, local):
            expected = sum(local.images_per_update(self.world.data.sizes[member]) for member in members)
            local, share = dataclasses.replace(local, batch_size=0), len(self.tapped.of(clients[0]).private) / expected
        if SUM in clients:
            local = local.of_sum(len(members))
        return Protocol(local, self.tapped.lr * share, aggregation=self.settings.aggregation)

    def _network(self) -> nn.Module:
        return undefended_network(self.settings, self.cell, self.dataset)

    def _view(
        self,
        seen: Observation,
        targets: list[int],
        private: list[Batch],
        digests: list[str],
        noise: list[float | None],
    ) -> CellView:
        clients = self._clients(targets)
        sizes = [min(self.world.data.sizes[one] for one in self._members(client)) for client in clients]
        steps = self.local.num_steps(sizes[0])
        return CellView(seen, private, targets, clients, digests, sizes, self.local, steps, False, noise)

    def _noise(self, client: int) -> float | None:
        """Return the norm of the undefended update over that of what the defence changed."""
        members = [self.tapped.of(member) for member in self._members(client)]
        weights = [1.0 if self.settings.protocol == "lab" else float(one.update.num_examples) for one in members]
        plain = mean_of([self._undefended_update(one) for one in members], weights)
        sent = Update(self.tapped.of(client).update.tensors, 0)
        apart = float((sent - Update(plain.tensors, 0)).norm())
        return float(plain.norm()) / apart if apart else None

    def _undefended_update(self, one: Seen) -> Update:
        """Return what a client would have sent of the same images without the defence, on the CPU."""
        if not len(one.private):
            return Update({name: torch.zeros_like(tensor) for name, tensor in one.update.tensors.items()}, 0)
        protocol = self._protocol([one.client])
        network = self._network()
        network.load_state_dict(self.tapped.model)
        net, device = FlatModel(network), usable_device(self.settings.device)
        broadcast = Broadcast(net.shared_vector(dict(network.state_dict())), protocol.lr, self.tapped.number)
        names = ("layers", one.client, "round", self.tapped.number)
        streams = dataclasses.replace(
            Streams.of(self.cell.seed, one.client, self.tapped.number), layers=global_stream(self.cell.seed, *names)
        )
        own = Device(one.private.to(device), one.client)
        plain = play_client(net, own, broadcast, Defence(), protocol.local, streams)
        return Update({name: tensor.cpu() for name, tensor in plain.update.tensors.items()}, 0)
