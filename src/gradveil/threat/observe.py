"""The only door to private data: clients train behind it, and an attacker gets what the threat model grants."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gradveil.defences.base import Defence, Server
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.aggregation import mean_of
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import Protocol
from gradveil.randomness import global_stream, stream
from gradveil.secret_stream import SecretStream
from gradveil.threat.knowledge import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.model import Observation, Script
from gradveil.threat.seen import Seen, assembled, hold_private, joined, summed
from gradveil.types import Batch, Tensors


@dataclass(frozen=True)
class Federation:
    """The federation around the observed clients, and its server.

    Attributes:
        guards: the images of the defence's early clients, one batch per client.
        aux: public images that every device has.
        num_clients: clients of the federation, guards included; 0 means no more than are observed.
        first_client: number of the first observed client; each number has its own random draws.
        clients: the numbers of the observed clients, in place of those from ``first_client`` on.
        seed: of all random draws.
        alter: how a malicious server changes a copy of the network before it broadcasts it; must be granted.
        state: the broadcast state of the network after ``on_model``, for a network that was trained under the defence;
            an altered network does not get it.
        public: what the server broadcasts beside the model; None lets guards train first, as in a round.
    """

    guards: Sequence[Batch] = ()
    aux: Batch | None = None
    num_clients: int = 0
    first_client: int = 0
    clients: tuple[int, ...] = ()
    seed: int = 0
    alter: Callable[[nn.Module], nn.Module] | None = None
    state: Tensors | None = None
    public: Tensors | None = None


def observe(
    network: nn.Module,
    private: Sequence[Batch],
    *,
    threat: ThreatModel,
    num_classes: int,
    defence: Defence | None = None,
    protocol: Protocol | None = None,
    public: PublicKnowledge | None = None,
    federation: Federation | None = None,
) -> Observation:
    """Let each client train on its private images as it would in a round, and return what a server then has.

    Updates are those after the server's hook, ``on_server``; under secure aggregation there is one, the mean of all.

    Args:
        network: the undefended network with the broadcast weights; not changed.
        private: one batch per client, all of the same size.
        threat: what the server knows beside model and updates.
        num_classes: of the task.
        defence: the clients' defence; none by default.
        protocol: how the clients train; by default each sends one gradient of all its images. Over several rounds,
            FedSGD may take fewer images per round than a client has.
        public: public images and class averages, for an attacker who is granted them.
        federation: the other clients, the server and the seed; by default an honest server and no other clients.

    Example:
        >>> import torch
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
        >>> batch = Batch(torch.rand(1, 1, 2, 2), torch.tensor([1]), torch.tensor([False]))
        >>> observe(network, [batch], threat=ThreatModel(), num_classes=2).updates["1.weight"].shape
        torch.Size([1, 2, 4])
    """
    defence, protocol, federation = defence or Defence(), protocol or Protocol(), federation or Federation()
    _check_batches(private, protocol)
    if federation.alter is not None:
        network = _altered(network, federation.alter, threat)
    world = _World(network, defence, protocol, federation)

    # Step 1: guards train first, and the server broadcasts what the defence makes of their updates.
    server = _server(world)
    guards, others = _numbers(world, len(private))
    early = {number: _play(world, server, number, batch, 1)[0].update for number, batch in guards}
    beside = defence.public(early, server) if federation.public is None else federation.public
    server = replace(server, public=beside)

    # Step 2: the observed clients train.
    numbered = zip(others, private, strict=False)
    played = [one for number, batch in numbered for one in _play(world, server, number, batch, protocol.rounds)]

    script = Script(network, protocol, federation.num_clients, federation.aux)
    if protocol.aggregation == "secure":
        mean = mean_of([one.update for one in played], [float(one.update.num_examples) for one in played])
        protocol = replace(protocol, local=protocol.local.of_sum(len(played)))
        played = [summed(played, mean)]

    # Step 3: the attacker gets the updates, and the facts that the threat model grants.
    seen = assembled(
        server,
        played,
        defence=defence,
        protocol=protocol,
        threat=threat,
        num_classes=num_classes,
        public=public,
        looks=protocol.rounds,
    )
    return replace(seen, script=script)


@dataclass(frozen=True)
class _World:
    """What stays the same for all clients and rounds."""

    network: nn.Module
    defence: Defence
    protocol: Protocol
    federation: Federation


def _check_batches(private: Sequence[Batch], protocol: Protocol) -> None:
    if not private or len({batch.images.shape for batch in private}) != 1:
        raise ConfigError(f"private must be batches of one shape, got {[tuple(b.images.shape) for b in private]}.")
    if protocol.aggregation == "secure" and (len(private) < 2 or protocol.rounds > 1):
        raise ConfigError(
            f"aggregation secure needs two clients or more and a single round, got {len(private)} clients and "
            f"{protocol.rounds} rounds. Pass more batches of private images, or aggregation='none'."
        )
    how, whole = protocol.local, len(private[0])
    if how.algorithm != "fedsgd" or how.batch_size in (0, whole):
        return
    if protocol.rounds == 1 or how.batch_size > whole:
        raise ConfigError(
            f"batch_size of fedsgd must be that of the private batches here ({whole}, or 0 for all), "
            f"got {how.batch_size}. Pass only the images of that batch as private data, or observe several rounds."
        )


def _altered(network: nn.Module, alter: Callable[[nn.Module], nn.Module], threat: ThreatModel) -> nn.Module:
    """Return a malicious server's version of the network. Raise if the threat model does not grant that."""
    if Knowledge.ALTERS_MODEL not in threat.knows:
        raise ThreatModelError(
            "alter needs a server that alters the model, got a threat model without alters-model. Grant alters-model."
        )
    return alter(copy.deepcopy(network))


def _server(world: _World) -> Server:
    """Return the server with its defended network, before it broadcasts anything beside it."""
    seed, number = world.federation.seed, world.protocol.first_round
    with global_stream(seed, "observe"):
        network = world.defence.on_model(copy.deepcopy(world.network), SecretStream(seed, "observe", "server"))
    if world.federation.state is not None and world.federation.alter is None:
        network.load_state_dict(world.federation.state)
    hold_private(network, world.defence)
    return Server(number, network, {}, {}, stream(seed, "observe", "server", number))


def _numbers(world: _World, num_private: int) -> tuple[list[tuple[int, Batch]], list[int]]:
    """Return each guard's number with its images, and the numbers of all other clients from the first observed on."""
    federation = world.federation
    batches, first = federation.guards, federation.first_client
    everyone = (
        federation.num_clients
        if federation.clients
        else max(federation.num_clients, len(batches) + first + num_private)
    )
    guards = world.defence.early_clients(everyone)
    if federation.public is None and len(guards) != len(batches):
        raise ConfigError(
            f"Federation.guards must hold a batch for each of the defence's {len(guards)} guards, got {len(batches)}. "
            "Pass federation=Federation(guards=[...])."
        )
    others = [number for number in range(everyone + len(guards)) if number not in guards]
    return list(zip(guards, batches, strict=False)), list(federation.clients) or others[first:]


def _play(world: _World, server: Server, number: int, batch: Batch, rounds: int) -> list[Seen]:
    """Play one client's rounds, with its own random draws."""
    defence, protocol, seed = world.defence, world.protocol, world.federation.seed
    device, seen = Device(batch, number, aux=world.federation.aux), list[Seen]()
    with global_stream(seed, "observe", "client", number):
        module = defence.on_model(copy.deepcopy(world.network), SecretStream(seed, "observe", "on_model", number))
        net = FlatModel(module, defence.private)
        received = net.shared_vector(server.model.state_dict())
        for round_number in range(server.round, server.round + rounds):
            broadcast = Broadcast(received, protocol.lr, round_number, server.public)
            streams, shown = Streams.of(seed, number, round_number), list[Batch]()
            played = play_client(net, device, broadcast, defence, protocol.local, streams, watch=shown.append)
            device = replace(device, data=played.data, prepared=True)
            arrived = defence.on_server(played.update, replace(server, round=round_number))
            seen.append(Seen(number, batch, arrived, played.before, played.after, dict(device.state), joined(shown)))
    return seen
