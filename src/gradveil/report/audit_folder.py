"""Read what an audit wrote to its folder: settings, plan and rows. Any of them may be missing or broken."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradveil.errors import RunFolderError
from gradveil.limits import LONGEST_SETTINGS, parse_json, parse_toml, read_bytes, read_json, read_lines
from gradveil.metrics import schema_of
from gradveil.metrics.roc import FALSE_RATES
from gradveil.rows import Row, Schema, from_plain


@dataclass(frozen=True)
class PlannedCell:
    """One cell of plan.json: a defence, an attack and a seed, for some of the targets."""

    name: str
    kind: str
    defence: str
    attack: str
    adaptive: bool
    seed: int
    first: int
    round: int = 0
    needs: str = ""

    @property
    def line(self) -> tuple[str, str, bool, int]:
        """The gallery's line that the cell belongs to; several cells may share one."""
        return self.defence, self.attack, self.adaptive, self.seed


@dataclass(frozen=True)
class AuditFolder:
    """An audit, finished or not."""

    path: Path
    settings: dict[str, Any]
    cells: tuple[PlannedCell, ...]
    done: frozenset[str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    schema: Schema = field(default_factory=schema_of)
    names: Mapping[str, str] = field(default_factory=dict)
    """Short names of components, if the rows have these in place of the full ones (`gradveil.report.names`)."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Attacks that were not run because they can't search such large updates, each with its reason."""
    class_names: tuple[str, ...] = ()
    """What the labels stand for; () if nobody said."""

    @property
    def images(self) -> int:
        """The number of images per target."""
        value = self.settings.get("images")
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def defences(self) -> list[str]:
        """All defences: `none` first, then the others in the order of the settings."""
        asked = self.settings.get("defences")
        names = [str(name) for name in asked] if isinstance(asked, list) else []
        names += [cell.defence for cell in self.cells] + [row["defence"] for row in self.rows]
        return sorted(dict.fromkeys(self.names.get(name, name) for name in names), key=lambda name: name != "none")


def read_audit(folder: Path) -> AuditFolder:
    """Read an audit's folder. Missing or broken parts become notes; a folder of another kind is an error."""
    settings = _settings(folder)
    notes: list[str] = []
    cells, schema = _plan(folder / "plan.json", notes)
    raw, broken = _lines(folder / "rows.jsonl")
    done = frozenset(cell.name for cell in cells if (folder / "cells" / f"{cell.name}.json").is_file())
    found: dict[tuple[object, ...], Row] = {}
    strange: dict[str, None] = {}
    for item in [*raw, *_cell_rows(folder, cells, done, schema, notes)]:
        row = clean(item, schema)
        if row is None:
            broken += 1
            continue
        strange |= dict.fromkeys(schema.unknown(row["kind"], item))
        found.setdefault(_identity(row), row)
    notes += [*_old_form(settings), *_not_sent(folder, cells, found.values())]
    if strange:
        notes.append(f"Fields of rows that this version of gradveil does not know are not shown: {', '.join(strange)}.")
    if broken:
        notes.append(
            f"{broken} broken line{'s' if broken > 1 else ''} of rows.jsonl could not be read and "
            f"{'were' if broken > 1 else 'was'} skipped."
        )
    without = _left_out(folder / "plan.json")
    rows, classes = tuple(found.values()), _class_names(folder / "plan.json")
    return AuditFolder(
        folder, settings, tuple(cells), done, rows, tuple(notes), schema, left_out=without, class_names=classes
    )


def _old_form(settings: Mapping[str, Any]) -> list[str]:
    """Return a note on an audit from before ``--protocol``, whose attacked updates were not those of its training."""
    if "update" not in settings or "protocol" in settings or not settings.get("rounds"):
        return []
    return [
        "This audit is of an old form: the attacked updates are not those of the training whose accuracy stands beside "
        "them. Run it again with this version to see both of one training."
    ]


def _not_sent(folder: Path, cells: Iterable[PlannedCell], rows: Iterable[Row]) -> list[str]:
    """Return a note if attacked updates are not among those that their training lists as sent."""
    needs, missing = {cell.name: cell.needs for cell in cells if cell.needs}, 0
    listed: dict[str, set[str]] = {}
    for row in rows:
        training = needs.get(row["cell"], "")
        if row["kind"] != "privacy" or row["failed"] or row["branched"] or not training:
            continue
        if training not in listed:
            listed[training] = _listed(folder / "trainings" / training / "updates.json")
        attacked = [row["update_sha256"], *(row.get("later_sha256") or ())]
        missing += sum(digest not in listed[training] for digest in attacked)
    if not missing:
        return []
    return [f"{missing} attacked updates are not among those that their trainings list as sent (trainings/)."]


def _listed(path: Path) -> set[str]:
    """Return the digests of a training's updates; none if the list is missing or broken."""
    try:
        return {str(digest) for sent in read_json(path).values() for digest in sent.values()}
    except (OSError, ValueError, AttributeError):
        return set()


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "settings.toml"
    rule = f"{folder} must be the folder of an audit, whose settings.toml says kind = 'audit'"
    way_out = "Name the --out folder of gradveil audit."
    try:
        settings = parse_toml(read_bytes(path, LONGEST_SETTINGS))
    except (FileNotFoundError, NotADirectoryError) as error:
        got = "a folder without settings.toml" if folder.is_dir() else "no such folder"
        raise RunFolderError(f"{rule}, got {got}. {way_out}") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{rule}, got a file that can't be read: {error}. {way_out}") from error
    if settings.get("kind") != "audit":
        got = f"kind = {settings['kind']!r}" if "kind" in settings else "that of another run"
        raise RunFolderError(f"{rule}, got {got}. {way_out}")
    return settings


def _plan(path: Path, notes: list[str]) -> tuple[list[PlannedCell], Schema]:
    """Return the cells of plan.json, and the schema with the audit's metrics (by default the standard ones)."""
    state = "missing"
    with suppress(FileNotFoundError):
        try:
            plan = read_json(path)
            schema = schema_of()
            if "metrics" in plan:
                schema = _with_metrics(schema, plan["metrics"])
            return [_cell(entry) for entry in plan["cells"]], schema
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
            state = "broken"
    notes.append(f"plan.json is {state}, so the page can't say how much of the run is done.")
    return [], schema_of()


def _with_metrics(schema: Schema, values: Sequence[Mapping[str, Any]]) -> Schema:
    """Return the schema with an audit's metrics. Raise if they are damaged, or lack some that every audit has."""
    found = from_plain(values)
    tables = {column.key: column.tables for column in found}
    if any(tables.get(usual.key) != usual.tables for usual in schema.metrics):
        raise ValueError("The standard metrics must be among the metrics.")
    return schema.with_metrics(found)


def _left_out(path: Path) -> dict[str, str]:
    """Return the attacks that plan.json says were not run; none if it does not say."""
    try:
        return {str(spec): str(why) for spec, why in read_json(path)["left_out"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _class_names(path: Path) -> tuple[str, ...]:
    """Return what plan.json says that labels stand for; () if it does not say."""
    try:
        names = read_json(path).get("class_names", ())
        return tuple(map(str, names)) if isinstance(names, list) else ()
    except (OSError, ValueError, AttributeError):
        return ()


def _cell(entry: Mapping[str, Any]) -> PlannedCell:
    name, targets = str(entry["name"]), entry.get("targets") or [0]
    if Path(name).name != name:
        raise ValueError(name)
    return PlannedCell(
        name,
        str(entry["kind"]),
        str(entry["defence"]),
        str(entry.get("attack") or ""),
        bool(entry.get("adaptive")),
        int(entry["seed"]),
        int(targets[0]),
        int(entry.get("round") or 0),
        Path(str(entry.get("needs") or "")).name,
    )


def _lines(path: Path) -> tuple[list[Any], int]:
    """Return the JSON values of a file of lines, and the number of broken lines; both are empty without the file."""
    try:
        lines = read_lines(path)
    except OSError:
        return [], 0
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(parse_json(line))
    return rows, len(lines) - len(rows)


def _cell_rows(
    folder: Path, cells: Iterable[PlannedCell], done: frozenset[str], schema: Schema, notes: list[str]
) -> list[Any]:
    """Return the rows of the finished cells; rows.jsonl may lack some while the run is going on."""
    rows = []
    for cell in cells:
        if cell.name in done:
            try:
                content = read_json(folder / "cells" / f"{cell.name}.json")
                rows += [row for row in content if schema.read(row) is not None]
            except (OSError, ValueError, TypeError):
                notes.append(f"cells/{cell.name}.json is broken; its rows are missing.")
    return rows


def clean(raw: object, schema: Schema | None = None) -> Row | None:
    """Return a row with every field in its type, or None if it is no row.

    Numbers that are not finite become None, and so does a ROC curve without a rate for each of `FALSE_RATES`.

    Example:
        >>> clean({"kind": "utility", "defence": "none", "accuracy": float("nan")})["accuracy"] is None
        True
        >>> clean(["no", "row"]) is None
        True
    """
    row = (schema or schema_of()).read(raw)
    if row and row["roc"] and len(row["roc"]) != len(FALSE_RATES):
        row["roc"] = None
    return row


def _identity(row: Row) -> tuple[object, ...]:
    return tuple(row[key] for key in ("kind", "defence", "attack", "adaptive", "seed", "target", "round"))
