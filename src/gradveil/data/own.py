"""The user's own data: an ``.npz`` file, or a folder with one subfolder of pictures for each class."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradveil.data.arrays import has_array, read_arrays
from gradveil.data.pictures import PICTURE_ENDINGS, list_pictures, read_pictures
from gradveil.errors import DataError, MissingDataError

MAX_CLASSES = 100_000
"""With more classes than this, labels are assumed to be something else, such as identity numbers."""

NAMES = "class_names"
LONGEST_NAME = 60
"""Letters of a class's name at most."""
MEDMNIST = {
    "breastmnist": ("malignant", "normal, benign"),
    "pneumoniamnist": ("normal", "pneumonia"),
}
"""What the labels of MedMNIST's two-class files stand for, by the file's name; https://medmnist.com."""


class OwnArrays(NamedTuple):
    """Images (N, C, H, W), uint8 or float32 in [0, 1]; labels (N,) int64; the number of classes, and their names."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    class_names: tuple[str, ...] = ()


def every_fifth(labels: np.ndarray) -> np.ndarray:
    """Return the fixed split: True (test) for the 5th, 10th, ... image of each class, in the given order.

    Example:
        >>> every_fifth(np.array([7, 7, 7, 7, 7, 3])).tolist()
        [False, False, False, False, True, False]
    """
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return test


def read_npz(path: Path) -> OwnArrays:
    """Read ``x_train, y_train, x_test, y_test`` of an ``.npz`` file; nothing pickled is loaded.

    Images are (N, H, W), (N, H, W, C) or (N, C, H, W), uint8 or floating point in [0, 1]. With four axes the last
    holds the channels if its length is 1 or 3; otherwise the second if its length is 1 or 3; otherwise the shorter of
    the two (e.g. the modalities of a scan), or the second if they are equal. Labels are integers from 0, (N,)
    or (N, 1). An array ``class_names`` of texts says what the labels stand for.
    """
    if not path.exists():
        raise MissingDataError(f"{path} must exist, but there is no such file. Put it there or name the right one.")
    names = ("x_train", "y_train", "x_test", "y_test")
    arrays = read_arrays(path, f"an .npz file of plain arrays {', '.join(names)}", names)
    images = {part: _images(path, f"x_{part}", arrays[f"x_{part}"]) for part in ("train", "test")}
    labels = {part: _labels(path, f"y_{part}", arrays[f"y_{part}"]) for part in ("train", "test")}
    for part in ("train", "test"):
        if len(images[part]) != len(labels[part]):
            raise DataError(
                f"{path} must hold one label for each image, but x_{part} has {len(images[part]):,} images and "
                f"y_{part} has {len(labels[part]):,} labels."
            )
    if images["train"].shape[1:] != images["test"].shape[1:] or images["train"].dtype != images["test"].dtype:
        kinds = [f"x_{part} {array.dtype} {array.shape[1:]}" for part, array in images.items()]
        raise DataError(f"{path} must hold images of one shape (C, H, W) and type, but has {' and '.join(kinds)}.")
    num_classes = int(max(labels["train"].max(), labels["test"].max())) + 1
    told = _class_names(path, num_classes)
    return OwnArrays(images["train"], labels["train"], images["test"], labels["test"], num_classes, told)


def read_folder(folder: Path, size: int | None = None) -> OwnArrays:
    """Read class subfolders of pictures; classes are numbered by the sorted names of their folders.

    If the folder has ``train/`` and ``test/``, the class folders are in these; otherwise every fifth picture of each
    class (by file name) is a test picture.
    """
    if not folder.is_dir():
        raise MissingDataError(
            f"{folder} must be a folder of class subfolders with pictures, but there is no such folder."
        )
    parts = {part: _class_folders(folder / part) for part in ("train", "test")}
    if all(parts.values()):
        train, test = parts["train"], parts["test"]
        strangers = sorted(set(test) - set(train))
        if strangers:
            raise DataError(f"{folder}/test must hold classes that train/ has too, but has {strangers[0]!r} besides.")
        listed = [(path, name, False) for name, paths in train.items() for path in paths]
        listed += [(path, name, True) for name, paths in test.items() for path in paths]
        classes = sorted(train)
    else:
        for part, other in (("train", "test"), ("test", "train")):
            if parts[part]:
                raise DataError(
                    f"{folder} must have both train/ and test/ with class folders or neither, but has no {other}/."
                )
        found = _class_folders(folder)
        listed = [(path, name, False) for name, paths in found.items() for path in paths]
        classes = sorted(found)
    empty = [name for name in classes if not any(name == own for _, own, _ in listed)]
    if not listed or empty:
        place, what = (folder / empty[0], "pictures") if empty else (folder, "class subfolders of pictures")
        endings = ", ".join(ending[1:] for ending in PICTURE_ENDINGS)
        raise DataError(f"{place} must hold {what} ({endings}), got none.")
    labels = np.array([classes.index(name) for _, name, _ in listed], np.int64)
    test_mask = np.array([test for _, _, test in listed])
    if not all(parts.values()):
        test_mask = every_fifth(labels)
    if not test_mask.any():
        raise DataError(
            f"{folder} must have at least 5 pictures in some class, for every fifth one is a test picture, got "
            f"{np.bincount(labels).max()} at most. Add pictures, or make train/ and test/ subfolders."
        )
    images = read_pictures([path for path, _, _ in listed], size=size)
    return OwnArrays(
        images[~test_mask], labels[~test_mask], images[test_mask], labels[test_mask], len(classes), tuple(classes)
    )


def _class_names(path: Path, num_classes: int) -> tuple[str, ...]:
    """Return what the labels of an ``.npz`` file stand for: as it says, as MedMNIST says for its files, or ()."""
    if not has_array(path, NAMES):
        known = MEDMNIST.get(path.stem, ())
        return known if len(known) == num_classes else ()
    names = read_arrays(path, f"an .npz file of plain arrays with {NAMES}", (NAMES,))[NAMES]
    if names.dtype.kind != "U" or names.shape != (num_classes,):
        raise DataError(
            f"{path}: {NAMES} must be {num_classes} texts, one per class, got {names.dtype} {names.shape}. "
            "Correct it, or leave it out."
        )
    return tuple(str(name)[:LONGEST_NAME] for name in names)


def _class_folders(folder: Path) -> dict[str, list[Path]]:
    if not folder.is_dir():
        return {}
    found = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")
    return {path.name: list_pictures(path) for path in found}


def _images(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise DataError(f"{path}: {name} must be of type uint8, or float in [0, 1], got {array.dtype}. Convert it.")
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim != 4:
        raise DataError(
            f"{path}: {name} must have the shape (N, H, W), (N, H, W, C) or (N, C, H, W), got {array.shape}."
        )
    elif array.shape[3] in (1, 3) or (array.shape[1] not in (1, 3) and array.shape[3] < array.shape[1]):
        array = array.transpose(0, 3, 1, 2)
    if array.size == 0:
        raise DataError(f"{path}: {name} must hold at least one image, got the shape {array.shape}. Add images.")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise DataError(
                f"{path}: {name} must be in [0, 1] if it is floating point, got {low:g} to {high:g}. "
                "Scale it to [0, 1], or save it as uint8."
            )
        array = array.astype(np.float32)
    return np.ascontiguousarray(array)


def _labels(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} must be integers (class indices from 0), got type {array.dtype}. Convert it.")
    if array.ndim != 1 and array.shape != (len(array) if array.ndim else 0, 1):
        raise DataError(f"{path}: {name} must have the shape (N,), got {array.shape}.")
    if array.size and not (array.min() >= 0 and array.max() < MAX_CLASSES):
        wrong = array.min() if array.min() < 0 else array.max()
        raise DataError(
            f"{path}: {name} must be class indices in 0..{MAX_CLASSES - 1:,}, got {wrong}. Number the classes from 0."
        )
    return array.reshape(-1).astype(np.int64)
