"""MNIST and Fashion-MNIST: four idx files each."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.download import RemoteFile, ensure
from gradveil.data.formats import idx_md5, read_idx_pair

_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


FourChecksums = tuple[str, str, str, str]


def _published(base: str, folder: str, checksums: FourChecksums) -> tuple[RemoteFile, ...]:
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
    contents: ClassVar[FourChecksums] = (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    )
    """Checksums of the unzipped files, however they were packed."""
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
        """Return the files that `read` would use; what they hold has a checksum too, in whatever way it is packed."""
        found = []
        for file, contents in zip(self.files, self.contents, strict=True):
            unzipped = root / file.path.removesuffix(".gz")
            digest = partial(idx_md5, num_dimensions=3 if "idx3" in file.path else 1)
            path, md5 = (unzipped, None) if unzipped.exists() else (root / file.path, file.md5)
            found.append(Expected(path, md5, contents_md5=contents, digest=digest))
        return found


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Pictures of clothes, 60,000 + 10,000 grey images of 28x28, below ``FashionMNIST/raw/``, gzipped or not.

    Reference: Xiao et al. 2017, https://arxiv.org/abs/1708.07747.
    """

    class_names: ClassVar[tuple[str, ...]] = (
        "t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip
    mean: ClassVar[tuple[float, ...]] = (0.2860,)
    std: ClassVar[tuple[float, ...]] = (0.3530,)
    contents: ClassVar[FourChecksums] = (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    )
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
