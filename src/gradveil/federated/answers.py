"""The server's checks of what clients send, before any of it is used.

A client on another machine may be broken or hostile, so nothing that it states is believed: the names, shapes and types
of tensors must be those that the training's defence sends, numbers must be finite, and counts must lie within what the
client stated at the start. A check reads no more than what arrived; no memory is reserved by a shape that a client only
declares.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defences.base import Defence, Server
from gradveil.errors import MessageError
from gradveil.federated.client import Score
from gradveil.types import Tensors, Update

_SLACK = 4
"""A message whose form is not known may hold this many entries per entry of the model."""


@dataclass(frozen=True)
class ExpectedUpdate:
    """What a server accepts from the clients of one training.

    Attributes:
        model: an update with the names, shapes and types of the model's shared tensors; its values do not matter.
        sent: the same for what clients send, before ``on_server``; None if the defence can't tell.
        most_norm: the largest Euclidean norm of an update after ``on_server``; 0 accepts any finite one.
    """

    model: Update
    sent: Update | None
    most_norm: float = 0.0

    @staticmethod
    def of(model: Update, defence: Defence, most_norm: float = 0.0) -> "ExpectedUpdate":
        """Return what to expect from clients that train a model like this under a defence."""
        return ExpectedUpdate(model, defence.sends(model), most_norm)

    @property
    def most_entries(self) -> int:
        """Return the largest number of entries of a message whose form is not known."""
        tensors = {**self.model.tensors, **self.model.buffers}
        return _SLACK * sum(tensor.numel() for tensor in tensors.values()) + 1024


def check_sent(update: Update, expected: ExpectedUpdate, most_images: int) -> None:
    """Raise MessageError unless an update, as it arrived, has the expected form, finite entries and a possible count.

    Example:
        >>> like = Update({"w": torch.zeros(2)}, 0)
        >>> check_sent(Update({"w": torch.ones(2)}, -29), ExpectedUpdate(like, like), most_images=9)
        Traceback (most recent call last):
        gradveil.errors.MessageError: The number of images must be a whole number from 0 to 9, got -29.
    """
    check_count("The number of images", update.num_examples, most_images)
    if expected.sent is not None:
        check_form(update.tensors, expected.sent.tensors)
        check_form(update.buffers, expected.sent.buffers)
    else:
        check_size({**update.tensors, **update.buffers}, expected.most_entries)
    for tensors in (update.tensors, update.buffers):
        _check_finite(tensors)


def recover(defence: Defence, update: Update, server: Server, expected: ExpectedUpdate | None) -> Update:
    """Return an update after ``on_server``. Raise MessageError if the defence can't read it or the result is invalid.

    Without ``expected``, in a simulation, the form of the result is checked when it is added up.
    """
    if expected is None:
        return defence.on_server(update, server)
    try:
        found = defence.on_server(update, server)
    except Exception as error:  # whatever a defence of the user's does with a message that it did not foresee
        raise MessageError(
            f"The defence {defence.spec!r} must be able to read the update, got {type(error).__name__}: {error}"
        ) from error
    check_form(found.tensors, expected.model.tensors)
    check_form(found.buffers, expected.model.buffers)
    for tensors in (found.tensors, found.buffers):
        _check_finite(tensors)
    norm = float(found.norm())
    if expected.most_norm and not norm <= expected.most_norm:
        raise MessageError(f"The norm of the update must be at most {expected.most_norm:g}, got {norm:g}.")
    return found


def check_score(score: Score, most_images: int, num_classes: int) -> None:
    """Raise MessageError unless a score is possible for at most ``most_images`` images of ``num_classes`` classes."""
    check_count("The number of scored images", score.count, most_images)
    check_count("The number of correct answers", score.correct, score.count)
    if not (isinstance(score.loss_sum, float) and 0 <= score.loss_sum < math.inf):
        raise MessageError("The loss must be a finite number of at least 0, got another value.")
    if not score.class_count and not score.class_correct:
        return
    if len(score.class_count) != num_classes or len(score.class_correct) != num_classes:
        raise MessageError(f"Numbers per class must be given for {num_classes} classes, got another number of them.")
    for right, there in zip(score.class_correct, score.class_count, strict=True):
        check_count("The number of images of a class", there, score.count)
        check_count("The number of correct answers of a class", right, there)
    if sum(score.class_count) != score.count or sum(score.class_correct) != score.correct:
        raise MessageError("Numbers per class must add up to those of all classes, got other sums.")


def check_count(what: str, value: object, most: int) -> None:
    """Raise MessageError unless a value is a whole number from 0 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        got = f"{value:.6g}" if isinstance(value, int | float) and abs(value) < 1e300 else f"a {type(value).__name__}"
        raise MessageError(f"{what} must be a whole number from 0 to {most:,}, got {got}.")


def check_form(tensors: Tensors, like: Tensors) -> None:
    """Raise MessageError unless tensors have the names, shapes and types of others."""
    check_names(tensors, like)
    for name, tensor in tensors.items():
        check_kind(name, tensor.shape, tensor.dtype, like[name])


def check_names(found: Mapping[str, object], like: Mapping[str, object]) -> None:
    """Raise MessageError unless both have the same names; names that are not expected are counted, not repeated."""
    missing, extra = sorted(like.keys() - found.keys()), len(found.keys() - like.keys())
    if missing or extra:
        raise MessageError(
            f"The message must hold the tensors of this training, got {len(missing)} missing"
            f"{f' ({missing[0]!r})' if missing else ''} and {extra} unknown."
        )


def check_kind(name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> None:
    """Raise MessageError unless a shape and type are those of a tensor."""
    if tuple(shape) != tuple(like.shape) or dtype != like.dtype:
        raise MessageError(
            f"Tensor {name!r} must have shape {tuple(like.shape)} and type {like.dtype}, "
            f"got {tuple(shape)[:8]} and {dtype}."
        )


def check_size(shapes: Mapping[str, Tensor], most_entries: int) -> None:
    """Raise MessageError if tensors are too many or too large; axes of length 0 count as 1, so no shape is for free."""
    entries = sum(math.prod(max(1, length) for length in tensor.shape) for tensor in shapes.values())
    if entries > most_entries:
        raise MessageError(f"A message must have at most {most_entries:,} entries, got {float(entries):.6g}.")


def _check_finite(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise MessageError(f"Tensor {name!r} must be finite, got NaN or infinity.")
