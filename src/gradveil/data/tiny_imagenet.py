"""Tiny-ImageNet: the official folder of pictures, with the validation pictures as test split."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from gradveil.data.checks import Expected
from gradveil.data.datasets import Dataset, NamedSet, Split
from gradveil.data.download import RemoteFile, ensure, missing
from gradveil.data.pictures import list_pictures, read_pictures
from gradveil.errors import DataError
from gradveil.limits import LONGEST_TEXT, read_bytes

_FOLDER = "tiny-imagenet-200"


@dataclass(frozen=True)
class TinyImageNet(NamedSet):
    """Photographs of 200 kinds, 100,000 + 10,000 colour images of 64x64, below ``tiny-imagenet-200/``.

    Classes are numbered by their sorted WordNet names. The official test pictures have no labels, so the validation
    pictures are the test split. Only existing pictures are loaded, and the note gives their number.

    Reference: Le and Yang 2015, "Tiny ImageNet visual recognition challenge"; http://cs231n.stanford.edu/.
    """

    name: ClassVar[str] = "tiny-imagenet"
    num_classes: ClassVar[int] = 200
    mean: ClassVar[tuple[float, ...]] = (0.4802, 0.4481, 0.3975)
    std: ClassVar[tuple[float, ...]] = (0.2770, 0.2691, 0.2821)
    full_size: ClassVar[tuple[int, int]] = (100_000, 10_000)
    files: ClassVar[tuple[RemoteFile, ...]] = (
        RemoteFile(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            unpacks_to=_FOLDER,
        ),
    )

    def read(self, root: Path) -> Dataset:
        """Read the training pictures of each class, and the validation pictures."""
        folder = ensure(self.files[0], root)
        classes = self._classes(folder)
        splits = []
        for part, listed in (("train", _train_pictures(folder, classes)), ("val", _val_pictures(folder, classes))):
            if not listed:
                why = f"there are no pictures below {folder / part}"
                raise missing(self.files[0], root, why, f"{_FOLDER}/{part}")
            images = read_pictures([path for path, _ in listed], colour=True)
            splits.append(Split(images, np.array([label for _, label in listed], np.int64)))
        return self._dataset(splits[0], splits[1])

    def expected(self, root: Path) -> list[Expected]:
        """Return the list of classes and the pictures of both parts, which are counted."""
        folder = root / _FOLDER
        return [
            Expected(folder / "wnids.txt", count=lambda _path: len(self._classes(folder))),
            Expected(folder / "train", count=lambda _path: len(_train_pictures(folder, self._classes(folder)))),
            Expected(folder / "val", count=lambda _path: len(_val_pictures(folder, self._classes(folder)))),
        ]

    def _classes(self, folder: Path) -> dict[str, int]:
        names = sorted(set(_read_text(folder / "wnids.txt").split()))
        if not 1 <= len(names) <= self.num_classes:
            raise DataError(
                f"{folder / 'wnids.txt'} must name 1 to {self.num_classes} classes, got {len(names)}. "
                "Delete the folder to have it fetched again."
            )
        return {name: number for number, name in enumerate(names)}


def _train_pictures(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    places = {name: folder / "train" / name / "images" for name in classes}
    return [(path, classes[name]) for name, place in places.items() if place.is_dir() for path in list_pictures(place)]


def _val_pictures(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    """Return pictures and labels from ``val_annotations.txt``; a line is a file name, a class and a box."""
    table = folder / "val" / "val_annotations.txt"
    found = []
    for line in _read_text(table).splitlines():
        name, _, rest = line.partition("\t")
        kind = rest.partition("\t")[0].strip()
        if kind not in classes:
            raise DataError(
                f"{table} must name classes of wnids.txt, got {line!r}. Delete the folder to have it fetched again."
            )
        path = folder / "val" / "images" / name
        if Path(name).name == name and path.is_file():
            found.append((path, classes[kind]))
    return found


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, LONGEST_TEXT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} must be a readable text file, but {error}. Delete the folder to have it fetched again."
        ) from error
