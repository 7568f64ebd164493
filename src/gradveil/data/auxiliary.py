"""Public images from another set, which stand beside the clients' private ones."""

import hashlib
from collections.abc import Sequence

import numpy as np

from gradveil.data.datasets import Dataset, Split
from gradveil.data.pixels import to_bytes, to_unit
from gradveil.errors import ConfigError


def joined(dataset: Dataset, aux: Dataset, *, labelled: bool = True) -> Split:
    """The training images of both sets, those of ``aux`` last; an error where they don't fit one model.

    Where nobody reads the labels of ``aux``, they need not be classes of the task.
    """
    if aux.shape != dataset.shape:
        raise ConfigError(
            f"Public images must have the shape {dataset.shape} of {dataset.name!r}, got {aux.shape} in "
            f"{aux.name!r}. Choose another --aux."
        )
    if labelled and aux.num_classes > dataset.num_classes:
        raise ConfigError(
            f"Public images must have at most the {dataset.num_classes} classes of {dataset.name!r}, "
            f"got {aux.num_classes} in {aux.name!r}. Choose another --aux."
        )
    images = [dataset.train.images, aux.train.images]
    if images[0].dtype != images[1].dtype:
        images = [to_unit(part).numpy() for part in images]
    return Split(np.concatenate(images), np.concatenate([dataset.train.labels, aux.train.labels]))


def refuse_overlap(train: Split, private: np.ndarray, public: np.ndarray) -> None:
    """An error where a public image is, pixel for pixel, also one of a private client's.

    Args:
        train: all training images.
        private: indices of the private clients' images.
        public: indices of the public images.
    """
    theirs = set(_pixels(train, public))
    same = sum(pixels in theirs for pixels in _pixels(train, private))
    if same:
        raise ConfigError(
            f"Public images must be none of the private clients', got {same:,} that are. "
            "Choose another --aux, or take out what is twice in the set."
        )


def dealt(indices: np.ndarray, guards: int) -> list[np.ndarray]:
    """The guards' images in as many parts as there are guards."""
    if len(indices) < guards:
        raise ConfigError(f"The guards' data must hold an image for each of {guards} guards, got {len(indices)}.")
    return [indices[start::guards] for start in range(guards)]


def placed(private: Sequence[np.ndarray], guards: Sequence[np.ndarray], early: Sequence[int]) -> list[np.ndarray]:
    """All clients' parts by their number: the guards' at ``early``, the private ones in between.

    Example:
        >>> [int(part[0]) for part in placed([np.array([5]), np.array([6])], [np.array([9])], [1])]
        [5, 9, 6]
    """
    rest, own = iter(private), dict(zip(early, guards, strict=True))
    return [own[number] if number in own else next(rest) for number in range(len(private) + len(guards))]


def image_keys(images: np.ndarray) -> np.ndarray:
    """(N,) int64 a key of each image (N, C, H, W), the same for the same pixels, whatever their type."""
    whole = to_bytes(images).numpy()
    digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in whole]
    return np.frombuffer(b"".join(digests), dtype="<i8").copy()


def _pixels(train: Split, indices: np.ndarray) -> list[bytes]:
    """Each image as bytes, whatever the type of the pixels."""
    return [image.tobytes() for image in to_bytes(train.images[indices]).numpy()]
