"""An audit in its folder: it works through all cells, and keeps finished ones if it is killed."""

import hashlib
import json
import shutil
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from gradveil.attacks import Attack, build_any_attack
from gradveil.audits.cells import SCRATCH, check
from gradveil.audits.plan import Cell, Rows, num_rows, plan
from gradveil.audits.pool import work_through
from gradveil.audits.scale import left_out
from gradveil.audits.settings import PROTOCOLS, AuditSettings, make_audit_settings
from gradveil.audits.tapping import forget_taps, has_taps, stacked, truths
from gradveil.audits.views import private_batches, refuse_known
from gradveil.config import read_settings, refuse_code, to_toml
from gradveil.data import Dataset, load_dataset
from gradveil.engines.run_folder import RunFolder, fingerprint, to_lines
from gradveil.engines.simulation import num_workers, usable_device
from gradveil.errors import DataError, RunFolderError
from gradveil.limits import read_json
from gradveil.metrics import schema_of
from gradveil.registry import own_files
from gradveil.report.notebook import ShownRows
from gradveil.report.words import command_of
from gradveil.rows import Schema, to_plain
from gradveil.storage import save_tensors, write_atomic
from gradveil.types import Batch

if TYPE_CHECKING:
    from gradveil.report.criteria import Verdict

Progress = Callable[[float, int, str], None]
"""Called with the cells done (a running cell counts by its share), their number, and what is being done."""
WHERE = ("seed", "round", "target")
"""What truth.safetensors says of each attacked update."""
EVERY = 5.0
"""Seconds between two updates of rows.jsonl while the audit runs."""


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        out: the audit's folder.
        rows: all rows, in the order of the plan.
        failed: the cells that failed, each with its reason.
        seconds: how long this call took.
        note: what the data set says about itself.
        report: the page to look at.
        summary: one line per defence, attack and kind of attacker.
        utility: one line per defence: what it costs.
        membership: one line per defence and attack on membership.
        schema: the columns of rows and lines, with their heads and meanings.
        left_out: the attacks that were not run because they can't search such large updates, each with its reason.
        verdicts: one for each criterion of ``fail_on``, with its reason.
    """

    out: Path
    rows: Rows
    failed: dict[str, str]
    seconds: float
    note: str
    report: Path
    summary: Rows = field(default_factory=list)
    utility: Rows = field(default_factory=list)
    membership: Rows = field(default_factory=list)
    schema: Schema = field(default_factory=schema_of)
    left_out: dict[str, str] = field(default_factory=dict)
    verdicts: "tuple[Verdict, ...]" = ()

    @property
    def verdict(self) -> str:
        """All criteria of ``fail_on`` together: passes, fails, not measured, or no criterion."""
        from gradveil.report.card import verdict_word

        return verdict_word(self.verdicts)

    def __repr__(self) -> str:
        failed = f", failed={len(self.failed)}" if self.failed else ""
        judged = f", {self.verdict}" if self.verdicts else ""
        return f"AuditResult(rows={len(self.rows)}{failed}{judged}, report={str(self.report)!r})"

    def _repr_html_(self) -> str:
        from gradveil.report.notebook import audit_html

        return audit_html(self.out, self.report)


def audit(
    settings: AuditSettings,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    progress: Progress = lambda done, total, doing: None,
) -> AuditResult:
    """Run all attacks against all defences; write rows, pictures and the report to ``out``.

    The same settings give the same rows except for times, whether or not the audit was killed and resumed, and for any
    number of workers. A cell that fails is recorded with its reason; ``resume`` tries it again.
    """
    from gradveil.report.audit import write_report  # matplotlib takes a second, and workers draw nothing
    from gradveil.report.card import write_card
    from gradveil.report.files import table_csv
    from gradveil.report.summary import membership, summarise, utility

    started = time.perf_counter()
    on_cpu = usable_device(settings.device).type == "cpu"
    dataset = load_dataset(settings.dataset, data_root)
    check(settings, dataset, data_root)
    without = left_out(settings, dataset)
    cells = plan(settings, without)
    count = num_workers(workers, len(cells)) if on_cpu else 0
    with RunFolder(out) as folder:
        found = _begin(folder, settings, dataset, cells, without, resume=resume)
        written = time.perf_counter()

        def finished(cell: Cell, rows: Rows) -> None:
            nonlocal written
            found[cell.name] = rows
            if time.perf_counter() - written > EVERY:
                write_atomic(out / "rows.jsonl", to_lines(_in_order(cells, found)))
                written = time.perf_counter()

        left = [cell for cell in cells if cell.name not in found]
        done = len(cells) - len(left)
        work_through(
            left,
            settings,
            dataset,
            out,
            workers=min(count, len(left)),
            data_root=data_root,
            finished=finished,
            progress=lambda now, doing: progress(done + now, len(cells), doing),
        )
        _forget(cells, found, out)
        rows = _in_order(cells, found)
        progress(len(cells), len(cells), "writing the report")
        write_atomic(out / "rows.jsonl", to_lines(rows))
        write_atomic(out / "rows.csv", table_csv(rows, settings.schema, *_kinds(rows)))
        report = write_report(out)
        write_card(out)
    failed = {row["cell"]: f"{_title(row)}: {row['why']}" for row in rows if row["failed"]}
    schema = settings.schema
    lines = summarise(rows, schema), utility(rows, schema), membership(rows, schema)
    seconds = time.perf_counter() - started
    return AuditResult(out, ShownRows(rows), failed, seconds, dataset.note, report, *lines, schema, without)


def _begin(
    folder: RunFolder,
    settings: AuditSettings,
    dataset: Dataset,
    cells: Sequence[Cell],
    without: Mapping[str, str],
    *,
    resume: bool,
) -> dict[str, Rows]:
    """Claim the folder and return the rows of the cells that are finished in it."""
    if folder.holds_run() and not resume:
        raise RunFolderError(
            f"{folder.path} must be new or empty, got a folder that holds a run. "
            "Add --resume (in Python: resume=True) to continue it, or choose another --out."
        )
    targets = list(_targets(settings, dataset))
    private = [batch for *_, batch in targets]
    attacks = [build_any_attack(spec) for spec in settings.attacks]
    refuse_known([attack for attack in attacks if isinstance(attack, Attack)], private, dataset)
    specs = (settings.model, *settings.defences, *settings.attacks, *settings.metrics)
    files = [settings.weights, *(file for spec in specs for file in own_files(spec))]
    identity = {"data": fingerprint(dataset, files), "settings": _hash(settings)}
    _check_same(folder.path, settings, identity)
    for part in folder.path.rglob(".*.part"):  # left by a write that was killed
        part.unlink(missing_ok=True)
    facts = {
        "kind": "audit",
        "command": command_of(asdict(settings), asdict(AuditSettings()) | PROTOCOLS[settings.protocol]),
    }
    write_atomic(folder.path / "settings.toml", tomli_w.dumps(facts).encode() + to_toml(settings))
    metrics = to_plain(settings.schema.metrics)
    listed = [cell.to_json() for cell in cells]
    document = {
        "identity": identity,
        "metrics": metrics,
        "left_out": dict(without),
        "class_names": list(dataset.class_names),
        "cells": listed,
    }
    write_atomic(folder.path / "plan.json", json.dumps(document, indent=1).encode())
    if targets:
        images, labels = stacked(private)
        where = {name: torch.tensor([each[place] for each in targets]) for place, name in enumerate(WHERE)}
        save_tensors(folder.path / "truth.safetensors", {"images": images, "labels": labels, **where})
    found = {cell.name: rows for cell in cells if (rows := _finished(folder.path / "cells", cell, settings))}
    for cell in cells:  # attacks that are left need the taps of their training, which may have been deleted
        lacking = cell.name not in found and cell.needs in found
        if lacking and not has_taps(folder.path / "trainings" / cell.needs, settings):
            del found[cell.needs]
    write_atomic(folder.path / "rows.jsonl", to_lines(_in_order(cells, found)))
    return found


def _targets(settings: AuditSettings, dataset: Dataset) -> Iterator[tuple[int, int, int, Batch]]:
    """Yield seed, round and target of each attacked update with the images behind it."""
    if settings.rounds:
        yield from truths(settings, dataset)
        return
    for seed in settings.all_seeds:
        for target, batch in enumerate(private_batches(settings, dataset)):
            yield seed, 1, target, batch


def _forget(cells: Sequence[Cell], found: Mapping[str, Rows], out: Path) -> None:
    """Delete the taps of trainings whose attacks are all finished, and attacks' scratch files if all are."""
    needed = {cell.needs for cell in cells if any(row["failed"] for row in found[cell.name])}
    if not needed:
        shutil.rmtree(out / SCRATCH, ignore_errors=True)
    for name in {cell.needs for cell in cells} - needed - {""}:
        forget_taps(out / "trainings" / name)


def _check_same(path: Path, settings: AuditSettings, identity: Mapping[str, str]) -> None:
    """Raise RunFolderError if the folder holds an audit of other settings, data or files."""
    if not (path / "settings.toml").exists():
        return
    saved = read_settings(path / "settings.toml")
    if saved.get("kind") != "audit":
        raise RunFolderError(f"{path} must hold an audit to resume, got another run. Choose another --out.")
    refuse_code(saved, path / "settings.toml", vars(settings))
    begun = make_audit_settings(saved)
    changed = [
        f"{key} = {value!r} (was {getattr(begun, key)!r})"
        for key, value in vars(settings).items()
        if value != getattr(begun, key)
    ]
    if changed:
        raise RunFolderError(
            f"A resumed audit must keep its settings, got {'; '.join(changed)} in {path}. "
            "Leave those options out, or choose another --out."
        )
    try:
        before = read_json(path / "plan.json")["identity"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / 'plan.json'} must be the plan of an audit, got: {error!r}.") from error
    if before != identity:
        raise RunFolderError(
            f"A resumed audit must have the data, weights and own files it began with, got others in {path}. "
            "Check --data-root, and the files of the data set, of --weights and of your own components."
        )


def _finished(folder: Path, cell: Cell, settings: AuditSettings) -> Rows:
    """Return the rows of a cell that is finished and complete, or [] if it is not or has failed.

    Rows of earlier versions may lack fields that were added later.
    """
    try:
        rows = read_json(folder / f"{cell.name}.json")
    except (OSError, ValueError):
        return []
    whole = isinstance(rows, list) and len(rows) == num_rows(cell, settings) and all(isinstance(r, dict) for r in rows)
    if not whole or any(row.get("failed") is not False for row in rows):
        return []
    columns = settings.schema.of(cell.kind)
    if any(column.key not in row for row in rows for column in columns if not column.later):
        return []
    there = cell.kind != "privacy" or (folder / f"{cell.name}.safetensors").is_file()
    try:
        return [settings.schema.row(cell.kind, row) for row in rows] if there else []
    except ValueError as error:
        raise DataError(
            f"cells/{cell.name}.json must hold rows of this version of gradveil, got: {error} "
            "Delete the file and run with --resume, or choose another --out."
        ) from error


def _in_order(cells: Iterable[Cell], found: Mapping[str, Rows]) -> Rows:
    return [row for cell in cells for row in found.get(cell.name, [])]


def _kinds(rows: Rows) -> list[str]:
    """Return the kinds of rows that rows.csv has columns for."""
    return ["privacy", "utility", *["membership"] * any(row["kind"] == "membership" for row in rows)]


def _hash(settings: AuditSettings) -> str:
    """Return a hash of the settings; one that was added later and has its default value does not count."""
    kept = tomllib.loads(to_toml(settings).decode())
    for key in settings.added_later:
        del kept[key]
    return hashlib.blake2b(tomli_w.dumps(kept).encode(), digest_size=16).hexdigest()


def _title(row: Mapping[str, Any]) -> str:
    if row["kind"] == "utility":
        return f"training under {row['defence']}, seed {row['seed']}"
    return f"{row['attack']} on {row['defence']}{', adaptive' if row.get('adaptive') else ''}, seed {row['seed']}"
