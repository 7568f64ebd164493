"""Verify the files of a named set: against published checksums if there are any, else by reading them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradveil.data.download import md5_of
from gradveil.errors import DataError

if TYPE_CHECKING:
    from gradveil.data.datasets import NamedSet

NOT_PUBLISHED = "no checksum is published for the unpacked file"


@dataclass(frozen=True)
class Expected:
    """A file (or folder) that a set needs.

    Attributes:
        path: its full path.
        md5: its published checksum, or None if none is published.
        count: reads the file and returns the number of images, labels or entries in it; used if there is no checksum.
    """

    path: Path
    md5: str | None = None
    count: Callable[[Path], int] | None = None


@dataclass(frozen=True)
class FileCheck:
    """Result of `verify` for one file.

    Attributes:
        file: its full path.
        status: ``ok`` (checksum as published), ``unchecked`` (readable, but no checksum is published), ``missing`` or
            ``corrupt``.
        detail: one phrase for the user.
    """

    file: Path
    status: Literal["ok", "missing", "corrupt", "unchecked"]
    detail: str


def verify(named: "NamedSet", root: Path) -> list[FileCheck]:
    """Check every file that a named set needs below ``root``; downloads and changes nothing."""
    return [_examine(expected) for expected in named.expected(root)]


def _examine(expected: Expected) -> FileCheck:
    path = expected.path
    if not path.exists():
        published = f", md5 {expected.md5}" if expected.md5 else ""
        return FileCheck(path, "missing", f"not there{published}")
    try:
        if expected.md5 is not None:
            found = md5_of(path)
            if found == expected.md5:
                return FileCheck(path, "ok", f"md5 {found} as published")
            detail = f"md5 is {found}, published is {expected.md5}; delete it to have it fetched again"
            return FileCheck(path, "corrupt", detail)
        held = f"holds {expected.count(path):,}; " if expected.count else ""
    except (DataError, OSError) as error:
        return FileCheck(path, "corrupt", str(error))
    return FileCheck(path, "unchecked", f"{held}{NOT_PUBLISHED}")
