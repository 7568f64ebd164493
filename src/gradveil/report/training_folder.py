"""Read what a training wrote to its folder: settings, rows and clients. Any of them may be unfinished or broken."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings, make_train_settings, read_settings
from gradveil.errors import ConfigError, RunFolderError
from gradveil.limits import parse_json, read_lines
from gradveil.metrics import schema_of
from gradveil.rows import Row

MOST_ROUNDS = 10_000_000
"""Rounds and clients at most; a larger number in a row is damage."""
LARGEST = 1e30
"""Numbers that are larger are damage, and can't be drawn."""


@dataclass(frozen=True)
class TrainingFolder:
    """A training, finished or not. ``notes`` say which parts of the folder are missing or broken."""

    settings: TrainSettings
    rows: tuple[Row, ...]
    clients: tuple[Row, ...]
    notes: tuple[str, ...]


def read_training(folder: Path) -> TrainingFolder:
    """Read a training's folder. Missing or broken parts become notes; a folder without any row is an error."""
    notes: list[str] = []
    settings = _settings(folder, notes)
    rows = _lines(folder / "rows.jsonl", "round", notes)
    if not rows:
        raise RunFolderError(
            f"{folder} must hold a training with at least one finished round, got one without results. "
            "Finish it: --resume."
        )
    clients = _lines(folder / "clients.jsonl", "client", notes)
    if not clients and not any("clients.jsonl" in note for note in notes):
        notes.append("The training is not finished: clients.jsonl is missing.")
    return TrainingFolder(settings, tuple(rows), tuple(clients), tuple(notes))


def _settings(folder: Path, notes: list[str]) -> TrainSettings:
    """Return the settings of settings.toml; those that can't be used have their default, and a note says so."""
    values = read_settings(folder / "settings.toml")
    try:
        return make_train_settings(values)
    except ConfigError:
        good = {key: value for key, value in values.items() if _usable({key: value})}
        good = good if _usable(good) else {}
        wrong = sorted(values.keys() - good.keys())
        notes.append(f"Settings that this version of gradveil can't use have their default: {', '.join(wrong)}.")
        return make_train_settings(good)


def _usable(values: Mapping[str, Any]) -> bool:
    try:
        make_train_settings(values)
    except ConfigError:
        return False
    return True


def _lines(path: Path, key: str, notes: list[str]) -> list[Row]:
    """Return the rows of a table (``round`` or ``client``, which is also their key), in order and each once."""
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path.name} can't be read: {error}.")
        return []
    found: dict[int, Row] = {}
    broken, strange = 0, dict[str, None]()
    for line in lines:
        try:
            raw = parse_json(line)
        except ValueError:
            raw = None
        row = clean(raw, key)
        if row is None:
            broken += 1
            continue
        strange |= dict.fromkeys(schema_of().unknown(key, raw))
        found.setdefault(row[key], row)
    if strange:
        shown = ", ".join(list(strange)[:9])
        notes.append(f"Fields of {path.name} that this version of gradveil does not know are not shown: {shown}.")
    if broken:
        notes.append(f"{broken} broken line{'s' * (broken > 1)} of {path.name} could not be read, and are left out.")
    return [found[number] for number in sorted(found)]


def clean(raw: object, key: str) -> Row | None:
    """Return a row of a round or client with every field in its type, or None if it is no row.

    Example:
        >>> clean({"round": 2, "accuracy": "high", "loss": 0.5}, "round")
        {'round': 2, 'accuracy': None, 'loss': 0.5}
        >>> clean({"accuracy": 0.5}, "round") is None
        True
    """
    if not isinstance(raw, Mapping):
        return None
    number = raw.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MOST_ROUNDS:
        return None
    row = schema_of().read_line(key, raw)
    return {name: None if isinstance(v, float) and abs(v) > LARGEST else v for name, v in row.items()}
