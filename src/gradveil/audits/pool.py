"""Run cells on all cores: worker processes with one torch thread each, which save the cells that they finish."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from torch import Tensor

from gradveil.audits.cells import failed_rows, run_cell
from gradveil.audits.plan import Cell, Rows
from gradveil.audits.settings import AuditSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.pixels import to_unit
from gradveil.heap import keep_freed_memory
from gradveil.interrupts import not_for_children
from gradveil.progress import listening, tell
from gradveil.report.pictures import lines_png
from gradveil.storage import to_safetensors, write_atomic

Finished = Callable[[Cell, Rows], None]
Progress = Callable[[float, str], None]
"""Called with the number of cells done (a running cell counts by its share), and what is being done."""
TICK = 0.2
"""Seconds between two checks of the workers' progress."""


def work_through(
    cells: Sequence[Cell],
    settings: AuditSettings,
    dataset: Dataset,
    out: Path,
    *,
    workers: int,
    data_root: Path | None,
    finished: Finished,
    progress: Progress,
) -> None:
    """Run cells and save each to ``out``. Results do not depend on the number of workers."""
    if workers:
        _in_workers(cells, settings, out, workers, data_root, finished, progress)
        return
    for number, cell in enumerate(cells):
        with listening(partial(_show, progress, number, cell.title)):
            tell(0.0)
            finished(cell, _worked(cell, settings, dataset, data_root, out))


def _show(progress: Progress, number: int, title: str, share: float) -> None:
    progress(number + share, title)


def _worked(cell: Cell, settings: AuditSettings, dataset: Dataset, data_root: Path | None, out: Path) -> Rows:
    """Run a cell, save it, and delete its clients' private files, which only a repeated try would need."""
    clients = out / "clients" / cell.name
    rows = _save(cell, *run_cell(cell, settings, dataset, data_root, out), out)
    shutil.rmtree(clients, ignore_errors=True)
    with contextlib.suppress(OSError):  # clients of other cells may be training
        clients.parent.rmdir()
    return rows


def _save(cell: Cell, rows: Rows, pictures: dict[str, Tensor], out: Path) -> Rows:
    """Save pictures first and rows last, so that a cell with rows is complete; return the rows."""
    if pictures:
        write_atomic(out / "cells" / f"{cell.name}.safetensors", to_safetensors(pictures))
        lines = [to_unit(pictures[name].flatten(0, 1)) for name in ("truth", "images")]
        slug = re.sub(r"[^A-Za-z0-9.=]+", "-", f"{cell.defence} {cell.attack} {'adaptive' * cell.adaptive}").strip("-")
        write_atomic(out / "images" / f"{cell.name}-{slug[:80]}.png", lines_png(lines))
    write_atomic(out / "cells" / f"{cell.name}.json", json.dumps(rows, allow_nan=False).encode())
    return rows


# --- in worker processes ----------------------------------------------------------------------------------------------


def _in_workers(
    cells: Sequence[Cell],
    settings: AuditSettings,
    out: Path,
    count: int,
    data_root: Path | None,
    finished: Finished,
    progress: Progress,
) -> None:
    """Give each worker a cell whose training is finished. If a worker is lost, its cell fails and a new one starts."""
    waiting, done = list(cells), 0
    open_ = {cell.name for cell in cells}
    task = _Task(settings, out, data_root, os.getpid())
    workers = [_Worker(task) for _ in range(count)]
    try:
        while done < len(cells):
            for index, worker in enumerate(workers):
                ready = next((cell for cell in waiting if cell.needs not in open_), None)
                if worker.cell is None and ready is not None:
                    if worker.takes(ready):
                        waiting.remove(ready)
                    else:
                        workers[index] = _Worker(task)  # it was lost while idle
            busy = {worker.connection: worker for worker in workers if worker.cell is not None}
            for connection in wait(list(busy), TICK):
                worker = busy[cast(Connection, connection)]
                rows = worker.hears()
                if rows is None:
                    continue
                cell, worker.cell, worker.share = cast(Cell, worker.cell), None, 0.0
                if not rows:  # the worker was lost
                    why = (
                        "WorkerError: the worker process was lost, perhaps because memory ran out. Use fewer --workers"
                    )
                    rows = _save(cell, failed_rows(cell, why, settings), {}, out)
                    workers[workers.index(worker)] = _Worker(task)
                finished(cell, rows)
                open_.discard(cell.name)
                done += 1
            titles = [worker.cell.title for worker in workers if worker.cell is not None]
            progress(done + sum(worker.share for worker in workers), "; ".join(titles))
    finally:
        for worker in workers:
            worker.process.kill()


@dataclass(frozen=True)
class _Task:
    """What every worker gets."""

    settings: AuditSettings
    out: Path
    data_root: Path | None
    parent: int


class _Worker:
    """The parent's end of a worker process: a pipe that sends cells and returns progress and rows."""

    def __init__(self, task: _Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, task))
        with not_for_children():
            self.process.start()
        theirs.close()
        self.cell: Cell | None = None
        self.share = 0.0

    def takes(self, cell: Cell) -> bool:
        """Send a cell; return False if the worker was lost."""
        try:
            self.connection.send(cell)
        except OSError:
            return False
        self.cell = cell
        return True

    def hears(self) -> Rows | None:
        """Return the rows of a finished cell, None if the cell is still running, or [] if the worker was lost."""
        try:
            message: float | Rows = self.connection.recv()
        except (EOFError, OSError):
            return []
        if isinstance(message, float):
            self.share = message
            return None
        return message


def _serve(connection: Connection, task: _Task) -> None:
    """Run cells in the worker process until the parent ends, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    keep_freed_memory()

    def watch() -> None:
        while os.getppid() == task.parent:
            time.sleep(TICK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    dataset = load_dataset(task.settings.dataset, task.data_root)
    told = 0.0

    def tell_now_and_then(share: float) -> None:
        nonlocal told
        if time.monotonic() - told > TICK:
            told = time.monotonic()
            connection.send(float(share))

    while True:
        try:
            cell: Cell = connection.recv()
        except EOFError:
            return
        with listening(tell_now_and_then), contextlib.redirect_stdout(sys.stderr):
            rows = _worked(cell, task.settings, dataset, task.data_root, task.out)
        connection.send(rows)
