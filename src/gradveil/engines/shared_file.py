"""Arrays that several processes share, in a file without a name.

The file is removed from its folder before anything is written to it, so that no private image stays behind: the system
frees it when the last process that has it open ends, even if all of them are killed. Worker processes inherit it as an
open file. Only systems with POSIX file descriptors have this; elsewhere clients run in one process.
"""

import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

_ALIGNED = 64
_CHUNK = 1 << 20


class SharedFile:
    """Named arrays in one open file. A copy that is sent to a starting process shares the memory.

    Args:
        arrays: what to write.

    Raises:
        OSError: there is no room for the file; TMPDIR says where it is.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        self._places: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        try:
            self._write(arrays)
        except OSError:
            with suppress(OSError):  # what is still buffered can't be written either
                self._file.close()
            raise

    def _write(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._file.write(bytes(-self._file.tell() % _ALIGNED))
            self._places[name] = (self._file.tell(), array.dtype.str, array.shape)
            flat = np.ascontiguousarray(array).reshape(-1)
            step = max(1, _CHUNK // array.dtype.itemsize)
            for start in range(0, len(flat), step):
                self._file.write(flat[start : start + step].tobytes())
        self._file.flush()

    def array(self, name: str, *, writable: bool = False) -> np.ndarray:
        """Return an array; a change of a writable one is seen by all processes."""
        offset, kind, shape = self._places[name]
        if not math.prod(shape):
            return np.zeros(shape, kind)
        return np.memmap(self._file, kind, "r+" if writable else "r", offset, shape)

    def close(self) -> None:
        """Close the file here; arrays stay usable."""
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"places": self._places, "file": DupFd(self._file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._places = state["places"]
        self._file = os.fdopen(state["file"].detach(), "r+b")
