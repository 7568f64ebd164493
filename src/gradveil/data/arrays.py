"""Read the arrays of an ``.npz`` file: each header before its numbers, nothing pickled, and no more than is allowed."""

import math
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from gradveil.limits import check_unpacked, reading

MOST_ARRAYS = 100_000
"""Arrays in one file at most."""
_WAY_OUT = "Save it again with numpy.savez; arrays of Python objects are not loaded."
_UNPACKED = "Save it with numpy.savez, which does not compress it."


def read_arrays(
    path: Path, rule: str, names: Collection[str] | None = None, *, widest: int = 1
) -> dict[str, np.ndarray]:
    """Return arrays by name.

    Args:
        path: the file.
        rule: what it must be, for the error, as in "an .npz file of numbers".
        names: the arrays to read, all of which must be there; None reads all arrays.
        widest: bytes that each number will take at least once it is used, to judge what the file asks for.

    Raises:
        DataError: the file is no .npz file, is damaged, lacks an array, or asks for more memory than is allowed.
    """
    with reading(path, rule, _WAY_OUT), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()[: MOST_ARRAYS + 1]}
        if len(members) > MOST_ARRAYS:
            raise ValueError(f"it holds more than {MOST_ARRAYS:,} arrays")
        lacking = [name for name in names or () if name not in members]
        if lacking:
            raise ValueError(f"{', '.join(lacking)} is missing, it has {', '.join([*members][:20]) or 'nothing'}")
        chosen = {name: members[name] for name in (members if names is None else names)}
        shapes = {name: _header(archive, info) for name, info in chosen.items()}
        asked = sum(math.prod(shape) * max(kind.itemsize, widest) for shape, kind, _ in shapes.values())
        check_unpacked(path, asked, path.stat().st_size, _UNPACKED)
        return {name: _array(archive, info, *shapes[name]) for name, info in chosen.items()}


def has_array(path: Path, name: str) -> bool:
    """Return whether an ``.npz`` file has an array of that name."""
    with reading(path, "an .npz file", _WAY_OUT), zipfile.ZipFile(path) as archive:
        return f"{name}.npy" in archive.namelist()


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Return shape, type and order of a member; raise ValueError if it holds other numbers of bytes than it states."""
    with archive.open(info) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # headers written by Python 2 make numpy warn, harmlessly
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"{info.filename} has a header of version {version}")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, column_major, kind = read(file)
        start = file.tell()
    if kind.hasobject or kind.kind not in "fiubcSU" or len(shape) > 32:
        raise ValueError(f"{info.filename} holds {str(kind)[:50]}, which is not loaded")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{info.filename} has a shape of other than whole numbers")
    if math.prod(shape) * kind.itemsize != info.file_size - start:
        raise ValueError(f"{info.filename} of shape {shape} and type {kind} holds {info.file_size - start:,} bytes")
    return shape, kind, column_major


def _array(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, shape: tuple[int, ...], kind: np.dtype, column_major: bool
) -> np.ndarray:
    size = math.prod(shape) * kind.itemsize
    with archive.open(info) as file:
        file.seek(info.file_size - size)
        content = bytearray(file.read(size))
        if len(content) != size or file.read(1):
            raise ValueError(f"{info.filename} is not whole")
    return np.frombuffer(content, kind).reshape(shape, order="F" if column_major else "C")
