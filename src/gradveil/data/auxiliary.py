"""Public images from another set, used beside the clients' private ones."""

import hashlib
from collections.abc import Sequence

import numpy as np

from gradveil.data.datasets import Dataset, Split
from gradveil.data.pixels import to_bytes, to_unit
from gradveil.errors import ConfigError


def joined(dataset: Dataset, aux: Dataset, *, labelled: bool = True) -> Split:
    """Return the training images of both sets, those of ``aux`` last.

    Labels of ``aux`` must be classes of the task only if ``labelled``.

    Raises:
        ConfigError: the sets do not fit one model.
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
    """Raise ConfigError if a public image is, pixel for pixel, also a private client's.

    Args:
        train: all training images.
        private: indices of the private clients' images.
        public: indices of the public images.
    """
    theirs = set(_pixels(train, public))
    same = sum(pixels in theirs for pixels in _pixels(train, private))
    if same:
        raise ConfigError(
            f"Public images must not be private clients' images, got {same:,} that are. "
            "Choose another --aux, or remove duplicate images from the set."
        )


def dealt(indices: np.ndarray, guards: int) -> list[np.ndarray]:
    """Divide the guards' images into one part per guard."""
    if len(indices) < guards:
        raise ConfigError(
            f"The guards' data must hold an image for each of {guards} guards, got {len(indices)}. Give a larger --aux."
        )
    return [indices[start::guards] for start in range(guards)]


def placed(private: Sequence[np.ndarray], guards: Sequence[np.ndarray], early: Sequence[int]) -> list[np.ndarray]:
    """Return all clients' parts by client number: the guards' at ``early``, the private ones in between.

    Example:
        >>> [int(part[0]) for part in placed([np.array([5]), np.array([6])], [np.array([9])], [1])]
        [5, 9, 6]
    """
    rest, own = iter(private), dict(zip(early, guards, strict=True))
    return [own[number] if number in own else next(rest) for number in range(len(private) + len(guards))]


def image_keys(images: np.ndarray) -> np.ndarray:
    """Return a key (N,) int64 for each image (N, C, H, W), the same for equal pixels, whether bytes or floats."""
    whole = to_bytes(images).numpy()
    digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in whole]
    return np.frombuffer(b"".join(digests), dtype="<i8").copy()


def _pixels(train: Split, indices: np.ndarray) -> list[bytes]:
    """Return each image as bytes, whether its pixels are stored as bytes or floats."""
    return [image.tobytes() for image in to_bytes(train.images[indices]).numpy()]
