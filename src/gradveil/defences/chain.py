"""Several defences in a row: function composition of their hooks."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradveil.defences.base import Budget, Client, Defence, Releases, Server
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import ConfigError
from gradveil.registry import build
from gradveil.types import Batch, Tensors, Update

Side = TypeVar("Side", Client, Server)
D = TypeVar("D", bound=Defence)


def build_defence(spec: str) -> Defence:
    """Build a defence from its text; ``a:x=1+b`` is a chain.

    Example:
        >>> build_defence("none+none").spec
        'none+none'
    """
    pieces = re.split(r"\+(?=[A-Za-z./~])", spec)
    members = tuple(build(Defence, piece) for piece in pieces)
    return members[0] if len(members) == 1 else Chain(members)


def member(defence: Defence, kind: type[D]) -> D | None:
    """The defence itself, or the first member of a chain, that is of a kind; None where there is none."""
    members = defence.defences if isinstance(defence, Chain) else (defence,)
    return next((each for each in members if isinstance(each, kind)), None)


def required(defence: Defence, kind: type[D]) -> D:
    """As `member`, where there must be one."""
    found = member(defence, kind)
    if found is None:
        raise ConfigError(f"The defence must be {kind.name}, or a chain with it, got {defence.spec!r}.")
    return found


@dataclass(frozen=True)
class Chain(Defence):
    r"""Apply several defences one after the other, written ``first:key=value+second``.

    .. math:: \text{hook}(u) = \text{hook}_n(\dots \text{hook}_1(u))

    On the server the order is reversed: what was done last on the device is undone first. Each member has its own
    part of the client's state and of the broadcast, under its position in the chain.

    Threat model: that of its members; a chain adds nothing of its own.
    Does not protect: beyond its members; privacy budgets of several members are not added up here.
    Guarantee: none of its own.
    Reference: function composition; pfl-research composes its postprocessors alike, https://arxiv.org/abs/2404.06430.
    Differs from the paper: nothing.

    Attributes:
        defences: the members, in the order in which the data meets them.
    """

    defences: tuple[Defence, ...] = ()

    def __post_init__(self) -> None:
        public = [defence for defence in self.defences if defence.uses_aux]
        object.__setattr__(self, "uses_aux", bool(public))
        object.__setattr__(self, "hides_images", any(defence.hides_images for defence in self.defences))
        object.__setattr__(self, "aux_labels", any(defence.aux_labels for defence in public))
        object.__setattr__(self, "needs_aux", any(defence.needs_aux for defence in self.defences))
        object.__setattr__(self, "fewest_images", max((d.fewest_images for d in self.defences), default=1))
        object.__setattr__(self, "marked_only", any(defence.marked_only for defence in self.defences))
        for before, defence in itertools.combinations(self.defences, 2):
            if defence.takes_own_gradient and before.overrides("on_gradient"):
                lost = f", though {before.name!r} looks at the images, so that no guarantee is left"
                raise ConfigError(
                    f"{defence.name!r} must come before {before.name!r} in a chain, for it takes the gradient anew, "
                    f"got {self.spec!r}. Swap them{'' if before.post_processing else lost}."
                )

    @property
    def spec(self) -> str:
        """The members' texts joined by ``+``; an empty chain is ``chain``."""
        return "+".join(defence.spec for defence in self.defences) or self.name

    def on_model(self, model: nn.Module, rng: torch.Generator) -> nn.Module:
        """Each member edits the architecture that the one before left."""
        for defence in self.defences:
            model = defence.on_model(model, rng)
        return model

    def private(self, name: str) -> bool:
        """Private if any member says so."""
        return any(defence.private(name) for defence in self.defences)

    def on_data(self, data: Batch, client: Client) -> Batch:
        """Each member's turn on all images."""
        for defence, own in self._members(client):
            data = defence.on_data(data, own)
        return data

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Each member's turn on a batch.

        What one made of the batch is all that those behind it see of the client's images: one that mixes them must not
        bring in any that the first would have hidden.
        """
        left = batch
        for defence, own in self._members(client):
            left = defence.on_batch(left, own if left is batch else replace(own, data=left))
        return left

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Each member's turn on the gradient of one step."""
        for defence, own in self._members(client):
            gradient = defence.on_gradient(gradient, batch, own)
        return gradient

    def on_update(self, update: Update, client: Client) -> Update:
        """Each member's turn on the update."""
        for defence, own in self._members(client):
            update = defence.on_update(update, own)
        return update

    def on_server(self, update: Update, server: Server) -> Update:
        """Each member's turn, last first."""
        for defence, own in reversed(list(self._members(server))):
            update = defence.on_server(update, own)
        return update

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Each member's look at the network."""
        for defence in self.defences:
            defence.check(network, shape)

    def early_clients(self, num_clients: int) -> tuple[int, ...]:
        """All members' early clients, each once."""
        return tuple(dict.fromkeys(c for defence in self.defences for c in defence.early_clients(num_clients)))

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """All members' broadcasts, each under its member's position."""
        return {
            f"{position}.{key}": tensor
            for position, (defence, own) in enumerate(self._members(server))
            for key, tensor in defence.public(early, own).items()
        }

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Every member's first answer, one after the other (``all``); then with one member's other answers in turn.

        What was done to all images at once came before what is done to batches, whatever the order of the members.
        """
        members = sorted(enumerate(self.defences), key=lambda each: not each[1].overrides("on_data"))
        answers = [
            list(defence.adaptive(replace(arrived, public=_under(f"{position}.", arrived.public))).items())
            for position, defence in members
        ]
        answers = [each for each in answers if each]
        if not answers:
            return {}
        altered = [_alters(move) for ((_, move), *_) in answers]
        for position, each in enumerate(answers):
            if any(altered[:position] + altered[position + 1 :]):  # then decoys can't be told apart
                answers[position] = [(name, move) for name, move in each if not move.separate] or each
        first = [move for ((_, move), *_) in answers]
        found = {"all": functools.reduce(_both, first)}
        for position, each in enumerate(answers):
            for name, move in each[1:]:
                found.setdefault(name, functools.reduce(_both, [*first[:position], move, *first[position + 1 :]]))
        return found

    @property
    def counts_early(self) -> bool:
        """Whether no member leaves the early clients' updates out."""
        return all(defence.counts_early for defence in self.defences)

    def budget(self, releases: Releases) -> Budget | None:
        """The one member's that has a guarantee, if all others only post-process what it left."""
        known = [budget for defence in self.defences if (budget := defence.budget(releases))]
        others = [defence for defence in self.defences if defence.budget(releases) is None]
        safe = all(defence.post_processing for defence in others)
        return known[0] if len(known) == 1 and safe else None

    def certificate(self, network: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor | None:
        """The first member's that has one; what the others do is not part of it. None where one hides the images."""
        if any(defence.hides_images for defence in self.defences):
            return None  # it would be of images that the protected network never sees
        found = (defence.certificate(network, batch, rng) for defence in self.defences)
        return next((bound for bound in found if bound is not None), None)

    def overrides(self, hook: str) -> bool:
        """Whether any member asks for the hook."""
        return any(defence.overrides(hook) for defence in self.defences)

    def _members(self, side: Side) -> Iterator[tuple[Defence, Side]]:
        """Each member with its own view of the state and the broadcast."""
        for position, defence in enumerate(self.defences):
            prefix = f"{position}."
            yield defence, replace(side, public=_under(prefix, side.public), state=_Part(side.state, prefix))


def _under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """The entries whose key starts with a prefix, under the rest of the key."""
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


def _alters(move: Countermove) -> bool:
    """Whether a defence leaves the gradient other than it was."""
    return move.sent is not None or move.look is not None or bool(move.noise)


def _both(first: Countermove, second: Countermove) -> Countermove:
    """What two defences in a row make of a guess.

    Noises add up, and the later one's kind decides the distance. Noise that the second one scales or rounds is of no
    known strength any more: then there is no likelihood, and the distance is the second's or the attack's own. Decoys
    can be told apart by linear algebra only where the other one leaves the gradient as it is.
    """
    if first.noise and second.sent is not None and not second.passes_noise:
        first = replace(first, noise={}, distance="")
    functions = [move.sent for move in (first, second) if move.sent is not None]

    def sent(guess: Tensors, seen: Tensors) -> Tensors:
        for function in functions:
            guess = function(guess, seen)
        return guess

    looks = [move.look for move in (second, first) if move.look is not None]  # what was done last is undone first

    def look(seen: Tensors) -> Tensors:
        for function in looks:
            seen = function(seen)
        return seen

    names = {**first.noise, **second.noise}
    noise = {name: math.hypot(first.noise.get(name, 0.0), second.noise.get(name, 0.0)) for name in names}
    weights = {
        name: first.weights.get(name, 1.0) * second.weights.get(name, 1.0) for name in (*first.weights, *second.weights)
    }
    distance = second.distance or first.distance
    return Countermove(
        sent if functions else None,
        distance,
        noise,
        weights,
        look=look if looks else None,
        decoys=first.decoys + second.decoys,
        own_label=max(first.own_label, second.own_label),
        unknowns={**first.unknowns, **second.unknowns},
        outputs={**first.outputs, **second.outputs},
        penalties={**first.penalties, **second.penalties},
        soft_labels=first.soft_labels or second.soft_labels,
        decode=second.decode + first.decode,
        separate=any(one.separate and not _alters(other) for one, other in ((first, second), (second, first))),
    )


class _Part(MutableMapping[str, Tensor]):
    """The entries of a mapping whose key starts with a prefix, under the rest of the key."""

    def __init__(self, whole: MutableMapping[str, Tensor], prefix: str) -> None:
        self._whole, self._prefix = whole, prefix

    def __getitem__(self, key: str) -> Tensor:
        return self._whole[self._prefix + key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._whole[self._prefix + key] = value

    def __delitem__(self, key: str) -> None:
        del self._whole[self._prefix + key]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._whole if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
