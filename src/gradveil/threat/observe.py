"""The only door to private data: clients train behind it, and an attacker gets what the threat model grants."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.defences.base import Defence, Server
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import Protocol
from gradveil.networks.watch import LayerCall, watch
from gradveil.randomness import global_stream, stream
from gradveil.threat.knowledge import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.model import Lock, Observation
from gradveil.types import Batch, Tensors, Update


@dataclass(frozen=True)
class Federation:
    """The federation around the observed clients, and its server.

    Attributes:
        guards: the images of the defence's early clients, one batch per client.
        aux: public images that every device has.
        num_clients: clients of the federation, guards included; 0 means no more than are observed.
        first_client: number of the first observed client; each number has its own random draws.
        seed: of all random draws.
        alter: how a malicious server changes a copy of the network before it broadcasts it; must be granted.
    """

    guards: Sequence[Batch] = ()
    aux: Batch | None = None
    num_clients: int = 0
    first_client: int = 0
    seed: int = 0
    alter: Callable[[nn.Module], nn.Module] | None = None


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

    Updates are those after the server's hook, ``on_server``.

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
    server = replace(server, public=defence.public(early, server))

    # Step 2: the observed clients train.
    numbered = zip(others, private, strict=False)
    played = [one for number, batch in numbered for one in _play(world, server, number, batch, protocol.rounds)]

    # Step 3: the attacker gets the updates, and the facts that the threat model grants.
    channels, height, width = private[0].images.shape[1:]
    facts = _own_facts(world, private, played) | _public_facts(public or PublicKnowledge())
    facts |= _shown_facts(world, server, private, played, threat)
    return Observation(
        network=server.model.eval(),
        updates=_stack([one.update.tensors for one in played]),
        buffers=_stack([one.update.buffers for one in played]),
        shape=(channels, height, width),
        num_classes=num_classes,
        single_step=_is_single(world, private),
        threat=threat,
        public=server.public,
        rounds=protocol.rounds,
        _facts={knowledge: fact for knowledge, fact in facts.items() if knowledge in threat.knows},
        _step_size=protocol.lr,
        _num_images=len(private[0]),
    )


def hold_private(network: nn.Module, defence: Defence) -> None:
    """Freeze the server's stand-ins for private parameters: no client sends their gradient."""
    for name, parameter in network.named_parameters():
        if defence.private(name):
            parameter.requires_grad_(False)


@dataclass(frozen=True)
class _World:
    """What stays the same for all clients and rounds."""

    network: nn.Module
    defence: Defence
    protocol: Protocol
    federation: Federation


@dataclass(frozen=True)
class _Seen:
    """One client's round.

    Attributes:
        update: what it sent, after the server's hook.
        before: the private tensors of its model before training.
        after: the same after training.
        state: the rest of its private state after the round.
        encodings: the images that its network saw.
    """

    update: Update
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, Tensor]
    encodings: Batch


def _check_batches(private: Sequence[Batch], protocol: Protocol) -> None:
    if not private or len({batch.images.shape for batch in private}) != 1:
        raise ConfigError(f"private must be batches of one shape, got {[tuple(b.images.shape) for b in private]}.")
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
        network = world.defence.on_model(copy.deepcopy(world.network), stream(seed, "observe", "server"))
    hold_private(network, world.defence)
    return Server(number, network, {}, {}, stream(seed, "observe", "server", number))


def _numbers(world: _World, num_private: int) -> tuple[list[tuple[int, Batch]], list[int]]:
    """Return each guard's number with its images, and the numbers of all other clients from the first observed on."""
    federation = world.federation
    batches, first = federation.guards, federation.first_client
    everyone = max(federation.num_clients, len(batches) + first + num_private)
    guards = world.defence.early_clients(everyone)
    if len(guards) != len(batches):
        raise ConfigError(
            f"Federation.guards must hold a batch for each of the defence's {len(guards)} guards, got {len(batches)}. "
            "Pass federation=Federation(guards=[...])."
        )
    others = [number for number in range(everyone + len(guards)) if number not in guards]
    return list(zip(guards, batches, strict=True)), others[first:]


def _play(world: _World, server: Server, number: int, batch: Batch, rounds: int) -> list[_Seen]:
    """Play one client's rounds, with its own random draws."""
    defence, protocol, seed = world.defence, world.protocol, world.federation.seed
    device, seen = Device(batch, number, aux=world.federation.aux), list[_Seen]()
    with global_stream(seed, "observe", "client", number):
        module = defence.on_model(copy.deepcopy(world.network), stream(seed, "observe", "on_model", number))
        net = FlatModel(module, defence.private)
        received = net.shared_vector(server.model.state_dict())
        for round_number in range(server.round, server.round + rounds):
            broadcast = Broadcast(received, protocol.lr, round_number, server.public)
            streams, shown = Streams.of(seed, number, round_number), list[Batch]()
            played = play_client(net, device, broadcast, defence, protocol.local, streams, watch=shown.append)
            device = replace(device, data=played.data, prepared=True)
            arrived = defence.on_server(played.update, replace(server, round=round_number))
            seen.append(_Seen(arrived, played.before, played.after, dict(device.state), _joined(shown)))
    return seen


def _is_single(world: _World, private: Sequence[Batch]) -> bool:
    return world.protocol.local.num_steps(len(private[0])) == 1


def _own_facts(world: _World, private: Sequence[Batch], played: Sequence[_Seen]) -> dict[Knowledge, object]:
    """Return the facts about the clients' data, training and private tensors."""
    size = world.protocol.local.images_per_update(len(private[0]))
    return {
        Knowledge.LABELS: _granted_labels(private, played, size),
        Knowledge.NUM_EXAMPLES: size,
        Knowledge.LOCAL_STEPS: world.protocol.local,
        Knowledge.DEFENCE: world.defence,
        Knowledge.PRIVATE_STATE: [{**one.before, **one.state} for one in played],
        Knowledge.KEY: [{name: t for name, t in one.before.items() if _is_key(name)} for one in played],
        Knowledge.LOCK: [_lock(one) for one in played],
    }


def _public_facts(public: PublicKnowledge) -> dict[Knowledge, object]:
    return {Knowledge.PUBLIC_DATA: public.public_data, Knowledge.CLASS_AVERAGES: public.class_averages}


def _shown_facts(
    world: _World, server: Server, private: Sequence[Batch], played: Sequence[_Seen], threat: ThreatModel
) -> dict[Knowledge, object]:
    """Return the facts about the images that the networks saw; only granted ones, as they take time to compute."""
    facts: dict[Knowledge, object] = {}
    single = _is_single(world, private)
    if Knowledge.BATCH_STATISTICS in threat.knows:
        whole = [batch for batch in private for _ in range(world.protocol.rounds)]
        shown = [one.encodings for one in played] if single else whole
        facts[Knowledge.BATCH_STATISTICS] = _batch_statistics(server.model, shown, [one.before for one in played])
    if Knowledge.ENCODINGS in threat.knows and single:
        facts[Knowledge.ENCODINGS] = _joined([one.encodings for one in played])
    return facts


def _is_key(name: str) -> bool:
    return name.rpartition(".")[2] == "key"


def _lock(one: _Seen) -> Lock:
    before = {name: tensor for name, tensor in one.before.items() if not _is_key(name)}
    return Lock(before, {name: one.after[name] - tensor for name, tensor in before.items()})


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return a copy of all batches as one; its labels are soft if those of any batch are."""
    soft = max(batch.labels.dim() for batch in batches) == 2
    labels = [batch.labels for batch in batches if not soft or batch.labels.dim() == 2]
    images, sensitive = ([getattr(batch, name) for batch in batches] for name in ("images", "sensitive"))
    return Batch(torch.cat(images).detach(), torch.cat(labels).detach(), torch.cat(sensitive))


def _stack(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}


def _granted_labels(private: Sequence[Batch], played: Sequence[_Seen], size: int) -> Tensor | None:
    """Return sorted class labels (T, B), soft ones (T, B, classes) of mixtures, or None if private labels are soft."""
    if private[0].labels.dim() != 1:
        return None
    shown = [one.encodings.labels for one in played]
    if all(labels.dim() == 2 and len(labels) == size for labels in shown):
        return torch.stack(shown)
    if size < len(private[0]):
        return torch.stack([labels.sort().values for labels in shown])
    rounds = len(played) // len(private)
    return torch.stack([batch.labels.sort().values for batch in private]).repeat_interleave(rounds, 0)


def _batch_statistics(
    network: nn.Module, private: Sequence[Batch], secrets: Sequence[Tensors]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and variance (T, channels) of each client's batch at the input of each BatchNorm, by its name.

    The network is in evaluation mode, with each client's own private tensors.
    """
    model = copy.deepcopy(network).eval()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def measure(call: LayerCall) -> None:
        rest = [axis for axis in range(call.inputs[0].dim()) if axis != 1]
        variance, mean = torch.var_mean(call.inputs[0], rest, correction=0)
        found.setdefault(call.name, []).append((mean, variance))

    norms = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    with watch(model, norms, before=measure), torch.no_grad():
        for batch, own in zip(private, secrets, strict=True):
            torch.func.functional_call(model, dict(own), (batch.images,))
    return {
        name: (torch.stack([mean for mean, _ in pairs]), torch.stack([variance for _, variance in pairs]))
        for name, pairs in found.items()
    }
