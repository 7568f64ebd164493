"""Read Flower's records without trusting their sender: every value has the expected type, and no shape is believed.

Flower itself reads arrays by numpy's loader, which reserves memory for the shape that a header declares. Here an array
is read only if its bytes are all there.
"""

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.errors import MessageError
from gradveil.federated.answers import check_kind, check_names
from gradveil.types import Tensors

try:
    from flwr.app import Array, ArrayRecord, RecordDict
except ImportError as error:
    raise ImportError("gradveil over Flower needs Flower. Run `pip install 'gradveil[flower]'`.") from error

_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("float16", "float32", "float64")}
_DTYPES |= {np.dtype(name): getattr(torch, name) for name in ("int8", "uint8", "int16", "int32", "int64", "bool")}
_MOST_ARRAYS = 100_000
"""Largest number of arrays in a record."""


def read_config(content: RecordDict, name: str) -> dict[str, Any]:
    """Return a message's record of plain values. Raise MessageError if there is none of this name."""
    if name not in content.config_records:
        raise MessageError(f"A message must hold the values {name!r}, got none.")
    return dict(content.config_records[name])


def read_arrays(content: RecordDict, name: str, like: Tensors | None, most_entries: int) -> dict[str, Tensor]:
    """Return a message's record of tensors.

    Args:
        content: the message.
        name: of the record.
        like: tensors with the expected names, shapes and types; None accepts any that have ``most_entries`` at most.
        most_entries: largest number of entries if ``like`` is None; an axis of length 0 counts as 1.
    """
    if name not in content.array_records:
        raise MessageError(f"A message must hold the tensors {name!r}, got none.")
    record: ArrayRecord = content.array_records[name]
    if len(record) > _MOST_ARRAYS:
        raise MessageError(f"A record must have at most {_MOST_ARRAYS:,} tensors, got {len(record):,}.")
    if like is not None:
        check_names(dict(record), like)
    found, left = {}, most_entries
    for key, array in record.items():
        shape, dtype, start, order = _header(array)
        if like is not None:
            check_kind(key, shape, _DTYPES[dtype], like[key])
        else:
            left -= math.prod(max(1, length) for length in shape)
            if left < 0:
                raise MessageError(f"A message must have at most {most_entries:,} entries, got more.")
        values = np.frombuffer(array.data, dtype, offset=start).reshape(shape, order=order)  # type: ignore[call-overload]
        found[key] = torch.from_numpy(values.copy(order="K"))
    return found


def num_bytes(content: RecordDict, name: str) -> int:
    """Return the number of bytes of a message's record of tensors; 0 if there is none of this name."""
    if name not in content.array_records:
        return 0
    return sum(len(array.data) for array in content.array_records[name].values())


def _header(array: Array) -> tuple[tuple[int, ...], np.dtype[Any], int, str]:
    """Return shape, type, first byte and order of an array. Raise MessageError unless exactly its bytes follow."""
    stream = BytesIO(array.data)
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError("serialisation")
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream)
        start = stream.tell()
    except Exception as error:  # whatever numpy's parser meets in bytes that somebody made up
        raise MessageError("An array must be stored in numpy's format, got other bytes.") from error
    if dtype not in _DTYPES or not dtype.isnative:
        raise MessageError("An array must hold floating-point numbers, integers or truth values, got another type.")
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != len(array.data) - start:
        raise MessageError("An array must have as many bytes as its shape needs, got more or fewer.")
    return shape, dtype, start, "F" if fortran else "C"


def whole(values: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Return a whole number within its limits. Raise MessageError if it is missing or is anything else.

    Example:
        >>> whole({"round": 3}, "round", 1, 20)
        3
        >>> whole({"round": float("nan")}, "round", 1, 20)
        Traceback (most recent call last):
        gradveil.errors.MessageError: round must be a whole number from 1 to 20, got another value.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise MessageError(f"{key} must be a whole number from {low:,} to {high:,}, got another value.")
    return value


def finite(values: Mapping[str, Any], key: str) -> float:
    """Return a finite number. Raise MessageError if it is missing or is anything else."""
    value = values.get(key)
    if not isinstance(value, float | int) or isinstance(value, bool) or not math.isfinite(value):
        raise MessageError(f"{key} must be a finite number, got another value.")
    return float(value)


def listed(values: Mapping[str, Any], key: str, kind: type | tuple[type, ...], most: int) -> list[Any]:
    """Return a list of at most ``most`` values of a type. Raise MessageError if it is missing or is anything else.

    Flower does not keep the type of an empty list, so that an empty list passes for any type.
    """
    found = values.get(key)
    if not isinstance(found, list) or len(found) > most:
        raise MessageError(f"{key} must be a list of at most {most:,} values, got another value.")
    for value in found:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MessageError(f"{key} must be a list of values of one type, got others.")
    return found
