"""A tap on a training: what the server sees in chosen rounds, and what only scores and granted facts may use."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from gradveil.defences.base import Defence, Server
from gradveil.errors import DataError
from gradveil.federated.client import Played
from gradveil.federated.protocol import Protocol
from gradveil.federated.server import Round
from gradveil.limits import parse_json
from gradveil.randomness import stream
from gradveil.storage import load_tensors, make_folder, read_metadata, save_tensors
from gradveil.threat.knowledge import PublicKnowledge, ThreatModel
from gradveil.threat.model import Observation
from gradveil.threat.seen import SUM, Seen, assembled, hold_private, joined, summed
from gradveil.types import Batch, Tensors, Update


@dataclass(frozen=True)
class TappedRound:
    """One round of a training, as it was.

    Attributes:
        number: of the round, from 1.
        lr: the clients' learning rate in it.
        model: the state of the server's network when it was broadcast; private parts are the server's own stand-ins.
        public: what was broadcast beside the model.
        seen: the rounds of the chosen clients, in the order in which they were chosen.
        digests: the digest of everything that the server received: of every client's update, by the client's number,
            or under secure aggregation of early clients' updates and, by the number `SUM`, of the others' mean.
        mean: the mean of all updates but early ones, if aggregation was secure; else None.
    """

    number: int
    lr: float
    model: dict[str, Tensor]
    public: dict[str, Tensor]
    seen: tuple[Seen, ...]
    digests: dict[int, str]
    mean: Update | None = None

    def of(self, client: int) -> Seen:
        """Return the round of one chosen client, or of all of them together for `SUM`."""
        if client == SUM and self.mean is not None:
            return summed(self.seen, self.mean)
        return next(one for one in self.seen if one.client == client)

    def save(self, path: Path) -> None:
        """Save the round as one file that only its owner can read."""
        make_folder(path.parent, 0o700)
        tensors = _named("model", self.model) | _named("public", self.public)
        for one in self.seen:
            for part, values in _parts(one).items():
                tensors |= _named(f"{one.client}/{part}", values)
        if self.mean is not None:
            tensors |= _named("mean", self.mean.tensors) | _named("mean buffers", self.mean.buffers)
        facts = {
            "mean": None if self.mean is None else self.mean.num_examples,
            "round": self.number,
            "lr": self.lr,
            "examples": {str(one.client): one.update.num_examples for one in self.seen},
            "digests": {str(client): digest for client, digest in self.digests.items()},
        }
        save_tensors(path, tensors, {key: json.dumps(value) for key, value in facts.items()}, mode=0o600)


def load_tapped(path: Path) -> TappedRound:
    """Load a round that `TappedRound.save` wrote. Raise `DataError` if the file is missing or not whole."""
    tensors, kept = load_tensors(path), read_metadata(path)
    try:
        facts = {key: parse_json(kept[key]) for key in ("round", "lr", "examples", "digests", "mean")}
        seen = tuple(_seen(tensors, int(client), count) for client, count in facts["examples"].items())
        digests = {int(client): str(digest) for client, digest in facts["digests"].items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} must be a tapped round of this version of gradveil, got: {error!r}.") from error
    model, public, tensors_of_mean, buffers = (
        _below(tensors, part) for part in ("model", "public", "mean", "mean buffers")
    )
    mean = None if facts["mean"] is None else Update(tensors_of_mean, facts["mean"], buffers)
    return TappedRound(facts["round"], facts["lr"], model, public, seen, digests, mean)


@dataclass
class Tap:
    """Records chosen clients' rounds of a `Simulation`, see `Simulation.attach`.

    Attributes:
        clients: the clients to record, by the number of the round; each must train in that round. Under secure
            aggregation these must be all clients of the round but early ones.
        aggregation: what the server sees: ``none``, each update, or ``secure``, only their mean.
        rounds: what was recorded, by the number of the round.
    """

    clients: Mapping[int, Sequence[int]]
    aggregation: str = "none"
    rounds: dict[int, TappedRound] = field(default_factory=dict)
    _trained: dict[int, "_Trained"] = field(default_factory=dict, repr=False)

    def wants(self, client: int, round_number: int) -> bool:
        """Return whether this client's round is to be recorded."""
        return client in self.clients.get(round_number, ())

    def trained(
        self, client: int, private: Batch, shown: Sequence[Batch], played: Played, state: Mapping[str, Tensor]
    ) -> None:
        """Record a client's side of its round: the images behind its update, those its network saw, its state."""
        encodings = joined(shown)
        if len(shown) > 1:  # only the labels of several batches can be granted
            encodings = Batch(encodings.images[:0], encodings.labels, encodings.sensitive[:0])
        self._trained[client] = _Trained(private, encodings, played, _copied(state))

    def arrived(self, played: Round, network: nn.Module, lr: float) -> None:
        """Record the server's side of a round: ``network`` as it was broadcast, and the updates that arrived."""
        trained, self._trained = self._trained, {}
        if played.number not in self.clients:
            return
        chosen = self.clients[played.number]
        mean = played.mean if self.aggregation == "secure" else None
        apart = played.recovered if mean is None else {client: played.recovered[client] for client in played.early}
        received = dict(apart) if mean is None else {**apart, SUM: mean}
        self.rounds[played.number] = TappedRound(
            number=played.number,
            lr=lr,
            model=_copied(network.state_dict()),
            public=_copied(played.public),
            seen=tuple(trained[client].seen(client, played.recovered[client]) for client in chosen),
            digests={client: update.sha256() for client, update in received.items()},
            mean=mean,
        )


def observation(
    tapped: TappedRound,
    clients: Sequence[int],
    network: nn.Module,
    *,
    defence: Defence,
    protocol: Protocol,
    threat: ThreatModel,
    num_classes: int,
    public: PublicKnowledge | None = None,
) -> Observation:
    """Return what the server of a training has of some tapped clients, who must have equally many private images.

    ``network`` is the server's network, after ``on_model``; a copy of it gets the broadcast state. The protocol's
    learning rate must be that of the round. Under secure aggregation `SUM` is the only client there is to see.
    """
    module = copy.deepcopy(network)
    module.load_state_dict(tapped.model)
    hold_private(module, defence)
    server = Server(tapped.number, module, tapped.public, {}, stream(0, "tap", tapped.number))
    played = [tapped.of(client) for client in clients]
    device = next(module.parameters()).device
    return assembled(
        server,
        [_on(one, str(device)) for one in played],
        defence=defence,
        protocol=protocol,
        threat=threat,
        num_classes=num_classes,
        public=public,
    )


@dataclass(frozen=True)
class _Trained:
    """A client's side of its round."""

    private: Batch
    encodings: Batch
    played: Played
    state: dict[str, Tensor]

    def seen(self, client: int, update: Update) -> Seen:
        kept = Update(_copied(update.tensors), update.num_examples, _copied(update.buffers))
        before, after = self.played.before, self.played.after
        return Seen(client, self.private, kept, before, after, self.state, self.encodings)


def _copied(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _named(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _below(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{prefix}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")
    }


def _parts(one: Seen) -> dict[str, Tensors]:
    """Return all tensors of a client's round, by what they are."""
    return {
        "private": vars(one.private),
        "encodings": vars(one.encodings),
        "update": one.update.tensors,
        "buffers": one.update.buffers,
        "before": one.before,
        "after": one.after,
        "state": one.state,
    }


def _seen(tensors: Tensors, client: int, num_examples: int) -> Seen:
    """Return the inverse of `_parts`."""
    own = {part: _below(tensors, f"{client}/{part}") for part in ("update", "buffers", "before", "after", "state")}
    private, encodings = (_batch(_below(tensors, f"{client}/{part}")) for part in ("private", "encodings"))
    update = Update(own["update"], num_examples, own["buffers"])
    return Seen(client, private, update, own["before"], own["after"], own["state"], encodings)


def _batch(tensors: Tensors) -> Batch:
    return Batch(tensors["images"], tensors["labels"], tensors["sensitive"])


def _on(one: Seen, device: str) -> Seen:
    """Return a client's round on a device."""
    update, before, after, state = (
        {name: tensor.to(device) for name, tensor in part.items()}
        for part in (one.update.tensors, one.before, one.after, one.state)
    )
    buffers = {name: tensor.to(device) for name, tensor in one.update.buffers.items()}
    sent = Update(update, one.update.num_examples, buffers)
    return Seen(one.client, one.private.to(device), sent, before, after, state, one.encodings.to(device), one.clients)
