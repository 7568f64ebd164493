"""Cells on all cores: worker processes with one torch thread each, which save what they finish themselves."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path

from torch import Tensor

from gradveil.audit.cells import failed_rows, run_cell
from gradveil.audit.plan import Cell, Rows
from gradveil.audit.privacy import iterate_steps
from gradveil.audit.settings import AuditSettings
from gradveil.data import Dataset, load_dataset
from gradveil.progress import listening, tell
from gradveil.report.pictures import lines_png
from gradveil.storage import load_tensors, to_safetensors, write_atomic

Finished = Callable[[Cell, Rows], None]
Progress = Callable[[float, str], None]
"""Called with the number of cells done, running ones counted by their share, and what is being done."""
TICK = 0.2
"""Seconds between two looks at how far the workers are."""


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
    """Work out cells and save each in ``out``; results do not depend on the number of workers."""
    if workers:
        _in_workers(cells, settings, out, workers, data_root, finished, progress)
        return
    for number, cell in enumerate(cells):
        with listening(partial(_show, progress, number, cell.title)):
            tell(0.0)
            finished(cell, _save(cell, *run_cell(cell, settings, dataset), out))


def _show(progress: Progress, number: int, title: str, share: float) -> None:
    progress(number + share, title)


def _save(cell: Cell, rows: Rows, pictures: dict[str, Tensor], out: Path) -> Rows:
    """Pictures first, rows last: where a cell's rows are, all of it is there."""
    if pictures:
        write_atomic(out / "cells" / f"{cell.name}.safetensors", to_safetensors(pictures, iterate_steps(cell)))
        truth = load_tensors(out / "truth.safetensors")["images"][cell.first : cell.last]
        lines = [images.flatten(0, 1).double() / 255 for images in (truth, pictures["images"])]
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
    """At most one cell a worker is handed out, so that a lost worker is known by its cell; then new ones start."""
    waiting = deque(cells)
    while waiting:
        context = multiprocessing.get_context("spawn")
        shared = _Shared(settings, out, data_root, context.Array("d", count), context.Value("i", 0), context.Event())
        running: dict[Future[Rows], Cell] = {}
        try:
            with ProcessPoolExecutor(count, context, _begin, (shared,)) as pool, _stopping(shared):
                while waiting or running:
                    while waiting and len(running) < count:
                        cell = waiting.popleft()
                        running[pool.submit(_work, cell)] = cell
                    for future in wait(running, TICK, FIRST_COMPLETED).done:
                        rows = future.result()
                        finished(running.pop(future), rows)
                    done = len(cells) - len(waiting) - len(running)
                    doing = "; ".join(cell.title for cell in running.values())
                    progress(done + sum(shared.shares[:]), doing)
        except BrokenProcessPool:
            why = "WorkerError: a worker process was lost, perhaps for want of memory"
            for cell in running.values():  # one of them took its worker with it
                finished(cell, _save(cell, failed_rows(cell, why), {}, out))


@dataclass(frozen=True)
class _Shared:
    """What every worker is given: the task, how far each is, how many there are, and whether to stop at once."""

    settings: AuditSettings
    out: Path
    data_root: Path | None
    shares: "SynchronizedArray[float]"
    begun: "Synchronized[int]"
    stop: Event


@contextlib.contextmanager
def _stopping(shared: _Shared) -> Iterator[None]:
    """Whatever goes wrong here ends the workers too, in the middle of their cells."""
    try:
        yield
    except BaseException:
        shared.stop.set()
        raise


class _Worker:
    """What a worker process holds from cell to cell."""

    shared: _Shared
    dataset: Dataset
    slot: int


def _begin(shared: _Shared) -> None:
    """Set up a worker process; it ends with the process that started it, even if that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    parent = os.getppid()

    def watch() -> None:
        while not shared.stop.wait(TICK) and os.getppid() == parent:
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    with shared.begun.get_lock():
        _Worker.slot = shared.begun.value
        shared.begun.value += 1
    _Worker.shared = shared
    _Worker.dataset = load_dataset(shared.settings.dataset, shared.data_root)


def _work(cell: Cell) -> Rows:
    """One cell, in a worker process."""
    shared, slot = _Worker.shared, _Worker.slot
    try:
        with listening(lambda share: shared.shares.__setitem__(slot, share)), contextlib.redirect_stdout(sys.stderr):
            rows, pictures = run_cell(cell, shared.settings, _Worker.dataset)
        return _save(cell, rows, pictures, shared.out)
    finally:
        shared.shares[slot] = 0.0
