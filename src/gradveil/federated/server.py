"""The server's side: who trains, how updates are weighted and added, and one round from start to end."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.defences.base import Defence, Server
from gradveil.defences.parts.reports import mean_over_clients
from gradveil.errors import DivergedError, GradveilError, MessageError
from gradveil.federated.aggregation import Aggregate, mean_of, update_weights
from gradveil.federated.answers import ExpectedUpdate, recover
from gradveil.federated.client import Score
from gradveil.federated.secure_sum import Quantiser, SecureSum, secure_sum
from gradveil.randomness import stream
from gradveil.types import Tensors, Update


class Engine(Protocol):
    """Where clients run: in this process, in worker processes, or on other machines.

    Attributes:
        fewest: number of clients without which a round is not used, as some may drop out.
    """

    fewest: int

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterable["Sent | Missing | Summed"]:
        """Let clients train from ``model``; yield what each sends, or why it did not, in the order of ``clients``.

        A `Summed` stands for all clients in it.
        """
        ...

    def score(self, round_number: int, requests: Sequence["ScoreRequest"], model: Tensors) -> list[Score]:
        """Return one score per request, of models after a round."""
        ...


@dataclass(frozen=True)
class Sent:
    """What a server gets from one client.

    Attributes:
        client: its number.
        update: the update it sent.
        reports: the numbers that its hooks recorded, by name; empty if the client keeps them.
        expected: what the update must be after ``on_server``; None for a client on this machine, which is trusted.
    """

    client: int
    update: Update
    reports: Mapping[str, float] = field(default_factory=dict)
    expected: ExpectedUpdate | None = None


@dataclass(frozen=True)
class Missing:
    """A client on another machine whose answer is not there, or can't be used.

    Attributes:
        client: its number.
        error: why.
    """

    client: int
    error: GradveilError


@dataclass(frozen=True)
class Summed:
    """The sum of several clients' weighted updates, from secure aggregation over a network.

    Attributes:
        clients: whose updates are in it.
        total: the sum, in float64.
        reports: the numbers that hooks recorded, one mapping per client that does not keep them.
    """

    clients: tuple[int, ...]
    total: Update
    reports: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True)
class ScoreRequest:
    """Images to score a model on.

    Attributes:
        images: ``test``, ``sensitive`` (all clients' sensitive images) or ``own`` (the client's training images).
        client: score this client's model, with its private tensors; None is the server's model.
    """

    images: str
    client: int | None = None


def sample_clients(settings: TrainSettings, sizes: Sequence[int], round_number: int) -> list[int]:
    """Return the clients drawn for a round, in order; with replacement a client can appear twice."""
    rng = stream(settings.seed, "sampling", round_number)
    count = settings.num_sampled
    if settings.sampling == "uniform":
        return torch.randperm(len(sizes), generator=rng)[:count].tolist()
    weights = torch.ones(len(sizes)) if settings.sampling == "uniform-replace" else torch.tensor(sizes).double()
    return torch.multinomial(weights, count, replacement=True, generator=rng).tolist()


def round_weights(
    settings: TrainSettings, defence: Defence, sizes: Sequence[int], round_number: int
) -> dict[int, float]:
    """Return the weight of each client that trains in a round: those drawn, and early clients."""
    early, drawn = defence.early_clients(len(sizes)), sample_clients(settings, sizes, round_number)
    if defence.counts_early:
        return update_weights(settings, sizes, drawn, early)
    weights = update_weights(settings, sizes, [client for client in drawn if client not in early])
    return weights | dict.fromkeys(early, 0.0)


def last_rounds(settings: TrainSettings, defence: Defence, sizes: Sequence[int], done: int) -> dict[int, int]:
    """Return the last of the first ``done`` rounds in which each client trained; only clients that did train."""
    early, found = defence.early_clients(len(sizes)), dict[int, int]()
    for number in range(1, done + 1):
        found |= dict.fromkeys([*early, *sample_clients(settings, sizes, number)], number)
    return found


def learning_rate(settings: TrainSettings, round_number: int) -> float:
    """Return the clients' learning rate in a round; the first round is 1.

    Example:
        >>> settings = TrainSettings(rounds=9, lr=1.0, lr_decay=0.5, lr_steps=(3,), lr_factor=0.1)
        >>> [learning_rate(settings, r) for r in (1, 2, 3, 4)]
        [1.0, 0.5, 0.25, 0.0125]
    """
    passed = sum(round_number > step for step in settings.lr_steps)
    return settings.lr * settings.lr_decay ** (round_number - 1) * settings.lr_factor**passed


@dataclass(frozen=True)
class Round:
    """One finished round.

    Attributes:
        number: of the round, from 1.
        clients: the clients whose updates were used, each once.
        received: the model they started from.
        sent: the update of each client; empty unless the round is one of ``save_rounds``.
        recovered: the same updates after ``on_server``, as they were aggregated.
        model: the model after aggregation.
        reports: the mean of each number that hooks recorded, over the clients that recorded it.
        public: what the server broadcast beside the model.
        weights: the weight of each client's update in the sum; 0 for a guard that is not counted.
        early: the clients that trained before the others, whose updates the server sees whatever the aggregation.
        dropped: the clients that the server went on without, each with the reason.
        norms: the norm of the update of each client on another machine.
        quantised: the sum of all updates but early ones, if it was made of whole numbers (``sum_bits``), else None.
    """

    number: int
    clients: tuple[int, ...]
    received: Tensors
    sent: Mapping[int, Update]
    recovered: Mapping[int, Update]
    model: dict[str, Tensor]
    reports: Mapping[str, float] = field(default_factory=dict)
    public: Tensors = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    early: tuple[int, ...] = ()
    dropped: Mapping[int, str] = field(default_factory=dict)
    norms: Mapping[int, float] = field(default_factory=dict)
    quantised: SecureSum | None = None

    @property
    def mean(self) -> Update:
        """The weighted mean of the updates of all clients but early ones: what secure aggregation shows a server.

        Only rounds of ``save_rounds`` have it. With ``sum_bits`` it is that of the quantised sum.
        """
        others = [client for client in self.clients if client not in self.early]
        if self.quantised is not None:
            whole = sum(self.weights[client] for client in others) or 1.0
            mean = self.quantised.total * (1 / whole)
            tensors, buffers = (
                {name: tensor.to(self.received[name].dtype) for name, tensor in part.items()}
                for part in (mean.tensors, mean.buffers)
            )
            return Update(tensors, mean.num_examples, buffers)
        return mean_of([self.recovered[client] for client in others], [self.weights[client] for client in others])


def play_round(
    number: int,
    settings: TrainSettings,
    defence: Defence,
    engine: Engine,
    sizes: Sequence[int],
    network: nn.Module,
    model: dict[str, Tensor],
    state: MutableMapping[str, Tensor],
) -> Round:
    """Play one round of federated learning, from the global ``model`` to the next.

    ``network`` is the server's copy of the network, which hooks can read; ``state`` is the server's own. A client whose
    answer is missing or invalid ends the training, or with ``bad_answers = drop`` is left out; an early client is not.
    """
    lr = learning_rate(settings, number)
    keep = number in settings.save_rounds
    sent: dict[int, Update] = {}
    kept: dict[int, Update] = {}
    reports: list[Mapping[str, float]] = []
    dropped: dict[int, str] = {}
    norms: dict[int, float] = {}
    apart: dict[int, Update] = {}  # updates that are added up as whole numbers
    sums: list[Update] = []  # sums of such updates, from other machines
    server = Server(number, network, {}, state, stream(settings.seed, "server", number), lr)

    # Step 1: choose who trains; early clients always do.
    early = defence.early_clients(len(sizes))
    weights = round_weights(settings, defence, sizes, number)
    aggregate = Aggregate(sum(weights.values()))

    def collect(clients: Sequence[int], side: Server) -> Iterator[tuple[int, Update]]:
        for answer in engine.train(number, clients, model, side.public, lr):
            if isinstance(answer, Summed):
                sums.append(answer.total)
                reports.extend(answer.reports)
                continue
            client, usable = answer.client, _usable(answer, defence, side)
            if isinstance(usable, Missing):
                if settings.bad_answers == "stop" or client in early:
                    raise usable.error
                dropped[client] = str(usable.error)
                continue
            arrived, recovered = usable
            if keep:
                sent[client], kept[client] = arrived.update, recovered
            if arrived.expected is not None:
                norms[client] = float(recovered.norm())
            reports.append(arrived.reports)
            if settings.sum_bits and client not in early:
                apart[client] = recovered
            else:
                aggregate.add(recovered, weights[client])
            yield client, recovered

    # Step 2: early clients (a guard) train first; the defence makes its broadcast to the others of their updates.
    first = dict(collect(early, server))
    public = defence.public(first, server)

    # Step 3: the others train, and each update is added when it arrives.
    others = [client for client in weights if client not in early]
    server = replace(server, public=public)
    for _ in collect(others, server):
        pass

    # Step 4: the sum of the weighted updates moves the global model; the defence may make a step of its own of it.
    used = tuple(client for client in (*early, *others) if client not in dropped)
    _require_enough(len(used) - len(early), defence, engine.fewest, dropped)
    quantised = _add_quantised(aggregate, apart, weights, settings, sums)
    total = defence.on_aggregate(aggregate.total(_rescaled(weights, dropped)), server)
    means = mean_over_clients(reports)
    with naming_the_largest(number, norms):
        moved = aggregate.apply(model, total)
    return Round(number, used, model, sent, kept, moved, means, public, weights, early, dropped, norms, quantised)


def _add_quantised(
    aggregate: Aggregate,
    updates: Mapping[int, Update],
    weights: Mapping[int, float],
    settings: TrainSettings,
    sums: Sequence[Update],
) -> SecureSum | None:
    """Add updates as whole numbers, or a sum of them; return what that gave, or None if there are none."""
    for total in sums:
        aggregate.add(total, 1.0)
        return SecureSum(total)
    if not updates:
        return None
    how = Quantiser(settings.sum_bits, settings.sum_range)
    found = secure_sum(list(updates.values()), [weights[client] for client in updates], how)
    aggregate.add(found.total, 1.0)
    return found


def _require_enough(there: int, defence: Defence, fewest: int, dropped: Mapping[int, str]) -> None:
    """Raise if fewer clients are left than a sum needs for the defence's noise, or the server for a round."""
    if there < defence.fewest_clients:
        raise MessageError(
            f"A sum under defence {defence.spec!r} needs {defence.fewest_clients} clients or more for its noise, got "
            f"{there}: the others dropped out. State a lower minimum with clients=, which adds noise."
        )
    if there < fewest and dropped:
        raise MessageError(
            f"A round needs {fewest} clients or more (min-clients), got {there}. {' '.join(dropped.values())}"
        )


@contextmanager
def naming_the_largest(number: int, norms: Mapping[int, float]) -> Iterator[None]:
    """If the training diverges, say which client on another machine sent the largest update of the round."""
    try:
        yield
    except DivergedError as error:
        if not norms:
            raise
        client = max(norms, key=norms.__getitem__)
        raise DivergedError(
            f"{error} The largest update of round {number} came from client {client}, with norm {norms[client]:.3g}; "
            "the server's max-norm bounds it."
        ) from error


def _usable(answer: Sent | Missing, defence: Defence, side: Server) -> tuple[Sent, Update] | Missing:
    """Return what a client sent and its update after ``on_server``, or why it can't be used."""
    if isinstance(answer, Missing):
        return answer
    try:
        return answer, recover(defence, answer.update, side, answer.expected)
    except MessageError as error:
        return Missing(answer.client, MessageError(f"The update of client {answer.client} was not used. {error}"))


def _rescaled(weights: Mapping[int, float], dropped: Mapping[int, str]) -> float:
    """Return the factor that gives the weights of the remaining clients the sum of all.

    Example:
        >>> _rescaled({0: 0.25, 1: 0.25, 2: 0.5}, {2: "no answer"})
        2.0
    """
    if not dropped:
        return 1.0
    left = sum(weight for client, weight in weights.items() if client not in dropped)
    if left <= 0:
        raise MessageError(
            f"A round needs the update of at least one client, got none: all {len(dropped)} were dropped. "
            f"The first reason: {next(iter(dropped.values()))}"
        )
    return sum(weights.values()) / left
