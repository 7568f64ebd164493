"""SVHN: two MATLAB files of cropped house-number digits."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.download import RemoteFile, ensure
from gradveil.data.formats import read_svhn


@dataclass(frozen=True)
class Svhn(NamedSet):
    """Digits of house numbers, 73,257 + 26,032 colour images of 32x32, in ``svhn/`` or in the data root itself.

    Reference: Netzer et al. 2011, http://ufldl.stanford.edu/housenumbers/, "Format 2: Cropped Digits".
    """

    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, ...]] = (0.4377, 0.4438, 0.4728)
    std: ClassVar[tuple[float, ...]] = (0.1980, 0.2010, 0.1970)
    full_size: ClassVar[tuple[int, int]] = (73_257, 26_032)
    files: ClassVar[tuple[RemoteFile, ...]] = (
        RemoteFile(
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            "svhn/train_32x32.mat",
            "e26dedcc434d2e4c54c9b2d4a06d8373",
        ),
        RemoteFile(
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            "svhn/test_32x32.mat",
            "eb5a983be6a315427106f1b164d9cef3",
        ),
    )

    def read(self, root: Path) -> Dataset:
        """Read the two files; a copy in ``svhn/`` is preferred to one in the root."""
        train, test = (
            Split(*read_svhn(place if (place := _place(file, root)).exists() else ensure(file, root)))
            for file in self.files
        )
        return self._dataset(train, test)

    def expected(self, root: Path) -> list[Expected]:
        """Return the two files at their actual places."""
        return [Expected(_place(file, root), file.md5) for file in self.files]


def _place(file: RemoteFile, root: Path) -> Path:
    in_root = root / Path(file.path).name
    return in_root if in_root.exists() and not (root / file.path).exists() else root / file.path
