"""Clients' rounds as they happened behind the door, and the one place where an `Observation` is made of them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.defences.base import Defence, Server
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.networks.watch import LayerCall, watch
from gradveil.threat.first_step import behind_first_step
from gradveil.threat.knowledge import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.mixtures import mixing_of
from gradveil.threat.model import Lock, Observation
from gradveil.types import Batch, Tensors, Update


@dataclass(frozen=True)
class Seen:
    """One client's round.

    Attributes:
        client: its number.
        private: the private images, as they were before the defence changed them: the client's, or those of the round.
        update: what it sent, after the server's hook.
        before: the private tensors of its model before training.
        after: the same after training.
        state: the rest of its private state after the round.
        encodings: the images that its network saw.
        clients: number of clients whose rounds these are; more than one for a mean.
    """

    client: int
    private: Batch
    update: Update
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state: dict[str, Tensor]
    encodings: Batch
    clients: int = 1


def assembled(
    server: Server,
    played: Sequence[Seen],
    *,
    defence: Defence,
    protocol: Protocol,
    threat: ThreatModel,
    num_classes: int,
    public: PublicKnowledge | None = None,
    looks: int = 1,
) -> Observation:
    """Return what a server has after these clients' rounds: their updates, and the facts that are granted.

    ``played`` holds ``looks`` rounds of each client, which stand together. ``server.model`` is set to evaluation mode.
    """
    private = [one.private for one in played[::looks]]
    channels, height, width = private[0].images.shape[1:]
    facts = _own_facts(defence, protocol.local, private, played) | _public_facts(public or PublicKnowledge())
    facts |= _shown_facts(protocol.local, server, played, threat)
    single = protocol.local.num_steps(len(private[0])) == 1
    updates = _stack([one.update.tensors for one in played])
    if single and protocol.local.is_adam:
        gradients = behind_first_step(updates, server.model, protocol.local, protocol.lr)
        updates = {name: gradient * -protocol.lr for name, gradient in gradients.items()}
    return Observation(
        network=server.model.eval(),
        updates=updates,
        buffers=_stack([one.update.buffers for one in played]),
        shape=(channels, height, width),
        num_classes=num_classes,
        single_step=single,
        threat=threat,
        public=server.public,
        rounds=looks,
        clients=played[0].clients,
        _facts={knowledge: fact for knowledge, fact in facts.items() if knowledge in threat.knows},
        _step_size=protocol.lr,
        _batch_norm=protocol.local.batch_norm,
        _dropout=protocol.local.dropout,
        _num_images=len(private[0]),
    )


SUM = -1
"""Stands for the number of a client if an update is the mean of several clients' updates."""


def summed(played: Sequence[Seen], mean: Update) -> Seen:
    """Return the round of several clients as one: their images together, and the mean of their updates.

    The private tensors and states of different clients can't be combined, so there are none.
    """
    private, encodings = (joined([getattr(one, part) for one in played]) for part in ("private", "encodings"))
    return Seen(SUM, private, mean, {}, {}, {}, encodings, len(played))


def hold_private(network: nn.Module, defence: Defence) -> None:
    """Freeze the server's stand-ins for private parameters: no client sends their gradient."""
    for name, parameter in network.named_parameters():
        if defence.private(name):
            parameter.requires_grad_(False)


def _own_facts(
    defence: Defence, how: LocalSettings, private: Sequence[Batch], played: Sequence[Seen]
) -> dict[Knowledge, object]:
    """Return the facts about the clients' data, training and private tensors."""
    size = how.images_per_update(len(private[0]))
    return {
        Knowledge.LABELS: _granted_labels(private, played, size),
        Knowledge.NUM_EXAMPLES: size,
        Knowledge.LOCAL_STEPS: how,
        Knowledge.DEFENCE: defence,
        Knowledge.PRIVATE_STATE: [{**one.before, **one.state} for one in played],
        Knowledge.KEY: [{name: t for name, t in one.before.items() if _is_key(name)} for one in played],
        Knowledge.LOCK: [_lock(one) for one in played],
    }


def _public_facts(public: PublicKnowledge) -> dict[Knowledge, object]:
    return {Knowledge.PUBLIC_DATA: public.public_data, Knowledge.CLASS_AVERAGES: public.class_averages}


def _shown_facts(
    how: LocalSettings, server: Server, played: Sequence[Seen], threat: ThreatModel
) -> dict[Knowledge, object]:
    """Return the facts about the images that the networks saw; only granted ones, as they take time to compute."""
    facts: dict[Knowledge, object] = {}
    single = how.num_steps(len(played[0].private)) == 1
    if Knowledge.BATCH_STATISTICS in threat.knows:
        shown = [one.encodings if single else one.private for one in played]
        facts[Knowledge.BATCH_STATISTICS] = _batch_statistics(server.model, shown, [one.before for one in played])
    if Knowledge.ENCODINGS in threat.knows and single:
        facts[Knowledge.ENCODINGS] = joined([one.encodings for one in played])
    if Knowledge.MIXING in threat.knows and single:
        shares = [mixing_of(one.encodings.images, one.private.images) for one in played]
        there = [one for one in shares if one is not None]
        facts[Knowledge.MIXING] = torch.stack(there) if len(there) == len(shares) else None
    return facts


def _is_key(name: str) -> bool:
    return name.rpartition(".")[2] == "key"


def _lock(one: Seen) -> Lock:
    before = {name: tensor for name, tensor in one.before.items() if not _is_key(name)}
    return Lock(before, {name: one.after[name] - tensor for name, tensor in before.items()})


def joined(batches: Sequence[Batch]) -> Batch:
    """Return a copy of all batches as one; its labels are soft if those of any batch are."""
    soft = max(batch.labels.dim() for batch in batches) == 2
    labels = [batch.labels for batch in batches if not soft or batch.labels.dim() == 2]
    images, sensitive = ([getattr(batch, name) for batch in batches] for name in ("images", "sensitive"))
    return Batch(torch.cat(images).detach(), torch.cat(labels).detach(), torch.cat(sensitive))


def _stack(parts: Sequence[Tensors]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}


def _granted_labels(private: Sequence[Batch], played: Sequence[Seen], size: int) -> Tensor | None:
    """Return sorted class labels (T, B), soft ones (T, B, classes) of mixtures, or None if private labels are soft."""
    if private[0].labels.dim() != 1:
        return None
    shown = [one.encodings.labels for one in played]
    if all(labels.dim() == 2 and len(labels) == size for labels in shown):
        return torch.stack(shown)
    if size < len(private[0]):
        return torch.stack([labels.sort().values for labels in shown])
    looks = len(played) // len(private)
    return torch.stack([batch.labels.sort().values for batch in private]).repeat_interleave(looks, 0)


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
