"""Divide the training images among clients: evenly, by class, by disjoint label groups, or by Dirichlet draws.

Every partition gives each client a sorted array of indices, no image to two clients, and equal parts for equal
generators. It assigns an owner to each image, and `_parts` sorts the images by owner once, so ten thousand clients cost
no more than ten.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from gradveil.data.sensitive import mark_sensitive as mark_sensitive  # the last step
from gradveil.errors import ConfigError
from gradveil.registry import Component
from gradveil.validate import in_range

_NOBODY = -1
_MAX_DRAWS = 1000


@dataclass(frozen=True)
class Partition(Component, ABC):
    """Base of the ways to divide images among clients."""

    kind: ClassVar[str] = "partitions"

    @abstractmethod
    def split(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Divide images among clients.

        Args:
            labels: (N,) the label of each image, in 0..num_classes-1.
            num_clients: number of clients.
            num_classes: number of classes of the set.
            rng: the source of all randomness.

        Returns:
            The sorted indices of each client's images; no image is given twice.

        Raises:
            ConfigError: there are too few images.
        """


@dataclass(frozen=True)
class Iid(Partition):
    """Divide the images at random, whatever their class; the sizes differ by at most one.

    Attributes:
        images: number of images per client; none gives out all images.
    """

    images: int | None = None

    def __post_init__(self) -> None:
        if self.images is not None:
            in_range("images", self.images, 1)

    def split(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Give out the images in random order, one client after the other."""
        _check_clients(labels, num_clients)
        needed = len(labels) if self.images is None else self.images * num_clients
        if needed > len(labels):
            raise ConfigError(
                f"{num_clients:,} clients x {self.images:,} images = {needed:,} needed, the set has {len(labels):,}; "
                f"lower images to {len(labels) // num_clients:,} or less."
            )
        owner = np.full(len(labels), _NOBODY)
        owner[rng.permutation(len(labels))[:needed]] = np.arange(needed) % num_clients
        return _parts(owner, num_clients)


@dataclass(frozen=True)
class ByClass(Partition):
    """Give each client images of exactly ``classes`` classes; the numbers of clients per class differ by at most one.

    Each client gets the classes that were given out least often so far; ties are broken at random. Classes without
    images are ignored.

    Reference: Sun et al. 2021 (Soteria), https://arxiv.org/abs/2012.06043: 100 clients x 2 classes x 100 images;
    the scheme goes back to McMahan et al. 2017, https://arxiv.org/abs/1602.05629.

    Attributes:
        classes: number of classes per client.
        per_class: number of images per class and client; none divides all images of a class evenly among its clients.
    """

    classes: int = 2
    per_class: int | None = 100

    def __post_init__(self) -> None:
        in_range("classes", self.classes, 1)
        if self.per_class is not None:
            in_range("per_class", self.per_class, 1)

    def split(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Assign classes to clients, then divide each class's images among its clients."""
        _check_clients(labels, num_clients)
        present = np.unique(labels)
        if self.classes > len(present):
            have = f"{num_classes} classes" + (
                f", {len(present)} of them with images" if len(present) < num_classes else ""
            )
            raise ConfigError(f"classes must be at most {len(present)}, since the set has {have}, got {self.classes}.")
        holds = self._deal(len(present), num_clients, rng)  # (clients, present classes)
        self._check_supply(present, np.bincount(np.searchsorted(present, labels)), holds.sum(0))
        owner = np.full(len(labels), _NOBODY)
        for column, label in enumerate(present):
            clients = np.flatnonzero(holds[:, column])
            images = rng.permutation(np.flatnonzero(labels == label))
            if self.per_class is not None:
                images = images[: self.per_class * len(clients)]
            if len(clients):
                owner[images] = clients[np.arange(len(images)) % len(clients)]
        return _parts(owner, num_clients)

    def _deal(self, num_present: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        holds = np.zeros((num_clients, num_present), dtype=bool)
        dealt = np.zeros(num_present)
        for client, ties in enumerate(rng.random((num_clients, num_present))):
            chosen = np.argsort(dealt + ties)[: self.classes]
            holds[client, chosen] = True
            dealt[chosen] += 1
        return holds

    def _check_supply(self, present: np.ndarray, supply: np.ndarray, num_takers: np.ndarray) -> None:
        each = supply // np.maximum(num_takers, 1)
        worst = int(np.argmin(np.where(num_takers > 0, each, supply.max() + 1)))
        asked = 1 if self.per_class is None else self.per_class
        if each[worst] >= asked or not num_takers[worst]:
            return
        way_out = f"lower per_class to {each[worst]:,} or less" if each[worst] else "take fewer clients"
        raise ConfigError(
            f"class {present[worst]} has {supply[worst]:,} images, {num_takers[worst]:,} clients x {asked:,} = "
            f"{num_takers[worst] * asked:,} needed; {way_out}."
        )


@dataclass(frozen=True)
class LabelParts(Partition):
    """Divide the classes, with their images, into disjoint groups, one per client, whose sizes differ by at most one.

    With more clients than classes each class is cut into several parts instead: each client then holds one class, the
    numbers of clients per class differ by at most one, and no image is given twice. Classes without images are ignored.
    """

    def split(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Give out the classes in random order, or the clients to the classes if there are more clients."""
        _check_clients(labels, num_clients)
        present = rng.permutation(np.unique(labels))
        owner = np.full(len(labels), _NOBODY)
        for position, label in enumerate(present):
            images = rng.permutation(np.flatnonzero(labels == label))
            clients = np.arange(position, num_clients, len(present)) if position < num_clients else np.array([])
            takers = clients.astype(int) if len(clients) else np.array([position % num_clients])
            if len(images) < len(takers):
                raise ConfigError(
                    f"class {label} has {len(images):,} images, too few for the {len(takers):,} clients that share it "
                    f"({num_clients:,} clients, {len(present)} classes); take fewer clients."
                )
            owner[images] = takers[np.arange(len(images)) % len(takers)]
        return _parts(owner, num_clients)


@dataclass(frozen=True)
class Dirichlet(Partition):
    r"""Divide each class among the clients by proportions drawn from a symmetric Dirichlet distribution.

    .. math:: p_c \sim \mathrm{Dir}(\alpha, \ldots, \alpha), \quad \text{client } k \text{ gets the share } p_{c,k}
        \text{ of class } c

    A small alpha gives clients few classes and very unequal sizes; a large one comes close to iid. All images are
    given out. The draw is repeated until each client has ``min_images``.

    Reference: Hsu et al. 2019, https://arxiv.org/abs/1909.06335; in this form Li et al. 2022,
    https://arxiv.org/abs/2102.02079, Section IV.

    Attributes:
        alpha: concentration, above 0.
        min_images: the smallest number of images per client.
    """

    alpha: float = 0.5
    min_images: int = 1

    def __post_init__(self) -> None:
        in_range("alpha", self.alpha, 0, open_low=True)
        in_range("min_images", self.min_images, 1)

    def split(
        self, labels: np.ndarray, num_clients: int, num_classes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Draw the number of images per class and client, then assign images."""
        _check_clients(labels, num_clients, self.min_images)
        present, supply = np.unique(labels, return_counts=True)
        for _ in range(_MAX_DRAWS):
            counts = self._draw(supply, num_clients, rng)  # (present classes, clients)
            if counts.sum(0).min() >= self.min_images:
                break
        else:
            raise ConfigError(
                f"dirichlet could not give each of {num_clients:,} clients at least {self.min_images:,} of "
                f"{len(labels):,} images with alpha={self.alpha:g} in {_MAX_DRAWS:,} draws; "
                "raise alpha, or lower min_images or the number of clients."
            )
        owner = np.full(len(labels), _NOBODY)
        for label, shares in zip(present, counts, strict=True):
            owner[rng.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(num_clients), shares)
        return _parts(owner, num_clients)

    def _draw(self, supply: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        shares = rng.dirichlet(np.full(num_clients, self.alpha), size=len(supply))
        if not np.allclose(shares.sum(1), 1):  # underflow or overflow; NaN fails too
            raise ConfigError(
                f"alpha must be a moderate number such as 0.5, got {self.alpha:g}, which draws no finite shares."
            )
        bounds = np.rint(np.cumsum(shares, axis=1) * supply[:, None]).astype(int)
        bounds[:, -1] = supply  # rounding errors of the sum must lose no image
        return np.diff(np.minimum(bounds, supply[:, None]), axis=1, prepend=0)


def _check_clients(labels: np.ndarray, num_clients: int, min_images: int = 1) -> None:
    in_range("num_clients", num_clients, 1)
    if num_clients * min_images > len(labels):
        each = f"{min_images:,} images each" if min_images > 1 else "an image each"
        raise ConfigError(f"{num_clients:,} clients need {each}, the set has {len(labels):,}; take fewer clients.")


def _parts(owner: np.ndarray, num_clients: int) -> list[np.ndarray]:
    """Return the sorted indices that each client owns (a stable sort by owner keeps their order)."""
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(num_clients + 1))
    return [order[start:stop] for start, stop in pairwise(bounds)]
