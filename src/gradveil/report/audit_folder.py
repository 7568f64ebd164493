"""What an audit left in its folder: settings, plan and rows. Nothing in it is trusted to be whole."""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import RunFolderError
from gradveil.metrics.roc import FALSE_RATES

Row = dict[str, Any]

_NUMBERS = (
    "mse", "psnr", "ssim", "lpips", "label_accuracy", "guessed", "attacker_loss", "epsilon", "delta", "certificate",
    "seconds",
    "accuracy", "accuracy_sensitive", "round_seconds", "overhead", "rounds",
    "auc", "tpr_at_1_fpr", "advantage", "auc_loss", "auc_confidence", "members", "non_members", "queries",
    "accuracy_members", "accuracy_non_members",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One piece of the audit's work: a defence, an attack and a seed, for some of the targets."""

    name: str
    kind: str
    defence: str
    attack: str
    adaptive: bool
    seed: int
    first: int

    @property
    def line(self) -> tuple[str, str, bool, int]:
        """What a line of the gallery shows; several cells may belong to one."""
        return self.defence, self.attack, self.adaptive, self.seed


@dataclass(frozen=True)
class AuditFolder:
    """An audit as far as it has come."""

    path: Path
    settings: dict[str, Any]
    cells: tuple[Cell, ...]
    done: frozenset[str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def images(self) -> int:
        """How many images a target has."""
        value = self.settings.get("images")
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def defences(self) -> list[str]:
        """All defences, the undefended run first, then as they were asked for."""
        asked = self.settings.get("defences")
        names = [str(name) for name in asked] if isinstance(asked, list) else []
        names += [cell.defence for cell in self.cells] + [row["defence"] for row in self.rows]
        return sorted(dict.fromkeys(names), key=lambda name: name != "none")


def read_audit(folder: Path) -> AuditFolder:
    """Read an audit's folder; what is missing or broken becomes a note, a folder of another kind an error."""
    settings = _settings(folder)
    notes: list[str] = []
    rows, broken = _lines(folder / "rows.jsonl")
    cells = _plan(folder / "plan.json", notes)
    done = frozenset(cell.name for cell in cells if (folder / "cells" / f"{cell.name}.json").is_file())
    found: dict[tuple[object, ...], Row] = {}
    for row in [*rows, *_cell_rows(folder, cells, done, notes)]:
        found.setdefault(_identity(row), row)
    if broken:
        notes.append(
            f"{broken} broken line{'s' if broken > 1 else ''} of rows.jsonl could not be read and "
            f"{'were' if broken > 1 else 'was'} skipped."
        )
    return AuditFolder(folder, settings, tuple(cells), done, tuple(found.values()), tuple(notes))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "settings.toml"
    rule = f"{folder} must be the folder of an audit, whose settings.toml says kind = 'audit'"
    way_out = "Name the --out folder of gradveil audit."
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        got = "a folder without settings.toml" if folder.is_dir() else "no such folder"
        raise RunFolderError(f"{rule}, got {got}. {way_out}") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{rule}, got a file that can't be read: {error}. {way_out}") from error
    if settings.get("kind") != "audit":
        got = f"kind = {settings['kind']!r}" if "kind" in settings else "that of another run"
        raise RunFolderError(f"{rule}, got {got}. {way_out}")
    return settings


def _plan(path: Path, notes: list[str]) -> list[Cell]:
    try:
        listed = json.loads(path.read_bytes())["cells"]
        return [_cell(entry) for entry in listed]
    except FileNotFoundError:
        notes.append("plan.json is missing, so it can't be said how much of the run is done.")
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        notes.append("plan.json is broken, so it can't be said how much of the run is done.")
    return []


def _cell(entry: Mapping[str, Any]) -> Cell:
    name, targets = str(entry["name"]), entry.get("targets") or [0]
    if Path(name).name != name:
        raise ValueError(name)
    return Cell(
        name,
        str(entry["kind"]),
        str(entry["defence"]),
        str(entry.get("attack") or ""),
        bool(entry.get("adaptive")),
        int(entry["seed"]),
        int(targets[0]),
    )


def _lines(path: Path) -> tuple[list[Row], int]:
    """The rows of a file of rows, and how many lines of it are broken; a file that is not there has none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return [], 0
    rows = []
    for line in lines:
        try:
            rows.append(clean(json.loads(line)))
        except (ValueError, TypeError, RecursionError):
            rows.append(None)
    whole = [row for row in rows if row is not None]
    return whole, len(rows) - len(whole)


def _cell_rows(folder: Path, cells: Iterable[Cell], done: frozenset[str], notes: list[str]) -> list[Row]:
    """The rows of the finished cells: rows.jsonl may lack some while the run goes on."""
    rows = []
    for cell in cells:
        if cell.name in done:
            try:
                content = json.loads((folder / "cells" / f"{cell.name}.json").read_bytes())
                rows += [row for row in map(clean, content) if row is not None]
            except (OSError, ValueError, TypeError):
                notes.append(f"cells/{cell.name}.json is broken; its rows are missing.")
    return rows


def clean(raw: object) -> Row | None:
    """A row with every key in its type; None for what is no row.

    Figures that are not finite numbers become None.

    Example:
        >>> clean({"kind": "utility", "defence": "none", "accuracy": float("nan")})["accuracy"] is None
        True
        >>> clean(["no", "row"]) is None
        True
    """
    if not isinstance(raw, Mapping) or not isinstance(raw.get("defence"), str):
        return None
    kind = raw.get("kind", "privacy")
    if kind not in ("privacy", "utility", "membership"):
        return None
    converged = raw.get("converged")
    return {
        "kind": kind,
        "defence": raw["defence"],
        "attack": str(raw.get("attack") or ""),
        "adaptive": raw.get("adaptive") is True,
        "seed": _whole(raw.get("seed")),
        "target": _whole(raw.get("target")),
        "round": _whole(raw.get("round")),
        "client": _whole(raw.get("client")),
        **{key: _number(raw.get(key)) for key in _NUMBERS},
        "roc": _roc(raw.get("roc")),
        "converged": converged if isinstance(converged, bool) else None,
        "knows": _texts(raw.get("knows")) or [],
        "countermove": str(raw.get("countermove") or ""),
        "tripwire": _texts(raw.get("tripwire")),
        "why": str(raw.get("why") or ""),
        "failed": raw.get("failed") is True,
        "cell": str(raw.get("cell") or ""),
    }


def _texts(value: object) -> list[str] | None:
    """None for what is no list."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else None


def _identity(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in ("kind", "defence", "attack", "adaptive", "seed", "target", "round"))


def _roc(value: object) -> list[float] | None:
    """Rates at all of `FALSE_RATES`; None for what is no curve."""
    rates = [_number(rate) for rate in value] if isinstance(value, list) else []
    whole = [rate for rate in rates if rate is not None]
    return whole if len(rates) == len(whole) == len(FALSE_RATES) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
