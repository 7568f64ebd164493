"""Files that are complete or absent: atomic writes, and a client's private folder."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from gradveil.errors import DataError, RunFolderError
from gradveil.limits import check_regular
from gradveil.seal import check_seal, header_bytes, sealed, without_seal

try:
    import fcntl
except ImportError:  # not on Windows: there two processes do not wait for each other
    fcntl = None  # type: ignore[assignment]


def write_atomic(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file atomically: a reader sees either the old content or the new.

    A full disk or a missing permission raises `RunFolderError` and leaves the old content in place.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        make_folder(path.parent)
        part.unlink(missing_ok=True)  # a file, or a link, that others may have put there would keep its mode
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise RunFolderError(
            f"{path} could not be written: {error.strerror or error}. What was saved before is untouched; "
            "make room and run again with --resume."
        ) from error


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder that is missing, and its missing parents; whatever the umask, others can't write to any of them.

    The parents get mode 0755 or less, the folder itself ``mode`` or less.
    """
    if not path.parent.is_dir():
        make_folder(path.parent)
    path.mkdir(mode=mode, exist_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside a private file within the ``with`` block: processes that want it too wait for each other.

    The folder is made with mode 0700 if it is missing.
    """
    try:
        make_folder(path.parent, 0o700)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise RunFolderError(f"{path.parent} must be a folder that can be written, got: {error.strerror}.") from error
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, mode: int = 0o644
) -> None:
    """Save tensors by name as safetensors, atomically and with a digest that `load_tensors` checks."""
    write_atomic(path, sealed(to_safetensors(tensors, metadata)), mode=mode)


def digest_of(facts: Iterable[str], files: Iterable[str | Path], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of texts, of the content of files and of tensors by name: the name of a result made from them.

    Example:
        >>> one, other = (digest_of([fact], [], {"w": torch.ones(2)}) for fact in ("a", "b"))
        >>> len(one), one == other
        (32, False)
    """
    digest = hashlib.sha256("\n".join(facts).encode())
    for file in files:
        digest.update(Path(file).read_bytes())
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(name.encode() + plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def to_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors in safetensors format, the same bytes for the same content; tensors may share memory."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    packed = safetensors.torch.save(plain, dict(metadata) if metadata else None)
    size = int.from_bytes(packed[:8], "little")
    return header_bytes(json.loads(packed[8 : 8 + size])) + packed[8 + size :]  # safetensors shuffles the metadata


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load tensors by name; raise `DataError` if the file is no complete safetensors file or does not fit its digest.

    Files of gradveil before 0.2 and of other programs have no digest; only their structure is checked.
    """
    with _whole(path):
        check_seal(path)
        return safetensors.torch.load_file(path)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that was saved with the tensors, without the digest."""
    with _whole(path):
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return without_seal(file.metadata() or {})


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn what a broken safetensors file raises into `DataError`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # torch and safetensors raise many kinds for a header that was changed
        raise DataError(f"{path} must be a whole safetensors file, got: {str(error)[:500]}.") from error


@dataclass(frozen=True)
class PrivateFolder:
    """A client's own files, in a folder that only its owner can read. Nothing in it is ever sent.

    The states after the newest two rounds are kept: a run that was killed during round r resumes from the state before
    r, although some clients had finished r already. A mark beside the folder names the first round with a state, so
    that a lost state is noticed: a client must not silently continue with a new key. If a key was lost or read by
    others, an empty file ``begin-anew`` beside the folder lets the client start with new secrets.
    """

    path: Path

    def save_state(self, round_number: int, state: Mapping[str, Tensor]) -> None:
        """Save the state after a round, and delete all earlier versions but the newest."""
        self._make()
        save_tensors(self._state_path(round_number), state, mode=0o600)
        if not self._mark.exists() or self.begins_anew:
            write_atomic(self._mark, str(round_number).encode(), mode=0o600)
        versions = self._versions(before=round_number)
        for old in versions if self.begins_anew else versions[:-1]:
            self._state_path(old).unlink(missing_ok=True)
        if self.begins_anew:
            self._anew.unlink()

    def load_state(self, round_number: int) -> dict[str, Tensor] | None:
        """Return the state with which this client starts a round, that of its newest earlier round, or None.

        Raises:
            RunFolderError: the state is lost, or others can read it.
        """
        if self.begins_anew:
            return None
        versions = self._versions(before=round_number)
        if versions:
            return _load_private(self._state_path(versions[-1]))
        if self._mark.exists() and (not self._versions() or self._first_round() < round_number):
            raise self._lost()
        return None

    def require_state(self, round_number: int) -> None:
        """Raise RunFolderError if the state after this round is missing and the client does not begin anew."""
        if round_number not in self._versions() and not self.begins_anew:
            raise self._lost(f" after round {round_number}")

    @property
    def begins_anew(self) -> bool:
        """Whether the client must forget its state and draw new secrets."""
        return self._anew.exists()

    def _lost(self, when: str = "") -> RunFolderError:
        return RunFolderError(
            f"{self.path} must hold the client's private state (keys, locks){when}, got none: it is lost. Restore it "
            f"from a copy, or make the empty file {self._anew} to let the client begin with new secrets."
        )

    def _first_round(self) -> int:
        """Return the round after which a state was first saved, as the mark says."""
        text = self._mark.read_text()
        return int(text) if text.isdigit() else -1

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save other tensors, e.g. images that a defence made."""
        self._make()
        save_tensors(self.path / f"{name}.safetensors", tensors, mode=0o600)

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors that `save` wrote, or None if there are none."""
        path = self.path / f"{name}.safetensors"
        return _load_private(path) if path.exists() and not self.begins_anew else None

    def _make(self) -> None:
        try:
            make_folder(self.path, 0o700)
        except OSError as error:
            raise RunFolderError(
                f"{self.path} could not be made: {error.strerror or error}. Choose another --out."
            ) from error

    @property
    def _mark(self) -> Path:
        return self.path.parent / "has-private-state"

    @property
    def _anew(self) -> Path:
        return self.path.parent / "begin-anew"

    def _state_path(self, round_number: int) -> Path:
        return self.path / f"state-{round_number:06d}.safetensors"

    def _versions(self, before: float = math.inf) -> list[int]:
        """Return the earlier rounds whose state exists; files with other names are ignored."""
        names = (path.stem.removeprefix("state-") for path in self.path.glob("state-*.safetensors"))
        return sorted(int(name) for name in names if name.isdecimal() and int(name) < before)


def forget_states(clients: Path) -> None:
    """Delete the states of all clients of a training that starts again; images that a defence made are kept."""
    for pattern in ("*/private/state-*.safetensors", "*/has-private-state"):
        for path in clients.glob(pattern):
            path.unlink()


def _load_private(path: Path) -> dict[str, Tensor]:
    """Load a private file; refuse one that others than its owner can open, for its content may be known."""
    anew = path.parent.parent / "begin-anew"
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise RunFolderError(
            f"{path} must have mode 0600, got {mode:04o}: others may have read it. "
            f"If nobody has, run `chmod 600 {path}`; else make the empty file {anew} to let the client begin "
            "with new secrets."
        )
    try:
        tensors = load_tensors(path)
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise DataError(f"{path} must hold finite numbers, got others in {name}.")
    except DataError as error:
        raise DataError(
            f"{error} It is damaged. Restore it from a copy, or make the empty file {anew} to let the client begin "
            "with new secrets."
        ) from error
    return tensors
