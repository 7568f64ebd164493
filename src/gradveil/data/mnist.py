"""MNIST and Fashion-MNIST: four idx files each."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.download import RemoteFile, ensure
from gradveil.data.formats import read_idx, read_idx_pair

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _published(base: str, folder: str, checksums: tuple[str, str, str, str]) -> tuple[RemoteFile, ...]:
    pairs = zip(_NAMES, checksums, strict=True)
    return tuple(RemoteFile(f"{base}/{name}.gz", f"{folder}/{name}.gz", md5) for name, md5 in pairs)


@dataclass(frozen=True)
class Mnist(NamedSet):
    """Handwritten digits, 60,000 + 10,000 grey images of 28x28, below ``MNIST/raw/``, gzipped or not.

    Reference: LeCun et al. 1998, "Gradient-based learning applied to document recognition".
    """

    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.1307,)
    std: ClassVar[tuple[float, ...]] = (0.3081,)
    full_size: ClassVar[tuple[int, int]] = (60_000, 10_000)
    files: ClassVar[tuple[RemoteFile, ...]] = _published(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "MNIST/raw",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    )

    def read(self, root: Path) -> Dataset:
        """Read the four files below ``root``; an unzipped file is preferred to a gzipped one."""
        paths = []
        for file in self.files:
            unzipped = root / file.path.removesuffix(".gz")
            paths.append(unzipped if unzipped.exists() else ensure(file, root))
        return self._dataset(Split(*read_idx_pair(*paths[:2])), Split(*read_idx_pair(*paths[2:])))

    def expected(self, root: Path) -> list[Expected]:
        """Return the files that `read` would use: gzipped ones have a published checksum, unzipped ones have none."""
        found = []
        for file in self.files:
            unzipped = root / file.path.removesuffix(".gz")
            dimensions = 3 if "idx3" in file.path else 1
            plain = Expected(unzipped, count=lambda path, dimensions=dimensions: len(read_idx(path, dimensions)))  # type: ignore[misc]
            found.append(plain if unzipped.exists() else Expected(root / file.path, file.md5))
        return found


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Pictures of clothes, 60,000 + 10,000 grey images of 28x28, below ``FashionMNIST/raw/``, gzipped or not.

    Reference: Xiao et al. 2017, https://arxiv.org/abs/1708.07747.
    """

    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    files: ClassVar[tuple[RemoteFile, ...]] = _published(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "FashionMNIST/raw",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    )
