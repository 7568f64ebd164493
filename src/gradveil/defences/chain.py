"""Several defences one after the other: function composition of their hooks."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.defences.base import Client, Defence, Rehearse, Server
from gradveil.defences.countermove import Arrived, Countermove, combined
from gradveil.defences.parts.accounting import Budget, Releases
from gradveil.errors import ConfigError
from gradveil.registry import build
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Tensors, Update

Side = TypeVar("Side", Client, Server)
D = TypeVar("D", bound=Defence)

FACTS: Mapping[str, Callable[[Sequence[Defence]], object]] = {
    "post_processing": lambda members: all(member.post_processing for member in members),
    "takes_own_gradient": lambda members: any(member.takes_own_gradient for member in members),
    "uses_aux": lambda members: any(member.uses_aux for member in members),
    "needs_aux": lambda members: any(member.needs_aux for member in members),
    "aux_labels": lambda members: any(member.aux_labels for member in members if member.uses_aux),
    "fewest_images": lambda members: max((member.fewest_images for member in members), default=1),
    "hides_images": lambda members: any(member.hides_images for member in members),
    "marked_only": lambda members: any(member.marked_only for member in members),
    "budget_replaces": lambda members: any(member.budget_replaces for member in members),
    "adds_noise": lambda members: any(member.adds_noise for member in members),
    "reports": lambda members: {name: text for member in members for name, text in member.reports.items()},
}
"""How a chain derives each class fact of `Defence` from its members. A test asks for a rule per fact."""


def build_defence(spec: str) -> Defence:
    """Build a defence from its spec; ``a:x=1+b`` is a chain.

    Example:
        >>> build_defence("none+none").spec
        'none+none'
    """
    pieces = re.split(r"\+(?=[A-Za-z./~])", spec)
    members = tuple(build(Defence, piece) for piece in pieces)
    return members[0] if len(members) == 1 else Chain(members)


def planned_defence(settings: TrainSettings) -> Defence:
    """Build the defence of a training, with what it needs to know of it. Raise `ConfigError` if both do not fit."""
    return build_defence(settings.defence).planned(settings)


def member(defence: Defence, kind: type[D]) -> D | None:
    """Return the defence itself or the first member of a chain that has this class, or None if there is none."""
    members = defence.defences if isinstance(defence, Chain) else (defence,)
    return next((each for each in members if isinstance(each, kind)), None)


def required(defence: Defence, kind: type[D]) -> D:
    """Return what `member` finds.

    Raises:
        ConfigError: no member has this class.
    """
    found = member(defence, kind)
    if found is None:
        raise ConfigError(
            f"The defence must be {kind.name}, or a chain with it, got {defence.spec!r}. Choose --defence {kind.name}."
        )
    return found


def plans(defence: Defence, method: str) -> bool:
    """Return whether a defence, or a member of a chain, has its own ``planned`` or ``training``."""
    members = defence.defences if isinstance(defence, Chain) else (defence,)
    return any(getattr(type(member), method) is not getattr(Defence, method) for member in members)


@dataclass(frozen=True)
class Chain(Defence):
    r"""Apply several defences one after the other, written ``first:key=value+second``.

    .. math:: \text{hook}(u) = \text{hook}_n(\dots \text{hook}_1(u))

    On the server the order is reversed: what was done last on the device is undone first. Each member has its own
    part of the client's state and of the broadcast, stored under its position in the chain. `FACTS` says how the
    chain's facts follow from those of its members.

    Threat model: that of its members; a chain adds nothing of its own.
    Does not protect: beyond its members; the privacy budgets of several members are not added up.
    Guarantee: none of its own.
    Reference: function composition; pfl-research composes its postprocessors in the same way,
    https://arxiv.org/abs/2404.06430.
    Differs from the paper: nothing.

    Attributes:
        defences: the members, in the order in which the data meets them.
    """

    defences: tuple[Defence, ...] = ()

    def __post_init__(self) -> None:
        for fact, derive in FACTS.items():
            object.__setattr__(self, fact, derive(self.defences))
        for before, defence in itertools.combinations(self.defences, 2):
            if defence.takes_own_gradient and before.overrides("on_gradient"):
                lost = f", though {before.name!r} reads the images, so that no guarantee is left"
                raise ConfigError(
                    f"{defence.name!r} must come before {before.name!r} in a chain, because it computes the gradient "
                    f"from the images again, got {self.spec!r}. Swap them{'' if before.post_processing else lost}."
                )

    @property
    def spec(self) -> str:
        """The specs of the members joined by ``+``; that of an empty chain is ``chain``."""
        return "+".join(defence.spec for defence in self.defences) or self.name

    def on_model(self, model: nn.Module, rng: SecretStream) -> nn.Module:
        """Let each member edit the architecture that the one before it returned."""
        for defence in self.defences:
            model = defence.on_model(model, rng)
        return model

    def private(self, name: str) -> bool:
        """Return whether any member keeps the tensor private."""
        return any(defence.private(name) for defence in self.defences)

    def on_data(self, data: Batch, client: Client) -> Batch:
        """Apply each member to all images."""
        for defence, own in self._members(client):
            data = defence.on_data(data, own)
        return data

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Apply each member to the batch.

        Later members see only the images that earlier ones returned: a member that mixes images must not bring back
        any that an earlier one hid.
        """
        left = batch
        for defence, own in self._members(client):
            left = defence.on_batch(left, own if left is batch else replace(own, data=left))
        return left

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Apply each member to the gradient of one step."""
        for defence, own in self._members(client):
            gradient = defence.on_gradient(gradient, batch, own)
        return gradient

    def on_update(self, update: Update, client: Client) -> Update:
        """Apply each member to the update."""
        for defence, own in self._members(client):
            update = defence.on_update(update, own)
        return update

    def on_server(self, update: Update, server: Server) -> Update:
        """Apply each member, last first."""
        for defence, own in reversed(list(self._members(server))):
            update = defence.on_server(update, own)
        return update

    def on_aggregate(self, total: Update, server: Server) -> Update:
        """Apply each member to the sum of a round's updates, last first."""
        for defence, own in reversed(list(self._members(server))):
            total = defence.on_aggregate(total, own)
        return total

    def training(self, settings: TrainSettings) -> TrainSettings:
        """Let each member change the settings of the training."""
        return functools.reduce(lambda known, defence: defence.training(known), self.defences, settings)

    def planned(self, settings: TrainSettings) -> "Chain":
        """Return the chain of its members as they are in a training."""
        return Chain(tuple(defence.planned(settings) for defence in self.defences))

    @property
    def rehearses(self) -> bool:
        """Whether any member chooses settings on public images."""
        return any(defence.rehearses for defence in self.defences)

    def tuned(self, rehearse: Rehearse, rounds: int, images: float) -> "Chain":
        """Let each member choose its settings, in rehearsals of the whole chain."""
        whole = self
        for place, defence in enumerate(self.defences):
            whole = whole._with(
                place, defence.tuned(functools.partial(_rehearse_with, whole, place, rehearse), rounds, images)
            )
        return whole

    def _with(self, place: int, defence: Defence) -> "Chain":
        """Return the chain with another member in one place."""
        return Chain((*self.defences[:place], defence, *self.defences[place + 1 :]))

    def sends(self, update: Update) -> Update | None:
        """Return what each member makes of the form that the one before it sends, or None if one can't tell."""
        form: Update | None = update
        for defence in self.defences:
            form = None if form is None else defence.sends(form)
        return form

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Let each member check the network."""
        for defence in self.defences:
            defence.check(network, shape)

    def check_training(self, network: nn.Module) -> None:
        """Let each member check the layers."""
        for defence in self.defences:
            defence.check_training(network)

    def early_clients(self, num_clients: int) -> tuple[int, ...]:
        """Return the early clients of all members, each once."""
        return tuple(dict.fromkeys(c for defence in self.defences for c in defence.early_clients(num_clients)))

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """Return the broadcasts of all members, each under its member's position."""
        return {
            f"{position}.{key}": tensor
            for position, (defence, own) in enumerate(self._members(server))
            for key, tensor in defence.public(early, own).items()
        }

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return the first countermoves of all members combined (``all``), and variants with one replaced at a time.

        Members that replace all images at once (``on_data``) come first, whatever their position in the chain.
        """
        members = sorted(enumerate(self.defences), key=lambda each: not each[1].overrides("on_data"))
        answers = [
            list(defence.adaptive(replace(arrived, public=_under(f"{position}.", arrived.public))).items())
            for position, defence in members
        ]
        answers = [each for each in answers if each]
        if not answers:
            return {}
        altered = [move.alters for ((_, move), *_) in answers]
        hidden = [move.alters and not move.zeroes for ((_, move), *_) in answers]
        for position, each in enumerate(answers):
            if any(altered[:position] + hidden[position + 1 :]):  # then decoys can't be separated
                answers[position] = [(name, move) for name, move in each if not move.separate] or each
        first = [move for ((_, move), *_) in answers]
        found = {"all": functools.reduce(combined, first)}
        for position, each in enumerate(answers):
            for name, move in each[1:]:
                found.setdefault(name, functools.reduce(combined, [*first[:position], move, *first[position + 1 :]]))
        return found

    @property
    def fewest_clients(self) -> int:
        """The largest number that any member needs in a sum."""
        return max((defence.fewest_clients for defence in self.defences), default=0)

    @property
    def counts_early(self) -> bool:
        """Whether all members aggregate the early clients' updates with the others."""
        return all(defence.counts_early for defence in self.defences)

    @property
    def needs_gradient(self) -> bool:
        """Whether the first member that replaces gradients reads the one that it is given."""
        return next((each.needs_gradient for each in self.defences if each.overrides("on_gradient")), True)

    @property
    def draws_own_batch(self) -> bool:
        """Whether any member draws batches of its own."""
        return any(defence.draws_own_batch for defence in self.defences)

    def budget(self, releases: Releases) -> Budget | None:
        """Return the budget of the only member that has one, if all others only post-process; else None."""
        known = [budget for defence in self.defences if (budget := defence.budget(releases))]
        others = [defence for defence in self.defences if defence.budget(releases) is None]
        safe = all(defence.post_processing for defence in others)
        return known[0] if len(known) == 1 and safe else None

    def certificate(self, network: nn.Module, batch: Batch, rng: SecretStream) -> Tensor | None:
        """Return the first member's certificate, which ignores the others; None if any member hides the images."""
        if any(defence.hides_images for defence in self.defences):
            return None  # it would hold for images that the protected network never sees
        found = (defence.certificate(network, batch, rng) for defence in self.defences)
        return next((bound for bound in found if bound is not None), None)

    def overrides(self, hook: str) -> bool:
        """Return whether any member overrides the hook."""
        return any(defence.overrides(hook) for defence in self.defences)

    def _members(self, side: Side) -> Iterator[tuple[Defence, Side]]:
        """Yield each member with its own view of the state and the broadcast."""
        for position, defence in enumerate(self.defences):
            prefix = f"{position}."
            yield defence, replace(side, public=_under(prefix, side.public), state=_Part(side.state, prefix))


def _rehearse_with(chain: Chain, place: int, rehearse: Rehearse, defence: Defence) -> tuple[float, float]:
    """Rehearse a chain with another member in one place."""
    return rehearse(chain._with(place, defence))


def _under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Return the entries whose key starts with the prefix, with the prefix removed."""
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


class _Part(MutableMapping[str, Tensor]):
    """View of the entries of a mapping whose key starts with a prefix; keys appear without it."""

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
