"""Read arrays of numbers from MATLAB files (version 5, as SVHN's), in Python alone.

scipy's reader can crash the process on a damaged file, so the little that is needed is read here. A file is a header of
128 bytes and a list of elements; an element is a tag (type, number of bytes) and its data, padded to 8 bytes. An array
is an element of elements: flags, dimensions, name and numbers; usually it is packed by zlib. The size that a packed
array states is checked before it is unpacked, and that of its numbers, which may be stored in a smaller type, before
they are converted.
Reference: "MAT-File Format", The MathWorks, chapter 1, https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf.
"""

import math
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradveil.limits import check_unpacked, read_bytes, reading

_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
"""The types in which numbers are stored."""
_CLASSES = {
    6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8",
}  # fmt: skip
"""The types that arrays have; numbers may be stored in a smaller one."""
_COMPLEX = 0x0800
_WAY_OUT = "Put an intact copy there, or delete it to have it fetched again."


@dataclass(frozen=True)
class _Element:
    kind: int
    data: memoryview


def read_matlab(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the arrays of numbers with these names, in MATLAB's order of axes; others are left out.

    Raises:
        DataError: the file is no MATLAB file of version 5, is damaged, or unpacks to too much.
    """
    with reading(path, "a MATLAB file of version 5", _WAY_OUT):
        content = memoryview(read_bytes(path))
        order = {b"IM": "<", b"MI": ">"}.get(bytes(content[126:128]))
        if order is None or struct.unpack(f"{order}H", content[124:126]) != (0x0100,):
            raise ValueError("it does not begin as one")
        found: dict[str, np.ndarray] = {}
        asked = 0

        def ask(size: int) -> None:
            nonlocal asked
            asked += size
            check_unpacked(path, asked, len(content), _WAY_OUT)

        for element in _elements(content[128:], order):
            whole = element
            if element.kind == _COMPRESSED:
                unpacker = zlib.decompressobj()
                kind, size = struct.unpack(f"{order}2I", unpacker.decompress(element.data, 8))
                ask(size)
                data = unpacker.decompress(unpacker.unconsumed_tail, max(size, 1))
                unpacker.decompress(unpacker.unconsumed_tail, 1)  # reaches the checksum
                if len(data) != size or not unpacker.eof:
                    raise ValueError("a packed array is not whole")
                whole = _Element(kind, memoryview(data))
            if whole.kind == _MATRIX:
                found |= _array(whole.data, order, names, ask)
        return found


def _elements(data: memoryview, order: str) -> Iterator[_Element]:
    """Yield the elements one after the other; a short one has its type, size and data in 8 bytes."""
    while len(data) >= 8:
        first, second = struct.unpack(f"{order}2I", data[:8])
        if first >> 16:  # size in the upper half
            if first >> 16 > 4:
                raise ValueError("a short element is longer than 4 bytes")
            yield _Element(first & 0xFFFF, data[4 : 4 + (first >> 16)])
            data = data[8:]
            continue
        if second > len(data) - 8:
            raise ValueError(f"an element promises {second:,} bytes, {len(data) - 8:,} are left")
        yield _Element(first, data[8 : 8 + second])
        data = data[8 + second + (0 if first == _COMPRESSED else -second % 8) :]


def _array(data: memoryview, order: str, names: Collection[str], ask: Callable[[int], None]) -> dict[str, np.ndarray]:
    """Return an array by its name, or {} if the name is not asked for; raise ValueError if it has no plain numbers.

    ``ask`` is called with the bytes that the array takes, and raises if that is too much.
    """
    parts = _elements(data, order)
    flags, shape, name = (next(parts, _Element(0, data[:0])) for _ in range(3))
    text = bytes(name.data).decode("latin1")
    if text not in names:
        return {}
    (bits,) = struct.unpack(f"{order}I", flags.data[:4])
    lengths = np.frombuffer(shape.data, f"{order}i4").tolist()
    numbers = next(parts, _Element(0, data[:0]))
    if bits & 0xFF not in _CLASSES or bits & _COMPLEX or numbers.kind not in _NUMBERS:
        raise ValueError(f"{text} holds no plain numbers")
    stored = np.frombuffer(numbers.data, f"{order}{_NUMBERS[numbers.kind]}")
    if not lengths or len(lengths) > 8 or min(lengths) < 0 or math.prod(lengths) != len(stored):
        raise ValueError(f"{text} has the shape {lengths[:8]} and {len(stored):,} numbers")
    kind = np.dtype(_CLASSES[bits & 0xFF])
    ask(len(stored) * kind.itemsize)
    return {text: stored.astype(kind).reshape(lengths, order="F")}
