"""Read the pickles of CIFAR's python layout without running anything that a pickle may ask to run.

A pickle is a program: loading a stranger's file can call any function. The CIFAR batches name only four functions, so
this reader admits these four and replaces them by harmless stand-ins, never by numpy's own pickle hooks (a forged
dtype state can corrupt memory there). Any other name in the file is refused before it is looked up.
"""

import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gradveil.errors import DataError


class _Dtype:
    """Stands in for `numpy.dtype`: keeps the type code and the byte order as data."""

    def __init__(self, code: object = b"", *_flags: object) -> None:
        self.code = _text(code)
        self.order = "|"

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401 - whatever the file holds
        self.order = _text(state[1])


class _Array:
    """Stands in for `numpy.ndarray`: keeps shape, type and bytes until `_to_numpy` has checked them."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401 - whatever the file holds
        self.state = tuple(state)


def _reconstruct(*_arguments: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: object = "latin1") -> bytes:
    return text.encode("latin1" if _text(encoding) in {"latin1", "latin-1"} else "ascii")


_ADMITTED: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _RefusedError(Exception):
    """The pickle names something that is not admitted."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as the base class declares it
        if (module, name) not in _ADMITTED:
            raise _RefusedError(f"{module}.{name}")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ANN401 - as the base class declares it
        raise _RefusedError(f"a persistent object {pid!r}")


def read_safe_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary of one CIFAR batch: texts as bytes, arrays as integer numpy arrays; nothing is executed.

    Raises:
        DataError: the file asks for any other function or class, or does not hold a dictionary.
    """
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        return {_text(key): _to_numpy(value) if isinstance(value, _Array) else value for key, value in content.items()}
    except _RefusedError as error:
        raise DataError(
            f"{path} must be a CIFAR batch of plain arrays, but asks Python to load {error}, which these files never "
            "do. Nothing of it was run; do not trust this copy, and take the authors' archive."
        ) from error
    except Exception as error:  # a broken pickle can raise anything, IndexError and MemoryError included
        raise DataError(
            f"{path} must be a pickled dictionary as in CIFAR's python layout, but can't be read "
            f"({type(error).__name__}: {error}). Delete it and unpack the authors' archive again."
        ) from error


def _to_numpy(array: _Array) -> np.ndarray:
    _version, shape, dtype, column_major, raw = array.state
    if not isinstance(dtype, _Dtype) or not re.fullmatch(r"[iu][1248]", dtype.code):
        raise TypeError(f"arrays must be of an integer type, got {getattr(dtype, 'code', dtype)!r}")
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(content, bytes) or not all(type(length) is int and length >= 0 for length in shape):
        raise TypeError("arrays must hold plain bytes and a shape")
    kind = np.dtype(dtype.code).newbyteorder("=" if dtype.order not in {"<", ">"} else dtype.order)  # type: ignore[arg-type]
    if len(content) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape} holds {len(content)} bytes")
    return (
        np.frombuffer(content, kind).reshape(shape, order="F" if column_major else "C").astype(kind.newbyteorder("="))
    )


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
