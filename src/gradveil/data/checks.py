"""Verify the files of a named set: against published checksums if there are any, else by reading them.

A mirror may pack the same images anew, as Debian does with Fashion-MNIST. So what counts is the checksum of what a file
holds, if that is published too.
"""

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
        contents_md5: the published checksum of what the file holds, however it is packed, or None.
        digest: reads the file and returns that checksum of what it holds.
    """

    path: Path
    md5: str | None = None
    count: Callable[[Path], int] | None = None
    contents_md5: str | None = None
    digest: Callable[[Path], str] | None = None


@dataclass(frozen=True)
class FileCheck:
    """Result of `verify` for one file.

    Attributes:
        file: its full path.
        status: ``ok`` (checksum of the file or of its contents as published), ``unchecked`` (readable, but no checksum
            is published), ``missing`` or ``corrupt``.
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
        found = md5_of(path) if expected.md5 is not None else None
        if found and found == expected.md5:
            return FileCheck(path, "ok", f"md5 {found} as published")
        if expected.contents_md5 and expected.digest and expected.digest(path) == expected.contents_md5:
            packed = "packed differently, but " if found else ""
            return FileCheck(path, "ok", f"{packed}contents as published, md5 {expected.contents_md5}")
        if expected.contents_md5 and not found:
            return FileCheck(path, "corrupt", f"contents differ from those published, md5 {expected.contents_md5}")
        if found:
            detail = f"md5 is {found}, published is {expected.md5}; delete it to have it fetched again"
            return FileCheck(path, "corrupt", detail)
        held = f"holds {expected.count(path):,}; " if expected.count else ""
    except (DataError, OSError) as error:
        return FileCheck(path, "corrupt", str(error))
    return FileCheck(path, "unchecked", f"{held}{NOT_PUBLISHED}")
