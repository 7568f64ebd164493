"""Protect one update of somebody else's training: what a Flower mod and an NVFlare filter share.

Both see an update only after the training. So only a defence that works on updates alone can run here; every other one
is refused, as its update would leave unprotected.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradveil.defences import Defence
from gradveil.defences.base import HOOKS
from gradveil.defences.chain import plans
from gradveil.defences.parts.reports import Reports
from gradveil.errors import ConfigError, DefenceError, DivergedError
from gradveil.federated.answers import check_kind
from gradveil.federated.client import Device
from gradveil.secret_stream import SecretStream
from gradveil.storage import PrivateFolder
from gradveil.types import Tensors, Update

STATISTICS = ("running_mean", "running_var")
"""Last parts of the names of BatchNorm's running statistics in a state dict."""
MOST_METRICS = 1000
"""Largest number of numbers in the metrics of a reply: more could be a model."""
_LATER = 2**62
"""A round after all others: the newest state is wanted."""
_ANSWERED = "gradveil.answered"


@dataclass(frozen=True)
class ProtectionPlace:
    """Where an update is protected.

    Attributes:
        number: of the client, or 0.
        told: round that the server states, or 1.
        folder: for the defence's private state, or None if the site has named none.
        name_one: how a site names a folder; the end of an error message.
    """

    number: int = 0
    told: int = 1
    folder: PrivateFolder | None = None
    name_one: str = "Name one."


def others_than_update(defence: Defence) -> list[str]:
    """Return the hooks that a defence needs beside ``on_update``; with any of them it can't run on updates alone."""
    others = [hook for hook in HOOKS if hook != "on_update" and defence.overrides(hook)]
    return others + [name for name in ("planned", "training") if plans(defence, name)]


def change_of(start: Tensors, trained: Tensors, counted: int, statistics: str) -> Update:
    """Return the change of the weights, with that of running statistics as buffers; integers are left out.

    Args:
        start: the received weights.
        trained: the weights after training, by names of ``start``.
        counted: number of images.
        statistics: what happens to running statistics of BatchNorm, see `gradveil.flower.protect`.
    """
    for key, tensor in trained.items():
        if key not in start:
            raise DefenceError(f"A reply must have names of the received model, got {key!r}. Send its state_dict.")
        check_kind(key, tuple(tensor.shape), tensor.dtype, start[key])
    change = {key: t - start[key] for key, t in trained.items() if t.is_floating_point()}
    return split_statistics(change, counted, statistics)


def split_statistics(change: Tensors, counted: int, statistics: str) -> Update:
    """Return a change as an update, with running statistics as buffers: refused if they moved, zero, or as they are."""
    tensors = dict(change)
    moved = {key: tensors.pop(key) for key in list(tensors) if key.rpartition(".")[2] in STATISTICS}
    if statistics == "refuse" and any(bool(tensor.ne(0).any()) for tensor in moved.values()):
        raise DefenceError(
            "Running statistics of BatchNorm must stay as received, as the defence does not protect them, got "
            "other ones. Choose protect(statistics='received'), which sends back the server's, or 'send'."
        )
    if statistics != "send":
        moved = {key: torch.zeros_like(tensor) for key, tensor in moved.items()}
    return Update(tensors, counted, moved)


def protected_update(defence: Defence, update: Update, start: Tensors, place: ProtectionPlace) -> Update:
    """Return the update after the defence, whose state is read from the private folder and saved there."""
    saved = None if place.folder is None else place.folder.load_state(_LATER)
    state = dict(saved or {})
    number = place.told if place.folder is None else int(state.pop(_ANSWERED, torch.tensor(0))) + 1
    absent: list[Any] = [_Absent(what, defence) for what in ("data", "model")]
    device = Device(absent[0], place.number, state=state, folder=place.folder)
    client = device.client(absent[1], SecretStream(secrets.randbits(256), "protect"))
    client = replace(client, round=number, start=start, reports=Reports(defence.reports))
    copied = replace(update, tensors={key: tensor.clone() for key, tensor in update.tensors.items()})
    protected = defence.on_update(copied, client)
    _check_form(defence, protected, update)
    if place.folder is not None:
        place.folder.save_state(number, {**state, _ANSWERED: torch.tensor(number)})
    elif state:
        raise ConfigError(f"Defence {defence.spec!r} keeps private state, got no folder for it. {place.name_one}")
    return protected


def _check_form(defence: Defence, protected: Update, update: Update) -> None:
    """Raise unless the defence returned finite tensors with the names, shapes and types of the update."""
    for found, wanted in ((protected.tensors, update.tensors), (protected.buffers, update.buffers)):
        if {key: (t.shape, t.dtype) for key, t in found.items()} != {k: (t.shape, t.dtype) for k, t in wanted.items()}:
            raise DefenceError(
                f"Defence {defence.spec!r} must keep the names, shapes and types of an update in a mod, got others. "
                "Use gradveil's own app, whose server can undo that (docs/flower.md)."
            )
        if not all(bool(torch.isfinite(tensor).all()) for tensor in found.values()):
            raise DivergedError("The protected update must be finite, got NaN or infinity. Lower the learning rate.")


class _Absent:
    """Stands for a part of the client that is not there; a defence that reads it sends nothing."""

    def __init__(self, what: str, defence: Defence) -> None:
        self._what, self._spec = what, defence.spec

    def _refuse(self, *_: object, **__: Mapping[str, Any]) -> NoReturn:
        raise DefenceError(
            f"Defence {self._spec!r} reads the client's {self._what}, which a mod does not have. Train with "
            "gradveil.flower.train inside your train function."
        )

    def __getattr__(self, name: str) -> Tensor:
        self._refuse()

    __len__ = __iter__ = __getitem__ = __call__ = _refuse
