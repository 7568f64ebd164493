"""Readers of the file formats in which the authors of the named sets publish them.

Each takes a path and returns new numpy arrays; a corrupt, truncated or wrong file raises `DataError`, which names it.
Users' own data are read by `gradveil.data.own`.
"""

import gzip
import hashlib
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from gradveil.data.matlab import read_matlab
from gradveil.data.safe_pickle import read_safe_pickle
from gradveil.errors import DataError, MissingDataError
from gradveil.limits import check_unpacked, read_bytes

CIFAR_SHAPE = (3, 32, 32)


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Read the unsigned bytes of an idx file, gzipped or not: images (N, H, W) for 3 dimensions, labels (N,) for 1.

    The header is big-endian: two zero bytes, the type (8: unsigned byte), the number of dimensions, then each length.
    Reference: Y. LeCun, http://yann.lecun.com/exdb/mnist/, "file formats for the MNIST database".
    """
    content = _read_bytes(path)
    rule = f"an idx file of unsigned bytes in {num_dimensions} dimension{'s' if num_dimensions > 1 else ''}"
    start = 4 + 4 * num_dimensions
    if content[:2] == b"\x1f\x8b":
        content = _unzipped(path, content, start)
    if len(content) < start or content[:4] != bytes([0, 0, 8, num_dimensions]):
        raise _broken(path, rule, f"it starts with the bytes {content[:4].hex(' ') or 'of an empty file'}")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise _broken(path, rule, f"its header promises {math.prod(shape):,} bytes, it holds {len(content) - start:,}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _unzipped(path: Path, packed: bytes, start: int) -> bytes:
    """Return the content of a gzipped idx file: first the header, and no more than the header promises, plus a byte."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            head = file.read(start)
            if len(head) < start or head[:3] != b"\0\0\x08":
                return head  # no idx file, as the caller will say
            promised = math.prod(struct.unpack(f">{start // 4 - 1}I", head[4:]))
            check_unpacked(path, promised, len(packed), "Put an intact copy there, or unpack it with gunzip.")
            return head + file.read(promised + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, "an intact gzip file", str(error)) from error


def idx_md5(path: Path, num_dimensions: int) -> str:
    """Return the md5 of an idx file's unzipped bytes, however it is packed; it detects accidents, not forgery."""
    array = read_idx(path, num_dimensions)
    header = struct.pack(f">I{num_dimensions}I", 0x800 + num_dimensions, *array.shape)
    return hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()


def read_idx_pair(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, 1, H, W) uint8 and labels (N,) int64 of an idx image file and its label file."""
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path} must hold one label for each image of {images_path.name}, got {len(labels):,} labels for "
            f"{len(images):,} images. Delete the wrong one of the two."
        )
    return images[:, None], labels.astype(np.int64)


def read_cifar_binary(path: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, 3, 32, 32) uint8 and labels (N,) int64 of CIFAR's binary layout.

    A record of CIFAR-10 is the label's byte, then the red, green and blue plane; a record of CIFAR-100 has the coarse
    label's byte before the fine one, which is the label here.
    Reference: A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    num_labels = 2 if num_classes == 100 else 1
    record = num_labels + math.prod(CIFAR_SHAPE)
    content = _read_bytes(path)
    if not content or len(content) % record:
        raise _broken(path, f"CIFAR-{num_classes} records of {record:,} bytes each", f"it holds {len(content):,} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    labels = records[:, num_labels - 1].astype(np.int64)
    _check_labels(path, labels, num_classes)
    return records[:, num_labels:].reshape(-1, *CIFAR_SHAPE).copy(), labels


def read_cifar_python(path: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, 3, 32, 32) uint8 and labels (N,) int64 of CIFAR's python layout; nothing in the pickle is run.

    Reference: A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html, "Python version".
    """
    batch = read_safe_pickle(path)
    key = "fine_labels" if num_classes == 100 else "labels"
    images, labels = batch.get("data"), batch.get(key)
    size = math.prod(CIFAR_SHAPE)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (size,):
        got = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise _broken(path, f"a CIFAR batch with 'data' of type uint8 and shape (N, {size})", f"'data' is {got}")
    numbers = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(numbers, list) or not all(type(label) is int for label in numbers):
        raise _broken(
            path, f"a CIFAR batch with integer '{key}'", f"{key!r} is {type(labels).__name__} of other things"
        )
    if len(numbers) != len(images):
        raise _broken(
            path, "a CIFAR batch with one label per image", f"{len(numbers):,} labels, {len(images):,} images"
        )
    _check_labels(path, np.array(numbers, dtype=object), num_classes)
    return images.reshape(-1, *CIFAR_SHAPE).copy(), np.array(numbers, np.int64)


def read_svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images (N, 3, 32, 32) uint8 and labels (N,) int64 of SVHN's "Format 2: Cropped Digits"; 10 is the digit 0.

    Reference: Netzer et al. 2011, http://ufldl.stanford.edu/housenumbers/.
    """
    if not path.is_file():
        raise _absent(path)
    content = read_matlab(path, ["X", "y"])
    images, labels = content.get("X"), content.get("y")
    rule = "SVHN's cropped digits (X of shape (32, 32, 3, N) and type uint8, y of 1 to 10 for each image)"
    if not isinstance(images, np.ndarray) or not isinstance(labels, np.ndarray):
        raise _broken(path, rule, "X or y is missing")
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise _broken(path, rule, f"X is {images.dtype} {images.shape}")
    if labels.size != images.shape[3] or not np.isin(labels, np.arange(1, 11)).all():
        raise _broken(
            path, rule, f"y has {labels.size:,} values, some perhaps not in 1..10, for {images.shape[3]:,} images"
        )
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.reshape(-1).astype(np.int64) % 10


def _read_bytes(path: Path) -> bytes:
    if not path.exists():
        raise _absent(path)
    try:
        return read_bytes(path)
    except OSError as error:
        raise _broken(path, "a file that can be read", str(error)) from error


def _check_labels(path: Path, labels: np.ndarray, num_classes: int) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise _broken(
            path, f"a file of labels 0..{num_classes - 1}", f"image {wrong[0]:,} has label {labels[wrong[0]]}"
        )


def _absent(path: Path) -> MissingDataError:
    return MissingDataError(f"{path} must exist, but there is no such file. Put it there or name the right one.")


def _broken(path: Path, rule: str, got: str) -> DataError:
    return DataError(
        f"{path} must be {rule}, but {got}. Put an intact copy there, or delete it to have it fetched again."
    )
