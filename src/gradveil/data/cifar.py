"""CIFAR-10 and CIFAR-100, in the binary or the python layout of their author."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.download import RemoteFile, ensure, missing
from gradveil.data.formats import read_cifar_binary, read_cifar_python

_Reader = Callable[[Path, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Cifar10(NamedSet):
    """Small photographs of 10 kinds, 50,000 + 10,000 colour images of 32x32.

    Below ``cifar-10-batches-bin/`` or ``cifar-10-batches-py/``. Any of the five training batches may be missing, which
    the note then says; the test batch is required.

    Reference: A. Krizhevsky 2009, "Learning multiple layers of features from tiny images".
    """

    num_classes: ClassVar[int] = 10
    class_names: ClassVar[tuple[str, ...]] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    mean: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    full_size: ClassVar[tuple[int, int]] = (50_000, 10_000)
    files: ClassVar[tuple[RemoteFile, ...]] = (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            unpacks_to="cifar-10-batches-bin",
        ),
    )
    python_folder: ClassVar[str] = "cifar-10-batches-py"
    batches: ClassVar[dict[str, str]] = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
    """The batches, the test batch last, with the checksums of the python layout."""

    def read(self, root: Path) -> Dataset:
        """Read the training batches that exist, and the test batch."""
        folder, ending, reader = self._layout(root)
        if not folder.exists():
            ensure(self.files[0], root)
        *train_paths, test_path = (folder / f"{name}{ending}" for name in self.batches)
        present = [path for path in train_paths if path.exists()]
        needed = [test_path, *(present or train_paths[:1])]
        for path in needed:
            if not path.exists():
                why = f"{folder} is there without it"
                raise missing(self.files[0], root, why, str(path.relative_to(root)))
        pairs = [reader(path, self.num_classes) for path in present]
        train = Split(np.concatenate([images for images, _ in pairs]), np.concatenate([labels for _, labels in pairs]))
        detail = f" ({len(present)} of {len(train_paths)} batches)" if len(train_paths) > 1 else ""
        return self._dataset(train, Split(*reader(test_path, self.num_classes)), detail)

    def expected(self, root: Path) -> list[Expected]:
        """Return all batches of the layout that exists; only the python layout has published checksums."""
        folder, ending, _ = self._layout(root)
        if ending:
            return [Expected(folder / f"{name}{ending}", count=self._count) for name in self.batches]
        return [Expected(folder / name, md5) for name, md5 in self.batches.items()]

    def _count(self, path: Path) -> int:
        return len(read_cifar_binary(path, self.num_classes)[1])

    def _layout(self, root: Path) -> tuple[Path, str, _Reader]:
        """Return the folder (with the test batch, else existing, else binary), its files' ending and their reader."""
        binary = (root / str(self.files[0].unpacks_to), ".bin", read_cifar_binary)
        python = (root / self.python_folder, "", read_cifar_python)
        test = list(self.batches)[-1]
        if (binary[0] / f"{test}.bin").exists():
            return binary
        return python if (python[0] / test).exists() or (python[0].exists() and not binary[0].exists()) else binary


@dataclass(frozen=True)
class Cifar100(Cifar10):
    """Small photographs of 100 kinds (the fine labels), 50,000 + 10,000 colour images of 32x32.

    Below ``cifar-100-binary/`` or ``cifar-100-python/``.

    Reference: A. Krizhevsky 2009, "Learning multiple layers of features from tiny images".
    """

    num_classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    files: ClassVar[tuple[RemoteFile, ...]] = (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            unpacks_to="cifar-100-binary",
        ),
    )
    python_folder: ClassVar[str] = "cifar-100-python"
    batches: ClassVar[dict[str, str]] = {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    }
