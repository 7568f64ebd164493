"""Read the pickles of CIFAR's python layout without running anything that a pickle may ask to run.

A pickle is a program: loading a stranger's file can call any function, and Python's own reader reserves whatever memory
the program states (nine bytes can ask for eight gigabytes). So this is a small reader of its own. It takes the
instructions one by one from `pickletools`, knows only those that dictionaries, lists, texts, whole numbers and arrays
need, and admits four names, each replaced by a harmless stand-in. Everything it keeps was in the file, so memory stays
in proportion to the file's size.
"""

import io
import math
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.errors import DataError
from gradveil.limits import read_bytes

_MARK = object()


class _Dtype:
    """Stands in for `numpy.dtype`: keeps the type code and the byte order as data."""

    def __init__(self, code: object = b"", *_flags: object) -> None:
        self.code = _text(code)
        self.order = "|"

    def build(self, state: Any) -> None:  # noqa: ANN401 - whatever the file holds
        self.order = _text(state[1])


class _Array:
    """Stands in for `numpy.ndarray`: keeps shape, type and bytes until `_to_numpy` has checked them."""

    state: tuple[Any, ...] = ()

    def build(self, state: Any) -> None:  # noqa: ANN401 - whatever the file holds
        self.state = tuple(state)


def _reconstruct(*_arguments: object) -> _Array:
    return _Array()


def _encode(text: object, encoding: object = "latin1") -> bytes:
    return _text(text).encode("latin1" if _text(encoding) in {"latin1", "latin-1"} else "ascii")


_ADMITTED: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _RefusedError(Exception):
    """The pickle names something that is not admitted."""


class _Reader:
    """The state while the instructions of a pickle are followed: a stack, and values that are kept for later use."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.stack: list[Any] = []
        self.kept: dict[int, Any] = {}
        self.encoded = 0

    def read(self) -> object:
        """Follow all instructions and return the value that the pickle ends with."""
        for code, argument, _place in pickletools.genops(io.BytesIO(self.content)):
            name = code.name
            if name == "STOP":
                return self.stack.pop()
            if name in _BYTES:
                self.stack.append(str(argument).encode("latin1"))
            elif name in _VALUES:
                if isinstance(argument, int) and not -(2**63) <= argument < 2**63:
                    raise ValueError("a number is longer than 8 bytes")
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name not in ("PROTO", "FRAME"):
                self._follow(name, argument)
        raise ValueError("it has no end")

    def _follow(self, name: str, argument: Any) -> None:  # noqa: ANN401 - as the instruction has it
        if name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.kept[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.kept[len(self.kept)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.kept[argument])
        elif name == "GLOBAL":
            self.stack.append(_admitted(*argument.split(" ", 1)))
        else:
            steps = {
                "MARK": self._mark, "STACK_GLOBAL": self._global, "REDUCE": self._call, "BUILD": self._build,
                "TUPLE": self._tuple, "TUPLE1": self._tuple, "TUPLE2": self._tuple, "TUPLE3": self._tuple,
                "LIST": self._list, "APPEND": self._append, "APPENDS": self._append,
                "DICT": self._dict, "SETITEM": self._set, "SETITEMS": self._set,
            }  # fmt: skip
            if name not in steps:
                raise _RefusedError(f"{argument or 'an object'} by the instruction {name}")
            steps[name](name)

    def _mark(self, _name: str) -> None:
        self.stack.append(_MARK)

    def _since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("it takes values that are not there")
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it takes values that are not there")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _global(self, _name: str) -> None:
        self.stack.append(_admitted(*map(_text, self._last(2))))

    def _call(self, _name: str) -> None:
        function, arguments = self._last(2)
        if function not in _ADMITTED.values() or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no function")
        made = function(*arguments)
        self.encoded += len(made) if isinstance(made, bytes) else 0
        if self.encoded > len(self.content):
            raise ValueError("its texts are used more often than they are there")
        self.stack.append(made)

    def _build(self, _name: str) -> None:
        thing, state = self._last(2)
        if not isinstance(thing, (_Array, _Dtype)):
            raise TypeError("it sets the state of what has none")
        thing.build(state)
        self.stack.append(thing)

    def _tuple(self, name: str) -> None:
        self.stack.append(tuple(self._since_mark() if name == "TUPLE" else self._last(int(name[5:]))))

    def _list(self, _name: str) -> None:
        self.stack.append(self._since_mark())

    def _append(self, name: str) -> None:
        values = self._since_mark() if name == "APPENDS" else self._last(1)
        if not isinstance(self.stack[-1], list):
            raise TypeError("it appends to what is no list")
        self.stack[-1].extend(values)

    def _dict(self, _name: str) -> None:
        pairs = self._since_mark()
        self.stack.append({})
        self._fill(pairs)

    def _set(self, name: str) -> None:
        self._fill(self._since_mark() if name == "SETITEMS" else self._last(2))

    def _fill(self, pairs: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise TypeError("it adds entries to what is no dictionary")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self.stack[-1][_text(key)] = value


_BYTES = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
"""Texts of Python 2, which are bytes."""
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}


def _admitted(module: str, name: str) -> Callable[..., object]:
    if (module, name) not in _ADMITTED:
        raise _RefusedError(f"{module}.{name}")
    return _ADMITTED[module, name]


def read_safe_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary of one CIFAR batch: texts as bytes, arrays as integer numpy arrays; nothing is executed.

    Raises:
        DataError: the file asks for any other function or class, or does not hold a dictionary.
    """
    try:
        raw = read_bytes(path)
        content = _Reader(raw).read()
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        arrays = {key: value for key, value in content.items() if isinstance(value, _Array)}
        if sum(len(value.state[-1]) for value in arrays.values()) > len(raw):
            raise ValueError("its arrays share bytes")
        return content | {key: _to_numpy(value) for key, value in arrays.items()}
    except _RefusedError as error:
        raise DataError(
            f"{path} must be a CIFAR batch of plain arrays, but asks Python to load {str(error)[:200]}, which these "
            "files never do. Nothing of it was run; do not trust this copy, and take the authors' archive."
        ) from error
    except Exception as error:  # a broken pickle can raise anything, IndexError and MemoryError included
        raise DataError(
            f"{path} must be a pickled dictionary as in CIFAR's python layout, but can't be read "
            f"({type(error).__name__}: {str(error)[:200]}). Delete it and unpack the authors' archive again."
        ) from error


def _to_numpy(array: _Array) -> np.ndarray:
    _version, shape, dtype, column_major, raw = array.state
    if not isinstance(dtype, _Dtype) or not re.fullmatch(r"[iu][1248]", dtype.code):
        raise TypeError(f"arrays must be of an integer type, got {getattr(dtype, 'code', type(dtype).__name__)!r}")
    content = raw.encode("latin1") if isinstance(raw, str) else raw
    if not isinstance(content, bytes) or not isinstance(shape, tuple) or len(shape) > 8:
        raise TypeError("arrays must hold plain bytes and a shape")
    if not all(type(length) is int and 0 <= length < 2**40 for length in shape):
        raise TypeError("the lengths of an array must be whole numbers")
    kind = np.dtype(dtype.code).newbyteorder("=" if dtype.order not in {"<", ">"} else dtype.order)  # type: ignore[arg-type]
    if len(content) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape} holds {len(content)} bytes")
    return (
        np.frombuffer(content, kind).reshape(shape, order="F" if column_major else "C").astype(kind.newbyteorder("="))
    )


def _text(value: object) -> str:
    """Return a text or bytes as text; anything else is refused, for writing it out may take forever."""
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"a name must be a text, got a {type(value).__name__}")
    return value.decode("latin1") if isinstance(value, bytes) else value
