"""The server's side: who trains, how updates are weighted and added, and one round from start to end."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.defences.base import Defence, Server
from gradveil.defences.parts.reports import mean_over_clients
from gradveil.errors import DefenceError, DivergedError
from gradveil.federated.client import Score
from gradveil.randomness import stream
from gradveil.types import Tensors, Update


class Engine(Protocol):
    """Where clients run: in this process, in worker processes, or on other machines."""

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterable["Sent"]:
        """Let clients train from ``model``; yield what each sends, in the order of ``clients``."""
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
    """

    client: int
    update: Update
    reports: Mapping[str, float] = field(default_factory=dict)


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


def last_rounds(settings: TrainSettings, defence: Defence, sizes: Sequence[int], done: int) -> dict[int, int]:
    """Return the last of the first ``done`` rounds in which each client trained; only clients that did train."""
    early, found = defence.early_clients(len(sizes)), dict[int, int]()
    for number in range(1, done + 1):
        found |= dict.fromkeys([*early, *sample_clients(settings, sizes, number)], number)
    return found


def update_weights(
    settings: TrainSettings, sizes: Sequence[int], drawn: Sequence[int], early: Sequence[int] = ()
) -> dict[int, float]:
    r"""Return the weight of each participating client's update: early clients always take part, others were drawn.

    ``size``: :math:`n_k / \sum_{j \in S} n_j`; ``uniform``: :math:`1 / K`; ``unbiased``: :math:`p_k N / K` with
    :math:`p_k = n_k / n`, which need not add up to one (an early client, never left to chance, has :math:`p_k`). A
    client drawn m times counts m times.

    Reference: McMahan et al. 2017 (``size``); Li et al. 2020, https://arxiv.org/abs/1907.02189, Schemes I
    (``--sampling size-replace --weighting uniform``) and II (``--weighting unbiased``).

    Example:
        >>> update_weights(TrainSettings(clients=4, sampled=2), [10, 30, 20, 40], [0, 1])
        {0: 0.25, 1: 0.75}
        >>> update_weights(TrainSettings(clients=4, sampled=2, weighting="unbiased"), [10, 30, 20, 40], [0, 1])
        {0: 0.2, 1: 0.6}
    """
    present = [*early, *(client for client in drawn if client not in early)]
    times = Counter(present)
    if not present:
        return {}
    if settings.weighting == "uniform":
        return {client: count / len(present) for client, count in times.items()}
    if settings.weighting == "unbiased":
        factor = len(sizes) / len(drawn) / sum(sizes)
        fixed = {client: sizes[client] / sum(sizes) for client in early}
        return {client: fixed.get(client, count * sizes[client] * factor) for client, count in times.items()}
    total = sum(sizes[client] for client in present)
    return {client: count * sizes[client] / total for client, count in times.items()}


def learning_rate(settings: TrainSettings, round_number: int) -> float:
    """Return the clients' learning rate in a round; the first round is 1.

    Example:
        >>> settings = TrainSettings(rounds=9, lr=1.0, lr_decay=0.5, lr_steps=(3,), lr_factor=0.1)
        >>> [learning_rate(settings, r) for r in (1, 2, 3, 4)]
        [1.0, 0.5, 0.25, 0.0125]
    """
    passed = sum(round_number > step for step in settings.lr_steps)
    return settings.lr * settings.lr_decay ** (round_number - 1) * settings.lr_factor**passed


class Aggregate:
    """The running weighted sum of updates, in float64 and in a fixed order, so that the bits never vary.

    Buffers are averaged: their weights are divided by ``weight_sum``, as a variance must not be extrapolated.
    """

    def __init__(self, weight_sum: float = 1.0) -> None:
        self._share = 1 / weight_sum if weight_sum else 0.0  # no drawn client has weight: nothing moves
        self._totals: dict[str, Tensor] = {}

    def add(self, update: Update, weight: float) -> None:
        """Add one client's update."""
        for tensors, factor in ((update.tensors, weight), (update.buffers, weight * self._share)):
            for name, tensor in tensors.items():
                change = tensor.double() * factor
                self._totals[name] = self._totals[name].add_(change) if name in self._totals else change

    def apply(self, model: Tensors) -> dict[str, Tensor]:
        """Return the model plus the sum; every tensor of the model must have been updated, and no other."""
        if self._totals.keys() != model.keys():
            odd = sorted(self._totals.keys() ^ model.keys())
            raise DefenceError(
                f"Updates must hold the shared tensors of the model after on_server, got others: {', '.join(odd[:5])}."
            )
        moved = {
            name: (tensor.double() + self._totals[name].to(tensor.device)).to(tensor.dtype)
            for name, tensor in model.items()
        }
        bad = [name for name, tensor in moved.items() if not tensor.isfinite().all()]
        if bad:
            raise DivergedError(
                f"The model must stay finite, got NaN or infinity in {bad[0]}: the training diverged. Lower --lr."
            )
        return moved


@dataclass(frozen=True)
class Round:
    """One finished round.

    Attributes:
        number: of the round, from 1.
        clients: the clients that trained, each once.
        received: the model they started from.
        sent: the update of each client; empty unless the round is one of ``save_rounds``.
        recovered: the same updates after ``on_server``, as they were aggregated.
        model: the model after aggregation.
        reports: the mean of each number that hooks recorded, over the clients that recorded it.
        public: what the server broadcast beside the model.
    """

    number: int
    clients: tuple[int, ...]
    received: Tensors
    sent: Mapping[int, Update]
    recovered: Mapping[int, Update]
    model: dict[str, Tensor]
    reports: Mapping[str, float] = field(default_factory=dict)
    public: Tensors = field(default_factory=dict)


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

    ``network`` is the server's copy of the network, which hooks can read; ``state`` is the server's own.
    """
    lr = learning_rate(settings, number)
    keep = number in settings.save_rounds
    sent: dict[int, Update] = {}
    kept: dict[int, Update] = {}
    reports: list[Mapping[str, float]] = []
    server = Server(number, network, {}, state, stream(settings.seed, "server", number))

    # Step 1: choose who trains; early clients always do.
    early = defence.early_clients(len(sizes))
    drawn = sample_clients(settings, sizes, number)
    if defence.counts_early:
        weights = update_weights(settings, sizes, drawn, early)
    else:
        weights = update_weights(settings, sizes, [client for client in drawn if client not in early])
        weights |= dict.fromkeys(early, 0.0)
    aggregate = Aggregate(sum(weights.values()))

    def collect(clients: Sequence[int], side: Server) -> Iterator[tuple[int, Update]]:
        for answer in engine.train(number, clients, model, side.public, lr):
            client, recovered = answer.client, defence.on_server(answer.update, side)
            if keep:
                sent[client], kept[client] = answer.update, recovered
            reports.append(answer.reports)
            aggregate.add(recovered, weights[client])
            yield client, recovered

    # Step 2: early clients (a guard) train first; the defence makes its broadcast to the others of their updates.
    first = dict(collect(early, server))
    public = defence.public(first, server)

    # Step 3: the others train, and each update is added when it arrives.
    others = [client for client in weights if client not in early]
    for _ in collect(others, Server(number, network, public, state, server.rng)):
        pass

    # Step 4: the sum of the weighted updates moves the global model.
    means = mean_over_clients(reports)
    return Round(number, (*early, *others), model, sent, kept, aggregate.apply(model), means, public)
