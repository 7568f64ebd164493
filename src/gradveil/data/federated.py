"""A data set dealt to clients: the owner of each image, and which images are sensitive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from gradveil.data.auxiliary import dealt, joined, placed, refuse_overlap
from gradveil.data.datasets import Dataset, Split
from gradveil.data.partition import Partition, mark_sensitive
from gradveil.data.pixels import to_batch
from gradveil.errors import ConfigError
from gradveil.randomness import derive_seed
from gradveil.registry import build
from gradveil.types import Batch

_ARRAYS = (
    "train_images", "train_labels", "test_images", "test_labels", "indices", "offsets", "sensitive", "public_images",
    "public_labels",
)  # fmt: skip


@dataclass(frozen=True)
class FederatedData:
    """Training images with their owners, and the test images.

    Attributes:
        train: all training images.
        test: all test images.
        indices: positions of the clients' images in ``train``, one client after the other.
        offsets: (N + 1,) where each client's part of ``indices`` begins and ends.
        sensitive: whether each entry of ``indices`` is marked.
        public: images that every device has; may be None or empty.
    """

    train: Split
    test: Split
    indices: np.ndarray
    offsets: np.ndarray
    sensitive: np.ndarray
    public: Split | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def sizes(self) -> list[int]:
        """Return the number of images of each client."""
        return [int(size) for size in np.diff(self.offsets)]

    def client(self, number: int) -> Batch:
        """Return all training images of one client."""
        mine = slice(self.offsets[number], self.offsets[number + 1])
        return _batch(self.train, self.indices[mine], self.sensitive[mine])

    def only(self, client: int, number: int, num_clients: int) -> "FederatedData":
        """Return one device's data: this client's images, renumbered, plus shared test and public images."""
        mine = slice(self.offsets[client], self.offsets[client + 1])
        chosen = self.indices[mine]
        train = Split(self.train.images[chosen], self.train.labels[chosen])
        offsets = np.where(np.arange(num_clients + 1) > number, len(chosen), 0)
        return FederatedData(train, self.test, np.arange(len(chosen)), offsets, self.sensitive[mine], self.public)

    @cached_property
    def aux(self) -> Batch | None:
        """Return the public images, or None."""
        if self.public is None or not len(self.public):
            return None
        everything = np.arange(len(self.public))
        return _batch(self.public, everything, np.zeros(len(everything), bool))

    def images(self, which: str, client: int | None, start: int, stop: int) -> Batch:
        """Return a slice of the ``test`` images, of all clients' ``sensitive`` ones, or of one client's ``own``."""
        if which == "test":
            chosen = np.arange(start, min(stop, len(self.test)))
            return _batch(self.test, chosen, np.zeros(len(chosen), bool))
        chosen = self._places(which, client)[start:stop]
        return _batch(self.train, self.indices[chosen], self.sensitive[chosen])

    def count(self, which: str, client: int | None) -> int:
        """Return the number of images that ``images`` can return."""
        return len(self.test) if which == "test" else len(self._places(which, client))

    def _places(self, which: str, client: int | None) -> np.ndarray:
        """Return positions in ``indices``."""
        if which == "sensitive":
            return np.flatnonzero(self.sensitive)
        if client is None:
            raise ValueError("own images need a client")
        return np.arange(self.offsets[client], self.offsets[client + 1])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name, from which `of_arrays` makes the same data in another process."""
        arrays = (
            self.train.images, self.train.labels, self.test.images, self.test.labels,
            self.indices, self.offsets, self.sensitive, *self._public_arrays,
        )  # fmt: skip
        return dict(zip(_ARRAYS, arrays, strict=True))

    @property
    def _public_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        split = self.public or Split(self.train.images[:0], self.train.labels[:0])
        return split.images, split.labels

    @staticmethod
    def of_arrays(array: Callable[[str], np.ndarray]) -> "FederatedData":
        """Return the data whose arrays a function gives by their names."""
        a = [array(name) for name in _ARRAYS]
        return FederatedData(Split(a[0], a[1]), Split(a[2], a[3]), a[4], a[5], a[6], Split(a[7], a[8]))


def federate(
    dataset: Dataset,
    partition: str,
    num_clients: int,
    sensitive: str,
    seed: int,
    aux: Dataset | None = None,
    guards: Sequence[int] = (),
    aux_labels: bool = True,
) -> FederatedData:
    """Deal the training images to clients by a partition's text (``dirichlet:alpha=0.5``), and mark sensitive images.

    If ``aux`` is given, every device has its images, the clients in ``guards`` train on them, and the other clients
    share the data set. Without ``aux``, guards get parts like all other clients. A guard must not have any image of a
    private client. Labels of ``aux`` must be classes of the task if ``aux_labels`` says that the defence reads them.
    """
    rng = np.random.default_rng(derive_seed(seed, "partition"))
    train, private = dataset.train, num_clients - (len(guards) if aux is not None else 0)
    if private < 1:
        raise ConfigError(
            f"Some client must be no guard, got {num_clients} clients of which {len(guards)} are guards. "
            "Raise --clients."
        )
    parts = build(Partition, partition).split(train.labels, private, dataset.num_classes, rng)
    marks = mark_sensitive(sensitive or None, parts, np.random.default_rng(derive_seed(seed, "sensitive")))
    if aux is not None:
        train = joined(dataset, aux, labelled=aux_labels or bool(guards))
        public = np.arange(len(dataset.train), len(train))
        refuse_overlap(train, np.concatenate(parts), public)
        theirs = dealt(public, len(guards)) if guards else []
        parts = placed(parts, theirs, guards)
        marks = placed(marks, [np.zeros(len(part), bool) for part in theirs], guards)
    elif guards:
        both = ([part for client, part in enumerate(parts) if (client in guards) == early] for early in (False, True))
        refuse_overlap(train, *(np.concatenate([*some, np.arange(0)]) for some in both))
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    shared = None if aux is None else Split(train.images[len(dataset.train) :], train.labels[len(dataset.train) :])
    return FederatedData(train, dataset.test, np.concatenate(parts), offsets, np.concatenate(marks), shared)


def _batch(split: Split, indices: np.ndarray, sensitive: np.ndarray) -> Batch:
    batch = to_batch(split.images[indices], split.labels[indices], np.array(sensitive))
    return replace(batch, images=batch.images.to(memory_format=torch.channels_last))
