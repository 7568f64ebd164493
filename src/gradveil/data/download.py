"""Download a named set's files from their official sources, check them, and move them into place atomically.

An existing file is never overwritten. If a file can't be downloaded, `MissingDataError` says what is needed to place it
by hand: its name, checksum, source and destination.
"""

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gradveil.errors import DataError, MissingDataError

TIMEOUT_SECONDS = 20
_CHUNK = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A file that the authors of a set publish.

    Attributes:
        url: where it is published; with ``direct=False`` the page that leads to it.
        path: its place below the data root.
        md5: its published checksum.
        unpacks_to: for an archive, the folder (below the data root) that it holds.
        direct: whether ``url`` can be downloaded directly; otherwise the user has to do it.
    """

    url: str
    path: str
    md5: str
    unpacks_to: str | None = None
    direct: bool = True


def ensure(file: RemoteFile, root: Path) -> Path:
    """Return the path of a file (or an archive's unpacked folder) below ``root``; download and unpack it if missing.

    With the environment variable ``GRADVEIL_OFFLINE=1`` nothing is downloaded.

    Raises:
        MissingDataError: the file is missing and can't be downloaded.
        DataError: an archive is corrupt, or the folder can't be written.
    """
    archive, wanted = root / file.path, root / (file.unpacks_to or file.path)
    if wanted.exists():
        return wanted
    try:
        if not archive.exists():
            _fetch(file, root)
        elif (found := md5_of(archive)) != file.md5:
            raise DataError(
                f"{archive} must have md5 {file.md5}, got {found}. "
                "Delete it to have it fetched again, or put an intact copy there."
            )
        if file.unpacks_to:
            _unpack(archive, wanted)
    except OSError as error:
        raise DataError(
            f"{wanted} must be writable to hold the data, but {error}. "
            "Choose another place with --data-root or GRADVEIL_DATA."
        ) from error
    return wanted


def missing(file: RemoteFile, root: Path, why: str, wanted: str | None = None) -> MissingDataError:
    """Return the error that says which file is missing, why, and where to put it."""
    then = " It is unpacked when next used." if file.unpacks_to else ""
    return MissingDataError(
        f"{root / (wanted or file.path)} is missing: {why}. "
        f"Get {PurePosixPath(file.path).name} (md5 {file.md5}) from {file.url} and put it at {root / file.path}.{then}"
    )


def md5_of(path: Path) -> str:
    """Return the md5 checksum of a file, as the authors publish it; it detects accidents, not forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(file: RemoteFile, root: Path) -> None:
    if not file.direct:
        raise missing(file, root, "its authors publish it without a direct link")
    if os.environ.get("GRADVEIL_OFFLINE", "0") not in {"", "0"}:
        raise missing(file, root, "GRADVEIL_OFFLINE is set, so it is not downloaded")
    if not file.url.startswith(("https://", "http://")):
        raise missing(file, root, "only http and https addresses are fetched")
    target = root / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as sink:
            try:
                _copy_from(file.url, sink)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise missing(file, root, f"it could not be fetched ({error or type(error).__name__})") from error
        found = md5_of(part)
        if found != file.md5:
            raise missing(file, root, f"what its source sent has md5 {found} and was thrown away")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _copy_from(url: str, sink: IO[bytes]) -> None:
    """Download an address to a file, with a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    opener = urllib.request.build_opener()
    with opener.open(url, timeout=TIMEOUT_SECONDS) as source:
        promised = source.headers.get("Content-Length", "")
        total = int(promised) if promised.isdigit() else None
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(url.rpartition("/")[2], total=total)
            received = 0
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                received += len(chunk)
                progress.advance(bar, len(chunk))
    if total is not None and received != total:
        raise OSError(f"the connection ended after {received:,} of {total:,} bytes")


def _unpack(archive: Path, wanted: Path) -> None:
    """Unpack an archive beside its final place, then rename it, so that the folder is complete or absent."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wanted.parent, prefix=f".{wanted.name}.", suffix=".part") as scratch:
        try:
            for name, source in _members(archive):
                place = Path(scratch, *name.parts)
                place.parent.mkdir(parents=True, exist_ok=True)
                with source, place.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            raise DataError(f"{archive} can't be unpacked ({error}). Delete it to have it fetched again.") from error
        inside = Path(scratch, wanted.name)
        if not inside.is_dir():
            raise DataError(
                f"{archive} must hold the folder {wanted.name}/, but does not. Delete it to have it fetched again."
            )
        if not wanted.exists():  # another process may have been faster
            inside.rename(wanted)


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    """Yield the regular files of a tar or zip archive; links are skipped, names that lead outside are refused."""
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            for member in tar:
                source = tar.extractfile(member) if member.isfile() else None
                if source is not None:
                    yield _inside(member.name), source
    else:
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    yield _inside(info.filename), packed.open(info)


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or not path.parts:
        raise ValueError(f"its member {name!r} would be written outside the folder")
    return path
