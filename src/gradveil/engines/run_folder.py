"""The folder of a run: settings, rows, checkpoint. Whatever kills the run, it can be resumed from this folder."""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from gradveil.config import TrainSettings, make_train_settings, read_settings, to_toml, values_to_toml
from gradveil.data import Dataset
from gradveil.data.federated import FederatedData
from gradveil.defences import build_defence, planned_defence
from gradveil.errors import ConfigError, DataError, RunFolderError, printable
from gradveil.limits import parse_json, read_lines
from gradveil.rows import COLUMNS, Schema
from gradveil.storage import load_tensors, make_folder, read_metadata, save_tensors, write_atomic
from gradveil.validate import is_file

try:
    import fcntl
except ImportError:  # not on Windows: there two runs in one folder are not noticed
    fcntl = None  # type: ignore[assignment]

_RUN_FILES = ("settings.toml", "rows.jsonl", "checkpoint.safetensors", "clients")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round."""

    round: int
    model: dict[str, Tensor]
    server_state: dict[str, Tensor]
    rows: list[dict[str, Any]]


class RunFolder:
    """One run's folder, locked while in use; use as a context manager.

    A round is committed by the atomic replacement of ``checkpoint.safetensors``; its row was appended and synced
    before that. Rows beyond the checkpoint belong to a round that never finished; they are dropped on resuming.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None
        self._identity: dict[str, str] = {}

    def __enter__(self) -> "RunFolder":
        try:
            make_folder(self.path)
            self._lock = os.fdopen(os.open(self.path / ".lock", os.O_WRONLY | os.O_CREAT, 0o644), "wb")
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            raise RunFolderError(f"{self.path} must not be in use, got a run that still writes to it.") from error
        except OSError as error:
            raise RunFolderError(f"{self.path} must be a folder that can be written, got: {error}.") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder; remove it if nothing was written to it."""
        if self._lock is not None:
            with suppress(OSError):  # the folder may be gone
                if {entry.name for entry in self.path.iterdir()} == {".lock"}:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
            self._close()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def holds_run(self) -> bool:
        """Return whether a run was ever started here."""
        return any((self.path / name).exists() for name in _RUN_FILES)

    def saved_settings(self) -> dict[str, Any]:
        """Return the settings of the run in this folder; empty if there is none yet."""
        path = self.path / "settings.toml"
        return read_settings(path) if path.exists() else {}

    def begin(self, settings: TrainSettings, fingerprint: str, *, resume: bool) -> Checkpoint | None:
        """Claim the folder for a run. Return the checkpoint to continue from, or None to start at round 1."""
        if self.holds_run() and not resume:
            raise RunFolderError(
                f"{self.path} must be new or empty, got a folder that holds a run. "
                "Add --resume (in Python: resume=True) to continue it, or choose another --out."
            )
        self._check_same_run(settings)
        self._identity = {"data": fingerprint, "settings": settings_hash(settings)}
        checkpoint = self._load()
        for part in self.path.rglob(".*.part"):  # left by a write that was killed
            part.unlink(missing_ok=True)
        write_atomic(self.path / "settings.toml", to_toml(settings))
        rows = checkpoint.rows if checkpoint else []
        write_atomic(self.path / "rows.jsonl", to_lines(rows))
        return checkpoint

    def commit(
        self,
        number: int,
        row: Mapping[str, Any],
        model: Mapping[str, Tensor],
        server_state: Mapping[str, Tensor],
    ) -> None:
        """Save a round: append its row, then replace the checkpoint."""
        path = self.path / "rows.jsonl"
        try:
            with path.open("ab") as file:
                file.write(to_lines([row]))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunFolderError(
                f"{path} could not be written: {error.strerror or error}. The checkpoint of the round before is whole; "
                "make room and run again with --resume."
            ) from error
        tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        tensors |= {f"server.{key}": tensor for key, tensor in server_state.items()}
        kept = {key: value for key, value in row.items() if key != "seconds"}  # the same run gives the same checkpoint
        facts = {"round": str(number), "row": json.dumps(kept, allow_nan=False), **self._identity}
        save_tensors(self.path / "checkpoint.safetensors", tensors, facts)

    def _check_same_run(self, settings: TrainSettings) -> None:
        saved = self.saved_settings()
        if not saved:
            return
        begun = make_train_settings(saved)
        if settings.rounds < begun.rounds:
            raise RunFolderError(
                f"rounds must be at least the {begun.rounds} that {self.path} was begun with, got {settings.rounds}."
            )
        now = asdict(settings)
        before = asdict(begun) | {key: now[key] for key in ("rounds", "save_rounds", "tripwire", "bad_answers")}
        changed = [f"{key} = {now[key]!r} (was {before[key]!r})" for key in now if now[key] != before[key]]
        if changed:
            raise RunFolderError(
                "A resumed run must keep its settings (rounds may grow; save_rounds, tripwire and bad_answers may "
                f"change), got {'; '.join(changed)} in {self.path}. Leave those options out, or choose another --out."
            )

    def _load(self) -> Checkpoint | None:
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        tensors, facts = load_tensors(path), read_metadata(path)
        try:
            number = int(facts["round"])
        except (KeyError, ValueError) as error:
            raise DataError(f"{path} must be a checkpoint of gradveil, got a file without a round.") from error
        if facts.get("data") != self._identity["data"]:
            raise RunFolderError(
                f"A resumed run must have the data, weights and own files it began with, got others in {self.path}. "
                "Check --data-root, and the files of the data set, of --weights and of your own model or defence."
            )
        if facts.get("settings") != self._identity["settings"]:
            raise RunFolderError(f"{path} must be the checkpoint of a run with these settings, got that of another.")
        return Checkpoint(
            number,
            {key.removeprefix("model."): t for key, t in tensors.items() if key.startswith("model.")},
            {key.removeprefix("server."): t for key, t in tensors.items() if key.startswith("server.")},
            _read_rows(self.path / "rows.jsonl", number, facts.get("row", "")),
        )


def settings_hash(settings: TrainSettings) -> str:
    """Return a short hash of all settings, except those that may change in a run as they do not change the weights."""
    kept = asdict(settings) | {"rounds": 0, "save_rounds": (), "tripwire": "off"}
    sums = ["sum_bits", "sum_range"] * (not settings.sum_bits)
    for key in ("bad_answers", "aggregation", *["canaries"] * (not settings.canaries), *sums):
        del kept[key]
    plan = planned_defence(settings).spec
    if plan != build_defence(settings.defence).spec:  # its noise depends on the number of rounds or clients
        kept["plan"] = plan
    return hashlib.blake2b(values_to_toml(kept), digest_size=16).hexdigest()


def fingerprint(dataset: Dataset | FederatedData, files: Iterable[str]) -> str:
    """Return a short hash of what settings only name: labels, a thousand images, and the named files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in filter(None, files):
        if not is_file(Path(path)):
            raise ConfigError(f"There is no file {str(path)!r}. Check the path.")
        digest.update(Path(path).read_bytes())
    for split in (dataset.train, dataset.test):
        digest.update(repr((split.images.shape, str(split.images.dtype))).encode())
        digest.update(np.ascontiguousarray(split.labels).tobytes())
        digest.update(np.ascontiguousarray(split.images[:: max(1, len(split) // 1000)]).tobytes())
    return digest.hexdigest()


def to_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return rows as JSON, one per line."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def _read_rows(path: Path, last: int, newest: str) -> list[dict[str, Any]]:
    """Return the rows up to a round; later ones belong to a round that did not finish, and may be incomplete.

    A damaged file is repaired: whole rows are kept, and a warning tells which rounds have none.

    Args:
        path: the file of rows.
        last: the checkpoint's round.
        newest: the row of that round as the checkpoint has it, or "" in checkpoints of earlier versions.
    """
    rows: list[dict[str, Any]] = []
    try:
        lines = read_lines(path) if path.exists() else []
    except OSError as error:
        raise DataError(f"{path} must be a file of rows, got: {error}.") from error
    for line in lines:
        row = _whole_row(line)
        if row is not None and (rows[-1]["round"] + 1 if rows else 0) <= row["round"] <= last:
            rows.append(row)
    kept = _whole_row(newest.encode())
    if kept is not None and (not rows or rows[-1]["round"] < last == kept["round"]):
        rows.append(kept)
    lost = sorted({*range(1, last + 1)} - {row["round"] for row in rows})
    if lost:
        warnings.warn(
            f"{printable(str(path))} was damaged, and was repaired: its whole rows are kept, and the figures of "
            f"round{'s' * (len(lost) > 1)} {', '.join(map(str, lost[:9]))}{', ...' * (len(lost) > 9)} are lost. "
            "The checkpoint is whole, and the run continues from it.",
            stacklevel=2,
        )
    return rows


def _whole_row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a round in a line, or None if the line is damaged."""
    try:
        row = parse_json(line)
        Schema(COLUMNS).check("round", row)
    except (ValueError, TypeError, AttributeError):
        return None
    number = row.get("round") if isinstance(row, dict) else None
    return row if isinstance(number, int) and not isinstance(number, bool) and "accuracy" in row else None
