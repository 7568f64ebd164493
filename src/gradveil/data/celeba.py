"""CelebA: aligned faces of celebrities, with the attribute Male as label."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.download import RemoteFile, ensure
from gradveil.data.own import every_fifth
from gradveil.data.pictures import list_pictures, read_pictures
from gradveil.errors import DataError
from gradveil.limits import LONGEST_TEXT, read_bytes
from gradveil.validate import in_range

_FOLDER = "celeba/img_align_celeba"
_PAGE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_LAST_TRAIN, _FIRST_TEST = 162_770, 182_638
"""The official split by picture number: training 1-162770, validation up to 182637, test 182638-202599."""


@dataclass(frozen=True)
class CelebA(NamedSet):
    """Faces, 162,770 + 19,962 colour images, cut to the central 178x178 and resized; the label is 1 for Male.

    Below ``celeba/``: ``img_align_celeba/*.jpg``, ``list_attr_celeba.txt`` and, if it is there,
    ``list_eval_partition.txt``; without it the official ranges of picture numbers hold. Only existing
    pictures are loaded; if they leave the training or the test split empty, every fifth picture of each label is for
    the test.
    The authors publish no constants for normalisation, so mean and std are 0.5.

    Reference: Liu et al. 2015, "Deep learning face attributes in the wild", https://arxiv.org/abs/1411.7766.

    Attributes:
        size: side of the images in pixels.
    """

    size: int = 64

    name: ClassVar[str] = "celeba"
    num_classes: ClassVar[int] = 2
    mean: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    std: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    full_size: ClassVar[tuple[int, int]] = (162_770, 19_962)
    files: ClassVar[tuple[RemoteFile, ...]] = (
        RemoteFile(
            _PAGE,
            "celeba/img_align_celeba.zip",
            "00d2c5bc6d35e252742224ab0c1e8fcb",
            unpacks_to=_FOLDER,
            direct=False,
        ),
        RemoteFile(_PAGE, "celeba/list_attr_celeba.txt", "75e246fa4810816ffd6ee81facbd244c", direct=False),
    )

    def __post_init__(self) -> None:
        in_range("size", self.size, 1, 178)

    def read(self, root: Path) -> Dataset:
        """Read the existing pictures, with their label and split."""
        folder, table = (ensure(file, root) for file in self.files)
        males = _read_males(table)
        paths = list_pictures(folder)
        if not paths:
            raise DataError(f"{folder} must hold pictures, got none. Delete it and put img_align_celeba.zip beside it.")
        unlisted = [path for path in paths if path.name not in males]
        if unlisted:
            raise DataError(
                f"{unlisted[0]} must be listed in {table.name}, but is not. Remove it or complete the list."
            )
        labels = np.array([males[path.name] for path in paths], np.int64)
        parts = _partition(paths, folder.parent / "list_eval_partition.txt")
        train, test = parts == 0, parts == 2
        if not (train.any() and test.any()):
            test = every_fifth(labels)
            train = ~test
        splits = [
            Split(
                read_pictures([paths[i] for i in np.flatnonzero(chosen)], size=self.size, crop=178, colour=True),
                labels[chosen],
            )
            for chosen in (train, test)
            if chosen.any()
        ]
        if len(splits) < 2:
            raise DataError(
                f"{folder} must hold at least 5 pictures of one label for a test split, got {len(paths)} pictures."
            )
        return self._dataset(splits[0], splits[1])

    def expected(self, root: Path) -> list[Expected]:
        """Return the list of attributes, which has a published checksum, and the pictures, which are counted."""
        archive, table = self.files
        pictures = Expected(root / str(archive.unpacks_to), count=lambda path: len(list_pictures(path)))
        return [pictures, Expected(root / table.path, table.md5)]


def _read_males(table: Path) -> dict[str, int]:
    """Return 0 or 1 by file name; the list has a count, a line of attribute names, then names, each with 1 or -1s."""
    try:
        _, header, *lines = read_bytes(table, LONGEST_TEXT).decode("utf-8").splitlines()
        column = header.split().index("Male") + 1
        values = {"-1": 0, "1": 1}
        return {fields[0]: values[fields[column]] for fields in map(str.split, lines) if fields}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(
            f"{table} must be CelebA's list of attributes with a column Male of 1 and -1, but {type(error).__name__}: "
            f"{error}. Put the authors' file there."
        ) from error


def _partition(paths: list[Path], table: Path) -> np.ndarray:
    """Return 0 (training), 1 (validation) or 2 (test) per picture, by the authors' list or the picture's number."""
    try:
        if table.exists():
            listed = dict(
                line.split() for line in read_bytes(table, LONGEST_TEXT).decode("utf-8").splitlines() if line.strip()
            )
            return np.array([int(listed[path.name]) for path in paths])
        numbers = np.array([int(path.stem) for path in paths])
    except (OSError, ValueError, KeyError) as error:
        what = table if table.exists() else paths[0].parent
        raise DataError(
            f"{what} must give the official split of each picture, but {type(error).__name__}: {error}. "
            "Keep the authors' file names, or put their list_eval_partition.txt there."
        ) from error
    return np.where(numbers <= _LAST_TRAIN, 0, np.where(numbers >= _FIRST_TEST, 2, 1))
