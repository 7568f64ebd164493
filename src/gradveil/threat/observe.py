"""The only door to private data: it lets clients train, and hands an attacker what the threat model grants."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.defences.base import Client, Defence, Server
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.client import train_locally
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.networks.watch import LayerCall, watch
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
    rounds: int = 1,
    public_data: Batch | None = None,
    class_averages: Tensor | None = None,
    alter: Callable[[nn.Module], nn.Module] | None = None,
    early: Sequence[Batch] = (),
    aux: Batch | None = None,
    seed: int = 0,
    first_client: int = 0,
    num_clients: int = 0,
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
        rounds: how many rounds the server looks at, from that one on. It broadcasts the same weights in each, while
            clients draw anew and keep their state: many encodings of the same images. Then FedSGD may take fewer
            images a round than a client has.
        public_data: images from elsewhere, given to an attacker who is granted them.
        class_averages: (classes, C, H, W), likewise.
        alter: how a malicious server changes a copy of the network before it is broadcast; must be granted.
        early: the images of the defence's early clients, one batch each.
        aux: public images that every device has at hand.
        seed: of the clients' random draws.
        first_client: number of the first client; each number has draws of its own.
        num_clients: of the federation, guards included, where there are more than those that are looked at.
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
    whole = len(private[0])
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}.")
    if how.algorithm == "fedsgd" and how.batch_size not in (0, whole) and (rounds == 1 or how.batch_size > whole):
        raise ConfigError(
            f"batch_size of fedsgd must be that of the private batches here ({len(private[0])}, or 0 for all), "
            f"got {how.batch_size}. Give the batch that is sent as private data."
        )
    with global_stream(seed, "observe"):
        server = defence.on_model(copy.deepcopy(network), stream(seed, "observe", "server"))
    hold_private(server, defence)
    side = Server(round_number, server, {}, {}, stream(seed, "observe", "server", round_number))
    everyone = max(num_clients, len(early) + first_client + len(private))
    guards = defence.early_clients(everyone)
    if len(guards) != len(early):
        raise ConfigError(f"early must be a batch for each of the defence's {len(guards)} guards, got {len(early)}.")
    others = [number for number in range(everyone + len(guards)) if number not in guards][first_client:]

    def play(number: int, batch: Batch, times: int) -> list[_Played]:
        return _play(network, batch, defence, how, lr, number, side, aux, seed, times)

    first = {number: play(number, batch, 1)[0].update for number, batch in zip(guards, early, strict=True)}
    side = replace(side, public=defence.public(first, side))
    played = [one for number, batch in zip(others, private, strict=False) for one in play(number, batch, rounds)]
    sent = [one.update for one in played]
    size = min(how.batch_size or whole, whole) if how.algorithm == "fedsgd" else whole
    facts: dict[Knowledge, object] = {
        Knowledge.LABELS: _granted_labels(private, played, size),
        Knowledge.NUM_EXAMPLES: size,
        Knowledge.LOCAL_STEPS: how,
        Knowledge.DEFENCE: defence,
        Knowledge.PUBLIC_DATA: public_data,
        Knowledge.CLASS_AVERAGES: class_averages,
        Knowledge.PRIVATE_STATE: [{**each.before, **each.state} for each in played],
        Knowledge.KEY: [{n: t for n, t in each.before.items() if _is_key(n)} for each in played],
        Knowledge.LOCK: [{n: t for n, t in each.before.items() if not _is_key(n)} for each in played],
    }
    changes = [{n: each.after[n] - t for n, t in each.before.items() if not _is_key(n)} for each in played]
    single = how.num_steps(whole) == 1
    if Knowledge.BATCH_STATISTICS in threat.knows:
        saw = [each.encodings for each in played] if single else [batch for batch in private for _ in range(rounds)]
        facts[Knowledge.BATCH_STATISTICS] = _batch_statistics(server, saw, [each.before for each in played])
    if Knowledge.ENCODINGS in threat.knows and single:
        facts[Knowledge.ENCODINGS] = _joined([one.encodings for one in played])
    channels, height, width = private[0].images.shape[1:]
    return Observation(
        network=server.eval(),
        updates=_stack([update.tensors for update in sent]),
        buffers=_stack([update.buffers for update in sent]),
        shape=(channels, height, width),
        num_classes=num_classes,
        single_step=single,
        threat=threat,
        public=side.public,
        rounds=rounds,
        _facts={knowledge: fact for knowledge, fact in facts.items() if knowledge in threat.knows},
        _step_size=lr,
        _changes=changes if Knowledge.LOCK in threat.knows else [],
        _num_images=whole,
    )


def hold_private(network: nn.Module, defence: Defence) -> None:
    """Make constants of a server's stand-ins for private parameters: nobody sends it their gradient."""
    for name, parameter in network.named_parameters():
        if defence.private(name):
            parameter.requires_grad_(False)


class _Played(NamedTuple):
    """One client's round.

    Attributes:
        update: what it sent, as the server's hook leaves it.
        before: the private tensors of its model at the start.
        after: the same at the end.
        state: what else it keeps.
        encodings: what its network saw.
    """

    update: Update
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, Tensor]
    encodings: Batch


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
    rounds: int,
) -> list[_Played]:
    """One client's rounds, with its own randomness."""
    played = []
    with global_stream(seed, "observe", "client", number):
        module = defence.on_model(copy.deepcopy(network), stream(seed, "observe", "on_model", number))
        net = FlatModel(module, defence.private)
        received = net.shared_vector(server.model.state_dict())
        state: dict[str, Tensor] = {}
        data = batch
        for round_number in range(server.round, server.round + rounds):
            rng = stream(seed, "client", number, "round", round_number)
            start = net.shared_tensors(received)
            client = Client(number, round_number, module, start, data, server.public, state, rng, aux)
            if round_number == server.round:
                data = defence.on_data(batch, client)
                client = replace(client, data=data)
            before = net.private_tensors()
            order = stream(seed, "batches", number, "round", round_number)
            shown: list[Batch] = []
            update = train_locally(net, received, client, defence, how, lr, order, shown.append)
            arrived = defence.on_server(update, replace(server, round=round_number))
            played.append(_Played(arrived, before, net.private_tensors(), dict(state), _joined(shown)))
    return played


def _joined(batches: Sequence[Batch]) -> Batch:
    """One batch after the other, copied; labels are soft where any are."""
    soft = max(batch.labels.dim() for batch in batches) == 2
    labels = [batch.labels for batch in batches if not soft or batch.labels.dim() == 2]
    images, sensitive = ([getattr(batch, name) for batch in batches] for name in ("images", "sensitive"))
    return Batch(torch.cat(images).detach(), torch.cat(labels).detach(), torch.cat(sensitive))


def _stack(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}


def _granted_labels(private: Sequence[Batch], played: Sequence[_Played], size: int) -> Tensor | None:
    """(T, B) class labels, sorted; (T, B, classes) where clients trained on mixtures; None where they came so."""
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
    """Mean and variance (T, channels) of each client's batch at the input of each BatchNorm, in evaluation mode.

    Each client has its own values for private tensors.
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
