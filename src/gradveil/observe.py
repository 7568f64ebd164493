"""The only door to private data: it lets clients train, and hands an attacker what the threat model grants."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.client import LocalSettings, train_locally
from gradveil.defences.base import Client, Defence, Server
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.flat import FlatModel
from gradveil.randomness import global_stream, stream
from gradveil.threat import Knowledge, Observation, ThreatModel
from gradveil.types import Batch, Tensors, Update


def observe(
    network: nn.Module,
    private: Sequence[Batch],
    *,
    threat: ThreatModel,
    num_classes: int,
    defence: Defence | None = None,
    how: LocalSettings | None = None,
    lr: float = 1.0,
    round_number: int = 1,
    public_data: Batch | None = None,
    class_averages: Tensor | None = None,
    alter: Callable[[nn.Module], nn.Module] | None = None,
    early: Sequence[Batch] = (),
    aux: Batch | None = None,
    seed: int = 0,
    first_client: int = 0,
) -> Observation:
    """Let each client train on its private images as it would in a round, and return what a server then has.

    Updates are as the server's hook leaves them. Early clients of the defence (a guard) train first.

    Args:
        network: the undefended network with the broadcast weights; left as it is.
        private: one batch a client; all of the same size.
        threat: what the server knows beside model and updates.
        num_classes: of the task.
        defence: what the clients run; none by default.
        how: local training; by default FedSGD, one gradient of the whole batch with BatchNorm frozen (Dropout stays
            on, as in any training).
        lr: the clients' learning rate.
        round_number: which round it is, for defences that change over time.
        public_data: images from elsewhere, given to an attacker who is granted them.
        class_averages: (classes, C, H, W), likewise.
        alter: how a malicious server changes a copy of the network before it is broadcast; must be granted.
        early: the images of the defence's early clients, one batch each.
        aux: public images that every device has at hand.
        seed: of the clients' random draws.
        first_client: number of the first client; each number has draws of its own.
    """
    if not private or len({batch.images.shape for batch in private}) != 1:
        raise ConfigError(f"private must be batches of one shape, got {[tuple(b.images.shape) for b in private]}.")
    if alter is not None:
        if Knowledge.ALTERS_MODEL not in threat.knows:
            raise ThreatModelError(
                "alter needs a server that alters the model, got a threat model without alters-model."
            )
        network = alter(copy.deepcopy(network))
    defence = defence or Defence()
    how = how or LocalSettings(algorithm="fedsgd", batch_size=0, batch_norm="freeze")
    if how.algorithm == "fedsgd" and how.batch_size not in (0, len(private[0])):
        raise ConfigError(
            f"batch_size of fedsgd must be that of the private batches here ({len(private[0])}, or 0 for all), "
            f"got {how.batch_size}. Give the batch that is sent as private data."
        )
    with global_stream(seed, "observe"):
        server = defence.on_model(copy.deepcopy(network), stream(seed, "observe", "server"))
    hold_private(server, defence)
    side = Server(round_number, server, {}, {}, stream(seed, "observe", "server", round_number))
    guards = defence.early_clients(len(early) + first_client + len(private))
    if len(guards) != len(early):
        raise ConfigError(f"early must be a batch for each of the defence's {len(guards)} guards, got {len(early)}.")
    others = [number for number in range(len(guards) + first_client + len(private)) if number not in guards]

    def play(number: int, batch: Batch) -> _Played:
        played = _play(network, batch, defence, how, lr, number, side, aux, seed)
        return played._replace(update=defence.on_server(played.update, side))

    first = {number: play(number, batch).update for number, batch in zip(guards, early, strict=True)}
    side = replace(side, public=defence.public(first, side))
    played = [play(number, batch) for number, batch in zip(others[first_client:], private, strict=True)]
    sent = [each.update for each in played]
    facts: dict[Knowledge, object] = {
        Knowledge.LABELS: _sorted_labels(private),
        Knowledge.NUM_EXAMPLES: len(private[0]),
        Knowledge.LOCAL_STEPS: how,
        Knowledge.DEFENCE: defence,
        Knowledge.PUBLIC_DATA: public_data,
        Knowledge.CLASS_AVERAGES: class_averages,
        Knowledge.PRIVATE_STATE: [{**each.before, **each.state} for each in played],
        Knowledge.KEY: [{n: t for n, t in each.before.items() if _is_key(n)} for each in played],
        Knowledge.LOCK: [{n: t for n, t in each.before.items() if not _is_key(n)} for each in played],
    }
    changes = [{n: each.after[n] - t for n, t in each.before.items() if not _is_key(n)} for each in played]
    if Knowledge.BATCH_STATISTICS in threat.knows:
        facts[Knowledge.BATCH_STATISTICS] = _batch_statistics(server, private, [each.before for each in played])
    channels, height, width = private[0].images.shape[1:]
    return Observation(
        network=server.eval(),
        updates=_stack([update.tensors for update in sent]),
        buffers=_stack([update.buffers for update in sent]),
        shape=(channels, height, width),
        num_classes=num_classes,
        single_step=how.num_steps(len(private[0])) == 1,
        threat=threat,
        public=side.public,
        _facts={knowledge: fact for knowledge, fact in facts.items() if knowledge in threat.knows},
        _step_size=lr,
        _changes=changes if Knowledge.LOCK in threat.knows else [],
    )


def hold_private(network: nn.Module, defence: Defence) -> None:
    """Make constants of a server's stand-ins for private parameters: nobody sends it their gradient."""
    for name, parameter in network.named_parameters():
        if defence.private(name):
            parameter.requires_grad_(False)


class _Played(NamedTuple):
    """One client's round: what it sends, the private tensors of its model before and after, and its other state."""

    update: Update
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, Tensor]


def _is_key(name: str) -> bool:
    return name.rpartition(".")[2] == "key"


def _play(
    network: nn.Module,
    batch: Batch,
    defence: Defence,
    how: LocalSettings,
    lr: float,
    number: int,
    server: Server,
    aux: Batch | None,
    seed: int,
) -> _Played:
    """One client's round, with its own randomness."""
    with global_stream(seed, "observe", "client", number):
        module = defence.on_model(copy.deepcopy(network), stream(seed, "observe", "on_model", number))
        net = FlatModel(module, defence.private)
        received = net.shared_vector(server.model.state_dict())
        before, state = net.private_tensors(), dict[str, Tensor]()
        rng = stream(seed, "client", number, "round", server.round)
        client = Client(
            number, server.round, module, net.shared_tensors(received), batch, server.public, state, rng, aux
        )
        client = replace(client, data=defence.on_data(batch, client))
        order = stream(seed, "batches", number, "round", server.round)
        update = train_locally(net, received, client, defence, how, lr, order)
    return _Played(update, before, net.private_tensors(), state)


def _stack(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}


def _sorted_labels(private: Sequence[Batch]) -> Tensor | None:
    """(T, B) class labels, sorted; None for soft ones."""
    if private[0].labels.dim() != 1:
        return None
    return torch.stack([batch.labels.sort().values for batch in private])


def _batch_statistics(
    network: nn.Module, private: Sequence[Batch], secrets: Sequence[Tensors]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance (T, channels) of each client's batch at the input of each BatchNorm, in evaluation mode.

    Each client has its own values for private tensors.
    """
    model = copy.deepcopy(network).eval()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def watch(name: str, layer: nn.Module) -> None:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rest = [axis for axis in range(inputs[0].dim()) if axis != 1]
            variance, mean = torch.var_mean(inputs[0], rest, correction=0)
            found.setdefault(name, []).append((mean, variance))

        layer.register_forward_pre_hook(record)

    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            watch(name, layer)
    with torch.no_grad():
        for batch, own in zip(private, secrets, strict=True):
            torch.func.functional_call(model, dict(own), (batch.images,))
    return {
        name: (torch.stack([mean for mean, _ in pairs]), torch.stack([variance for _, variance in pairs]))
        for name, pairs in found.items()
    }
