"""A site's history: one line per answer that it gave, which is only ever added to.

The file ``history-NUMBER.jsonl`` lies in the private folder, mode 0600. A line is on the disk before its answer leaves.
Each line holds the digest of the line before it, and the ledger the digest of the last one: a line that was changed,
removed or inserted is found, and so is a ledger that was replaced by an older copy.
"""

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from gradveil.errors import RunFolderError
from gradveil.limits import parse_json
from gradveil.storage import make_folder

_AHEAD = 1
"""Lines that the ledger may not know yet: a site that was killed between writing both knows one less."""


@dataclass(frozen=True)
class GivenAnswer:
    """One answer of a site.

    Attributes:
        run: hash of the run's settings.
        round: number of the round.
        work: ``train``, or ``score`` and the kind of images.
        model: digest of the model that the server sent.
        epsilon: ε of all updates of this run so far, or of this score; None if nothing bounds it.
        delta: δ of the same.
        mu: of Gaussian differential privacy, if the guarantee is that.
        total: ε of all answers in all runs, at the policy's max-delta; None if nothing bounds it.
        time: when it was given, in UTC.
        before: digest of the line before, or "" in the first line.
    """

    run: str
    round: int
    work: str
    model: str
    epsilon: float | None = None
    delta: float | None = None
    mu: float | None = None
    total: float | None = None
    time: str = ""
    before: str = ""


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def line_of(answer: GivenAnswer) -> str:
    """Return an answer as one line of the file."""
    return json.dumps(asdict(answer), allow_nan=False)


def digest_of_line(line: str) -> str:
    """Return the digest by which the next line, or the ledger, points to a line."""
    return hashlib.sha256(line.encode()).hexdigest()


def append(path: Path, line: str) -> None:
    """Add a line to the file and wait until it is on the disk; a line that was cut off by a crash is removed first."""
    try:
        make_folder(path.parent, 0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunFolderError(f"{path} could not be written: {error.strerror or error}. Nothing was sent.") from error


def read_history(path: Path) -> list[GivenAnswer]:
    """Return all answers in a file, oldest first; an empty list if there is no file.

    Raises:
        RunFolderError: a line was changed, removed or inserted, or others may write to the file.
    """
    return [_parsed(line, path) for line in _lines(path)]


def require_fit(path: Path, answers: int, last: str) -> None:
    """Raise RunFolderError unless the file holds the ``answers`` lines that the ledger knows, the last with its digest.

    One line more is fine: the site was killed before the ledger was replaced, and nothing was sent.
    """
    lines = _lines(path)
    known = digest_of_line(lines[answers - 1]) if 0 < answers <= len(lines) else ""
    if known != last or not answers <= len(lines) <= answers + _AHEAD:
        raise RunFolderError(
            f"{path} must have the {answers} lines that the site's ledger knows, got {len(lines)} or other ones. "
            "Restore both files from one copy, the latest; the site answers nothing until they fit."
        )


def _lines(path: Path) -> Sequence[str]:
    """Return the whole lines of a file, whose chain of digests must hold."""
    try:
        if not path.exists():
            return []
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} must be a site's history, got a file that can't be read.") from error
    if os.name == "posix" and mode & 0o022:
        raise RunFolderError(f"{path} must have mode 0600, got {mode:04o}: others may have changed it.")
    lines, before = text[: text.rfind("\n") + 1].splitlines(), ""
    for number, line in enumerate(lines, 1):
        if _parsed(line, path).before != before:
            raise RunFolderError(f"{path} must hold a site's answers, got another line before line {number}.")
        before = digest_of_line(line)
    return lines


def _parsed(line: str, path: Path) -> GivenAnswer:
    try:
        values = parse_json(line)
        if set(values) != {field.name for field in fields(GivenAnswer)}:
            raise ValueError("other fields")
        return GivenAnswer(**values)
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path} must have a line per answer, as a site writes it, got another one.") from error
