"""Canaries: invented contributions with random gradients, played beside a training to measure its real epsilon.

In every round, clients that do not exist play the round that a real one plays: the same broadcast, the same local
training, the defence's own hooks with their clipping, sampling and noise. What they would send is projected onto the
canaries' directions and thrown away. The server never gets it, no real client's image or random number is used, and so
the training, its model and its rows have the same bits with canaries and without.
"""

import copy
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.config import MOST_CANARIES, TrainSettings
from gradveil.defences.base import Defence, Server
from gradveil.defences.chain import Chain
from gradveil.defences.parts.accounting import Budget
from gradveil.engines.canary_network import CanaryNetwork, random_directions, spread_along
from gradveil.errors import ConfigError
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.federated.server import Round, learning_rate
from gradveil.metrics.epsilon_hat import USUAL_DELTA, EpsilonHat, estimate
from gradveil.randomness import global_stream, stream
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

ENTRIES = 10
"""The model needs this many entries per canary, so that random directions hardly overlap."""
LONG = 1e6
"""Norm of a canary before a defence that states an epsilon clips it: far above every sensible bound."""
_PREFIX = "canaries."
_UNREAD = ("on_model", "private", "on_data")


def refuse_unmeasurable(defence: Defence) -> None:
    """Raise `ConfigError` if canaries can't pass a defence's hooks as a client's images would.

    A canary has a gradient and no picture. A hook that changes images, or computes something from them, would work on
    noise; a defence that changes the architecture would change the canary's gradient with it.
    """
    for member in defence.defences if isinstance(defence, Chain) else (defence,):
        own = [hook for hook in _UNREAD if member.overrides(hook)]
        if not member.takes_own_gradient:
            own += ["on_batch"] * member.overrides("on_batch")
            own += ["on_gradient"] * (member.overrides("on_gradient") and not member.post_processing)
        if own:
            raise ConfigError(
                f"canaries can't be measured under defence {member.name!r}, which works on images or on the network "
                f"({', '.join(own)}), got it with --canaries. Drop --canaries, or this defence."
            )


def num_players(defence: Defence, canaries: int) -> int:
    """Return how many clients that do not exist play beside each round."""
    return _num_sums(defence, canaries) * max(1, defence.fewest_clients)


def _num_sums(defence: Defence, canaries: int) -> int:
    """Return how many sums are watched: one that holds all canaries if they are images, else one per canary."""
    return min(canaries, 1) if defence.takes_own_gradient else canaries


@dataclass
class Canaries:
    """The canaries of one training: their directions, and what clients that hold them have sent so far.

    What a canary is depends on what the defence protects. If it clips the gradient of each image (dp-sgd), a canary is
    an image: all canaries are images of one client, whose other images have no gradient. If it protects whole updates,
    a canary is an update: each has a client of its own, all of whose images have its gradient. If clients share the
    noise of a secure sum (veil with ``at=sum``), as many clients play as the noise takes, and their sum is what counts.

    Attributes:
        settings: of the training.
        defence: of the training.
        images: images of a client that holds canaries: as many as the real client with the largest epsilon has.
        like: a network of the training, for the names and shapes of its parameters.
        shape: (C, H, W) of images.
        budget: what the defence states for that client over the whole training, or None.
        sums: sum over the rounds of what was sent: (1, entries) if canaries are images, else (K, entries).
        states: the private state of each client that holds canaries.
    """

    settings: TrainSettings
    defence: Defence
    images: int
    like: nn.Module
    shape: tuple[int, int, int]
    budget: Budget | None
    sums: Tensor = field(init=False)
    states: list[dict[str, Tensor]] = field(init=False)

    @staticmethod
    def beside(
        settings: TrainSettings, defence: Defence, net: FlatModel, sizes: list[int], shape: tuple[int, int, int]
    ) -> "Canaries":
        """Return the canaries of a training. Raise `ConfigError` if they can't be measured in it."""
        refuse_unmeasurable(defence)
        how = Protocol.of(settings).local
        entries = sum(parameter.numel() for parameter in net.module.parameters() if parameter.requires_grad)
        budgets = {size: defence.budget(how.releases(size, settings.rounds, entries)) for size in sorted(set(sizes))}
        known = {size: budget for size, budget in budgets.items() if budget is not None}
        size = max(known, key=lambda one: known[one].epsilon) if known else min(budgets)
        fewest = size if defence.takes_own_gradient else MOST_CANARIES
        if settings.canaries > min(fewest, entries // ENTRIES):
            raise ConfigError(
                f"canaries must be at most {min(fewest, entries // ENTRIES)} here, got {settings.canaries}: a client "
                f"has {size} images, and the model {entries:,} entries. Lower --canaries."
            )
        return Canaries(settings, defence, size, net.module, shape, budgets[size])

    def __post_init__(self) -> None:
        self._parts = {name: p.numel() for name, p in self.like.named_parameters() if p.requires_grad}
        self._directions = random_directions(self.settings.canaries, self._parts, self.settings.seed)  # (K, entries)
        clients = _num_sums(self.defence, self.settings.canaries)
        self.sums = torch.zeros(clients, self._directions.shape[1], dtype=torch.float64)
        self.states = [{} for _ in range(clients)]
        self._norm = 0.0

    def play(self, played: Round, server_state: Mapping[str, Tensor], real: Batch) -> None:
        """Play the round of every client that holds canaries, beside a round that was just played.

        Args:
            played: the round.
            server_state: the server's own state, which is not changed.
            real: images of a real client; the norm of its undefended update in the first round is that of canaries if
                the defence states no epsilon, and so bounds no norm.
        """
        if not self._norm:
            unbounded = self.budget is None and not self.defence.takes_own_gradient
            self._norm = self._honest_norm(played, real) if unbounded else LONG
        for place in range(len(self.sums)):
            for share in range(max(1, self.defence.fewest_clients)):
                update = self._sent(place, played, server_state, share)
                self.sums[place] += torch.cat([update.tensors[name].double().flatten().cpu() for name in self._parts])

    def estimate(self) -> EpsilonHat:
        """Return the epsilon that canaries reveal in the rounds so far, at the defence's own delta.

        A canary's score is its coefficient in the sum of what was sent. The rest of the sum is noise.
        """
        directions = self._directions.double()
        if self.defence.takes_own_gradient:  # all canaries are in one sum
            duals = torch.linalg.solve(directions @ directions.T, directions)
            scores = duals @ self.sums[0]
            rests, taken = self.sums - scores @ directions, (duals * directions).sum(0, keepdim=True)
        else:
            scores = (directions * self.sums).sum(1)
            rests, taken = self.sums - scores[:, None] * directions, directions.square()
        spread = spread_along(rests, taken, self._parts)
        return estimate(scores, spread, self.delta, distance=2.0 if self.defence.budget_replaces else 1.0)

    def figures(self) -> dict[str, Any]:
        """Return the estimate and the statement beside it, as a row has them."""
        found, stated = self.estimate(), self.budget.epsilon if self.budget else None
        return {
            "canaries": self.settings.canaries,
            "epsilon": stated if stated is not None and math.isfinite(stated) else None,
            "delta": self.budget.delta if self.budget else None,
            "epsilon_hat": found.epsilon,
            "epsilon_hat_low": found.low,
            "epsilon_hat_high": found.high,
            "delta_hat": self.delta,
            "canaries_exceed": None if stated is None else found.low > stated,
        }

    @property
    def delta(self) -> float:
        """The delta of the estimate: the stated one if it is above 0."""
        return self.budget.delta if self.budget is not None and self.budget.delta > 0 else USUAL_DELTA

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a later round needs, for a checkpoint."""
        states = {f"{_PREFIX}state.{i}.{key}": t for i, state in enumerate(self.states) for key, t in state.items()}
        norm = torch.tensor(self._norm, dtype=torch.float64)
        return {f"{_PREFIX}sums": self.sums, f"{_PREFIX}norm": norm, **states}

    def resume(self, tensors: MutableMapping[str, Tensor]) -> None:
        """Continue from what `tensors` gave, and take it out of ``tensors``."""
        kept = {key.removeprefix(_PREFIX): tensors.pop(key) for key in list(tensors) if key.startswith(_PREFIX)}
        if kept:
            self.sums, self._norm = kept.pop("sums"), float(kept.pop("norm"))
        for key, tensor in kept.items():
            _, place, name = key.split(".", 2)
            self.states[int(place)][name] = tensor

    def _sent(self, place: int, played: Round, server_state: Mapping[str, Tensor], share: int) -> Update:
        """Return what a client with canaries sends in a round, as the server uses it.

        If clients share the noise of a secure sum, those with a ``share`` above 0 add theirs, and have no canary.
        """
        number, seed = played.number, self.settings.seed
        lr = learning_rate(self.settings, number)
        own = self._directions if self.defence.takes_own_gradient else self._directions[place : place + 1]
        how, count = self._local()
        slope = self._norm if self.defence.takes_own_gradient else self._norm / (lr * sum(how.step_weights(count)))
        network = CanaryNetwork(self.like, own * (0.0 if share else slope), self.shape, seed)
        net = FlatModel(network)
        data = network.data(count, one=not self.defence.takes_own_gradient)
        names = ("canaries", place, *(("share", share) if share else ()), "round", number)
        streams = Streams(
            SecretStream(seed, *names, "hooks"),
            SecretStream(seed, *names, "order"),
            layers=global_stream(seed, *names, "layers"),
        )
        device = Device(data, prepared=True, state={} if share else self.states[place])
        broadcast = Broadcast(net.shared_vector(played.received), lr, number, played.public)
        update = play_client(net, device, broadcast, self.defence, how, streams).update
        server = Server(number, self.like, played.public, dict(server_state), stream(seed, *names, "server"))
        return self.defence.on_server(update, server)

    def _local(self) -> tuple[LocalSettings, int]:
        """Return how clients with canaries train, and their images.

        If no hook acts before the update is complete, a single step gives the same update as the whole training.
        """
        how = Protocol.of(self.settings).local
        if any(self.defence.overrides(hook) for hook in ("on_batch", "on_gradient")):
            return how, self.images
        return replace(how, algorithm="fedsgd", batch_size=0, momentum=0.0, nesterov=False, weight_decay=0.0), 2

    def _honest_norm(self, played: Round, real: Batch) -> float:
        """Return the norm of a real client's undefended update in a round."""
        net, seed = FlatModel(copy.deepcopy(self.like)), self.settings.seed
        broadcast = Broadcast(
            net.shared_vector(played.received), learning_rate(self.settings, played.number), played.number
        )
        streams = replace(Streams.of(seed, 0, played.number), layers=global_stream(seed, "canaries", "norm"))
        update = play_client(net, Device(real), broadcast, Defence(), Protocol.of(self.settings).local, streams).update
        return float(Update(update.tensors, 0).norm()) or 1.0
