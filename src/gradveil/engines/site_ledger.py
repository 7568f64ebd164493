"""A site's ledger: which rounds it answered, which weights it has seen, and what its scores have cost so far.

The ledger is one file per client, mode 0600, replaced atomically before an answer leaves the site, so that neither a
restart nor a second message at the same time makes the site answer twice. It ends with a digest of its content: a
damaged ledger is an error, and no question is answered. Whoever deletes it lets the site begin anew. Beside it lies the
history of all answers (`gradveil.engines.site_history`), which must fit it.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradveil.defences import Budget
from gradveil.engines.site_codes import refused
from gradveil.engines.site_history import GivenAnswer, append, digest_of_line, line_of, now, read_history, require_fit
from gradveil.errors import RunFolderError
from gradveil.federated.client import Score
from gradveil.limits import parse_json
from gradveil.storage import locked, write_atomic
from gradveil.types import Tensors, Update

_DIGEST = "blake2b"


@dataclass(frozen=True)
class RunRecord:
    """What a site did in one run.

    Attributes:
        begun: the last round that it began to answer; 0 before the first.
        request: digest of what the server sent in this round.
        answered: the last round that it answered.
        received: digests of the weights of all rounds that it answered.
        result: digest of the model with which the last round ended, once the server asked to score it.
        scores: the scores that it gave, by weights and kind of images, so that a repeated question is answered alike.
        updates: number of rounds that it began to answer.
        cost: privacy that these updates cost together, or None if nothing bounds it.
    """

    begun: int = 0
    request: str = ""
    answered: int = 0
    received: tuple[str, ...] = ()
    result: str = ""
    scores: Mapping[str, Score] = field(default_factory=dict)
    updates: int = 0
    cost: Budget | None = None

    def begin(self, number: int, request: str) -> "RunRecord":
        """Return the record after a request to train was accepted; what it costs is not in it yet.

        Rounds increase strictly. A round that began but was not answered, e.g. because the site was killed, may be
        asked for again with the very same request.
        """
        again = number == self.begun and request == self.request
        if number <= self.begun and not again:
            raise refused("round", f"Rounds must increase, got round {number} after round {self.begun}.")
        return replace(self, begun=number, request=request, updates=self.updates + (not again))

    def answer(self, weights: str) -> "RunRecord":
        """Return the record after the round that began was answered; only now may its weights be scored."""
        return replace(self, answered=self.begun, received=(*self.received, weights), result="")

    def repeats(self, number: int, request: str) -> bool:
        """Return whether a request is, bit for bit, the one that was answered last."""
        return number == self.begun == self.answered and request == self.request

    def admit(self, number: int, weights: str) -> "RunRecord":
        """Return the record after weights were accepted for scoring.

        Accepted are the weights of every round that the site answered, and one result of the last such round.
        """
        if weights in self.received:
            return self
        if number == self.answered > 0 and self.result in ("", weights):
            return replace(self, result=weights)
        raise refused("weights", f"Weights to score must be those of a round of this site, got others after {number}.")

    def with_score(self, key: str, score: Score) -> "RunRecord":
        """Return the record with one more score."""
        return replace(self, scores={**self.scores, key: score})


@dataclass(frozen=True)
class Ledger:
    """All that a site did.

    Attributes:
        updates: number of rounds that it began to answer, in all runs together.
        epsilon: what its scores of training images cost, in all runs together.
        runs: one record per run, by the hash of the run's settings.
        answers: number of lines of its history.
        last: digest of the last line.
    """

    updates: int = 0
    epsilon: float = 0.0
    runs: Mapping[str, RunRecord] = field(default_factory=dict)
    answers: int = 0
    last: str = ""

    def run(self, name: str) -> RunRecord:
        """Return the record of a run, empty if it is new."""
        return self.runs.get(name, RunRecord())

    def with_run(self, name: str, record: RunRecord) -> "Ledger":
        """Return the ledger with another record of a run; a round that begins counts as an update."""
        begins = record.begun > self.run(name).begun
        return replace(self, updates=self.updates + begins, runs={**self.runs, name: record})

    def spend(self, epsilon: float, budget: float) -> "Ledger":
        """Return the ledger after a score that costs ``epsilon``; raise if the sum exceeds the budget."""
        if self.epsilon + epsilon > budget * (1 + 1e-9):
            raise refused("budget", f"Scores may cost {budget:g} in all, got {self.epsilon:g} and {epsilon:g} more.")
        return replace(self, epsilon=self.epsilon + epsilon)


class LedgerFile:
    """The file of a ledger and that of its history, locked while they are open; see `open_ledger`."""

    def __init__(self, path: Path) -> None:
        self.path, self.history_path = path, history_of(path)
        self.ledger = _with_history(_read(path), self.history_path)

    def write(self, ledger: Ledger) -> None:
        """Replace the file; only when this returns may an answer leave the site."""
        ledger = replace(ledger, answers=self.ledger.answers, last=self.ledger.last)
        write_atomic(self.path, _with_digest(asdict(ledger)), mode=0o600)
        self.ledger = ledger

    def note(self, answer: GivenAnswer) -> None:
        """Add an answer to the history, before the ledger is written and the answer leaves."""
        line = line_of(replace(answer, time=now(), before=self.ledger.last))
        append(self.history_path, line)
        self.ledger = replace(self.ledger, answers=self.ledger.answers + 1, last=digest_of_line(line))


def history_of(path: Path) -> Path:
    """Return where the history of a ledger is: ``history-0.jsonl`` beside ``ledger-0.json``."""
    return path.with_name(path.name.replace("ledger", "history", 1)).with_suffix(".jsonl")


def _with_history(ledger: Ledger, path: Path) -> Ledger:
    """Return a ledger that knows all lines of its history. Raise RunFolderError if the two do not fit.

    A line that the ledger does not know yet must be of a round that it knows to have begun.
    """
    require_fit(path, ledger.answers, ledger.last)
    lines = read_history(path)
    for answer in lines[ledger.answers :]:
        if answer.work == "train" and ledger.run(answer.run).begun != answer.round:
            raise RunFolderError(
                f"{path} has an answer to round {answer.round}, of which the site's ledger does not know. Restore both "
                "files from one copy, the latest; the site answers nothing until they fit."
            )
    last = digest_of_line(line_of(lines[-1])) if lines else ""
    return replace(ledger, answers=len(lines), last=last)


@contextmanager
def open_ledger(path: Path) -> Iterator[LedgerFile]:
    """Lock a site's ledger within the ``with`` block: messages that come at the same time wait for each other."""
    with locked(path):
        yield LedgerFile(path)


def _read(path: Path) -> Ledger:
    if not path.exists():
        return Ledger()
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o022:
        raise RunFolderError(f"{path} must have mode 0600, got {mode:04o}: others may have changed it.")
    try:
        raw = path.read_bytes()
        values = parse_json(raw)
        del values[_DIGEST]
        if raw != _with_digest(values):
            raise ValueError("its content does not fit its digest")
        runs = {name: _record(record) for name, record in values["runs"].items()}
        known = int(values.get("answers", 0)), str(values.get("last", ""))  # a ledger of gradveil 0.1 has neither
        return Ledger(int(values["updates"]), float(values["epsilon"]), runs, *known)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RunFolderError(
            f"{path} must be the ledger of this site, got a damaged file ({type(error).__name__}). Restore it from a "
            "copy; if you delete it, the site answers rounds again that it has answered before."
        ) from error


def _with_digest(values: Mapping[str, Any]) -> bytes:
    """Return a ledger as JSON with a digest of it at the end, by which every changed bit is found."""
    digest = hashlib.blake2b(json.dumps(values, allow_nan=False).encode(), digest_size=32).hexdigest()
    return json.dumps({**values, _DIGEST: digest}, allow_nan=False).encode()


def _record(values: dict[str, Any]) -> RunRecord:
    scores = {key: Score(*map(_from_list, score.values())) for key, score in values["scores"].items()}
    cost = Budget(*values["cost"]) if values.get("cost") else None
    return RunRecord(**{**values, "received": tuple(values["received"]), "scores": scores, "cost": cost})


def _from_list(value: Any) -> Any:  # noqa: ANN401 - a field of a Score
    return tuple(value) if isinstance(value, list) else value


def digest(*parts: object) -> str:
    """Return a digest of numbers and texts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def weights_digest(tensors: Tensors) -> str:
    """Return a digest of tensors by name."""
    return Update(tensors, 0).sha256()
