"""Data sets as values; `load_dataset` loads them from a name, an ``.npz`` file or a folder."""

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import platformdirs

from gradveil import registry
from gradveil.data.checks import Expected
from gradveil.data.download import RemoteFile
from gradveil.data.own import OwnArrays, read_folder, read_npz
from gradveil.errors import ConfigError, DataError
from gradveil.own import ADOPTED, is_own
from gradveil.validate import in_range


@dataclass(frozen=True)
class Split:
    """Images with their labels.

    Attributes:
        images: (N, C, H, W), uint8 or float32 in [0, 1].
        labels: (N,) int64.
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Dataset:
    """A training and a test split, with public facts about them.

    Attributes:
        name: the spec that loads it again.
        train: the images that are divided among the clients.
        test: the images on which the server measures accuracy.
        num_classes: labels are 0..num_classes-1.
        mean: mean per channel, for normalisation: the set's published constants, or 0.5 for a user's own set.
        std: standard deviation per channel, as ``mean``.
        note: what is special about this copy, such as missing batches.
        class_names: what the labels 0, 1, ... stand for, or () if nobody said.
    """

    name: str
    train: Split
    test: Split
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, split in (("training", self.train), ("test", self.test)):
            images, labels = split.images, split.labels
            what = f"The {part} images of data set {self.name!r}"
            if images.ndim != 4 or images.dtype not in (np.uint8, np.float32):
                raise DataError(
                    f"{what} must be uint8 or float32 of shape (N, C, H, W), got {images.dtype} {images.shape}."
                )
            if len(images) == 0:
                raise DataError(
                    f"There must be at least one {part} image in data set {self.name!r}, got none. "
                    "Add images to that split."
                )
            if labels.shape != (len(images),):
                raise DataError(
                    f"{what} must have one label each, got {len(images):,} images and labels {labels.shape}."
                )
            wrong = labels[(labels < 0) | (labels >= self.num_classes)]
            if len(wrong):
                raise DataError(f"{what} must have labels in 0..{self.num_classes - 1}, got {wrong[0]}.")
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            shapes = f"{self.train.images.shape[1:]} and {self.test.images.shape[1:]}"
            raise DataError(f"Training and test images of data set {self.name!r} must have one shape, got {shapes}.")
        if not len(self.mean) == len(self.std) == self.shape[0]:
            raise DataError(
                f"Data set {self.name!r} has {self.shape[0]} channels, but {len(self.mean)} means are given."
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


@dataclass(frozen=True)
class NamedSet(registry.Component, ABC):
    """Base of the published sets; a subclass in any file of this folder is found by its name.

    Attributes:
        files: the files that the authors publish, and where.
        num_classes: number of classes.
        mean: published mean per channel, for normalisation; being public, it needs no client's data.
        std: published standard deviation per channel.
        full_size: numbers of training and test images in the whole set; a copy with fewer says so in its note.
        class_names: what the labels stand for, or () if they speak for themselves.
    """

    kind: ClassVar[str] = "datasets"
    files: ClassVar[tuple[RemoteFile, ...]] = ()
    num_classes: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    full_size: ClassVar[tuple[int, int]]
    class_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read(self, root: Path) -> Dataset:
        """Read the set from its files below ``root``; missing files are downloaded."""

    def expected(self, root: Path) -> list[Expected]:
        """Return the files that `gradveil.data.verify` checks: by default the published ones that are no archives."""
        return [Expected(root / file.path, file.md5) for file in self.files if file.unpacks_to is None]

    def _dataset(self, train: Split, test: Split, detail: str = "") -> Dataset:
        parts = zip(("training", "test"), (train, test), self.full_size, (detail, ""), strict=True)
        lacks = [
            f"{len(split):,} of {full:,} {part} images{extra}"
            for part, split, full, extra in parts
            if len(split) != full
        ]
        note = "; ".join(lacks)
        return Dataset(self.spec, train, test, self.num_classes, self.mean, self.std, note, self.class_names)


@dataclass(frozen=True)
class FolderSettings:
    """Settings of a user's own folder of pictures: ``folder/:size=32``."""

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            in_range("size", self.size, 1)


def data_root(given: str | Path | None = None) -> Path:
    """Return the data root: ``given``, else the environment variable GRADVEIL_DATA, else the user's cache folder."""
    if given is not None:
        return Path(given).expanduser()
    variable = os.environ.get("GRADVEIL_DATA")
    return Path(variable).expanduser() if variable else platformdirs.user_cache_path("gradveil")


def load_dataset(spec: str, root: str | Path | None = None) -> Dataset:
    """Load a data set.

    Args:
        spec: a named set (``mnist-5k``, ``celeba:size=32``); a file ``own.npz``; or a folder of class subfolders with
            pictures, written with a slash (``scans/``, ``scans/:size=32``). A relative path that is not found in the
            working directory is looked up below the data root.
        root: the data root, see `data_root`.

    Raises:
        UnknownNameError: no such name.
        DataError: a file is missing, corrupt or does not fit.
    """
    place, spec = data_root(root), spec.strip()
    if isinstance(adopted := ADOPTED.get(spec), Dataset):
        return adopted
    match = re.fullmatch(r"(?P<path>.+?)(?::(?P<settings>[A-Za-z_][\w-]*=.*))?", spec, flags=re.DOTALL)
    if match is None:
        raise ConfigError(
            "A data set must be a name, an .npz file or a folder, got nothing. See `gradveil list datasets`."
        )
    path, settings = match["path"], match["settings"] or ""
    named = is_own(path, "datasets") or path in registry.names("datasets")
    try:
        if path.lower().endswith(".npz"):
            if settings:
                raise ConfigError(f"An .npz file takes no settings, got {settings!r}. Write {path!r} alone.")
            return _own(spec, read_npz(_find(path, place)))
        if not named and ("/" in path or os.sep in path or Path(path).expanduser().is_dir()):
            _, texts = registry.parse_spec(f"folder:{settings}")
            chosen = FolderSettings(**registry.convert(FolderSettings, texts, owner=f"data folder {path!r}"))
            return _own(spec, read_folder(_find(path, place), chosen.size))
        return registry.build(NamedSet, spec).read(place)
    except OSError as error:
        raise DataError(f"Data set {spec!r} can't be read: {error}. Check the path and its permissions.") from error


def _own(spec: str, arrays: OwnArrays) -> Dataset:
    """Return a user's own set: mean and std are 0.5, since statistics of private data are not public knowledge."""
    half = (0.5,) * arrays.x_train.shape[1]
    train, test = Split(arrays.x_train, arrays.y_train), Split(arrays.x_test, arrays.y_test)
    return Dataset(spec, train, test, arrays.num_classes, half, half, class_names=arrays.class_names)


def _find(path: str, root: Path) -> Path:
    here = Path(path).expanduser()
    below = root / here
    return below if not here.exists() and below.exists() else here
