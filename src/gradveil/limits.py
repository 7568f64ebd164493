"""Limits on what files may ask for, so that no file from elsewhere can fill the memory or end the process.

The rule for packed files (gzip, zip, MATLAB, pictures): the size that the header states is checked before anything is
unpacked. Up to `SMALL` is always allowed, and beyond that at most `RATIO` times the size of the packed file. A file
of plain numbers is never refused for its size, since it can't ask for more memory than it has bytes. Text can: a value
of two characters may take a hundred bytes in Python. So texts have limits on their bytes, lines and values.
"""

import json
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradveil.errors import DataError

SMALL = 1 << 28
"""Bytes (256 MiB) that a packed file may always unpack to."""
RATIO = 100
"""Beyond `SMALL`, how many times its own size a packed file may unpack to; images rarely pack by more than 20."""
LONGEST_TEXT = 1 << 26
"""Bytes (64 MiB) of a text file (rows, plans) at most."""
MOST_LINES = 200_000
"""Lines of a file of rows at most; a row takes some kilobytes, however short its line is."""
MOST_VALUES = 5_000_000
"""Values of a JSON text, or of all lines of a file of rows, at most; each takes up to 120 bytes."""
LONGEST_SETTINGS = 1 << 18
"""Bytes (256 KiB) of a file of settings at most."""
DEEPEST_KEY = 16
"""Parts of a dotted key in settings at most; the memory that Python's reader takes grows with their square."""

_NO_KEYS = re.compile(
    r'"""(?:[^\\]|\\.)*?(?:"{3,5}|\Z)'  # a text of several lines, up to the end of the file if nothing ends it
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\[^\n])*+"?'  # a text of one line
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",  # a comment
    re.DOTALL,
)
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{DEEPEST_KEY}}}")


def check_unpacked(path: Path, asked: int, packed: int, way_out: str) -> None:
    """Raise `DataError` if a packed file states that it unpacks to more than is allowed.

    Args:
        path: the file, for the message.
        asked: bytes that it states to hold.
        packed: bytes that it has.
        way_out: what the user can do about it, as a sentence.
    """
    most = max(SMALL, RATIO * packed)
    if asked > most:
        raise DataError(
            f"{path} must unpack to at most {most:,} bytes ({RATIO} times its {packed:,} bytes, or {SMALL >> 20} MiB), "
            f"but states {asked:,}. {way_out}"
        )


def check_regular(path: Path, most: int | None = None) -> None:
    """Raise OSError for a device or a pipe, which may never end, for a folder, or a file larger than ``most``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is a directory" if stat.S_ISDIR(status.st_mode) else f"{path} is no regular file")
    if most is not None and status.st_size > most:
        raise OSError(f"{path} has {status.st_size:,} bytes, of at most {most:,}")


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file; raise OSError for anything else, or a file larger than ``most``."""
    check_regular(path, most)
    return path.read_bytes()


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file of rows. Raise OSError if it can't be read, or has too many lines or values."""
    content = read_bytes(path, LONGEST_TEXT)
    lines, values = sum(map(content.count, (b"\n", b"\r"))), _num_values(content)
    if lines > MOST_LINES or values > MOST_VALUES:
        raise OSError(
            f"{path} has {lines:,} lines and {values:,} values, of at most {MOST_LINES:,} and {MOST_VALUES:,}"
        )
    return content.splitlines()


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return the JSON value of a file. Raise OSError or ValueError if there is none, or if it is too large."""
    return parse_json(read_bytes(path, LONGEST_TEXT))


def parse_json(content: bytes | str) -> Any:  # noqa: ANN401 - whatever the text holds
    """Return a JSON value. Raise ValueError if the text is no JSON, has too many values or is nested too deeply."""
    if (values := _num_values(content)) > MOST_VALUES:
        raise ValueError(f"it has {values:,} values, of at most {MOST_VALUES:,}")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _num_values(content: bytes | str) -> int:
    """Return at least half of the number of values that a JSON text can have: what separates or opens them."""
    if isinstance(content, bytes):
        return sum(map(content.count, (b",", b"[", b"{")))
    return sum(map(content.count, (",", "[", "{")))


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables of a TOML text. Raise ValueError if it is no TOML or is nested too deeply."""
    text = content.decode("utf-8")
    if _DEEP_KEY.search(_NO_KEYS.sub("q", text)):  # quoted parts of a key become a short word
        raise ValueError(f"a key has more than {DEEPEST_KEY} parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def reading(path: Path, rule: str, way_out: str) -> Iterator[None]:
    """Turn whatever a reader raises for a broken file into one `DataError`; those of gradveil pass unchanged.

    Args:
        path: the file.
        rule: what it must be, as in "an .npz file".
        way_out: what the user can do about it, as a sentence.
    """
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{path} must be {rule}, but needs more memory than there is. {way_out}") from error
    except Exception as error:  # readers of broken files raise many kinds, RecursionError included
        told = f"{type(error).__name__}: {str(error)[:500]}"
        raise DataError(f"{path} must be {rule}, but {told}. {way_out}") from error
