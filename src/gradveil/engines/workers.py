"""The embedded engine on all cores: persistent worker processes, one flat vector each way through shared memory.

Each worker has one torch thread and glibc malloc settings that keep freed memory (docs/performance.md has the ratios).
A worker rebuilds everything from plain text and mapped arrays: only numbers and text cross the pipe. Results are taken
in the order of the clients, whichever worker finishes first, so the bits do not depend on the number of workers.
"""

import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from gradveil import errors
from gradveil.config import TrainSettings
from gradveil.data.federated import FederatedData
from gradveil.defences.chain import planned_defence
from gradveil.engines.devices import Devices, chunks, make_network
from gradveil.engines.shared_file import SharedFile
from gradveil.engines.tripwire import TripwireWarning, announce, hearing
from gradveil.federated.client import Broadcast, Score
from gradveil.federated.flat import FlatModel
from gradveil.federated.server import ScoreRequest, Sent
from gradveil.heap import keep_freed_memory
from gradveil.interrupts import not_for_children
from gradveil.models.base import Normalisation
from gradveil.storage import to_safetensors
from gradveil.types import Tensors, Update

R = TypeVar("R")
_AHEAD = 2
"""Tasks that a worker has at once, so that it never waits for the next one."""


@dataclass(frozen=True)
class Blueprint:
    """Everything that a worker needs to build its side of the simulation."""

    settings: TrainSettings
    shape: tuple[int, int, int]
    num_classes: int
    normalisation: Normalisation | None
    clients_folder: Path


@dataclass(frozen=True)
class _Begin:
    """A round begins: the model lies in row 0 of the shared vectors."""

    round_number: int
    lr: float
    public: bytes


@dataclass(frozen=True)
class _Train:
    client: int


@dataclass(frozen=True)
class _ScoreChunk:
    request: ScoreRequest
    start: int


@dataclass(frozen=True)
class _Trained:
    """What a client sent; an update of the model's own shape lies in the shared vectors, and ``tensors`` is None."""

    num_examples: int
    reports: Mapping[str, float]
    tensors: bytes | None = None
    buffers: bytes = b""


@dataclass(frozen=True)
class _Failure:
    """An error in a worker: its message, and its class if it is one of gradveil's own errors."""

    kind: str
    message: str


class Workers:
    """Runs clients on several processes; use as a context manager."""

    fewest = 0

    def __init__(self, blueprint: Blueprint, data: FederatedData, net: FlatModel, num_workers: int) -> None:
        self._data, self._net = data, net
        rows, size = 1 + 2 * _AHEAD * num_workers, net.shared.stop - net.shared.start
        vectors = np.zeros((rows, size), net.values[:0].numpy().dtype)
        try:
            self._shared = SharedFile({**data.arrays(), "vectors": vectors})
        except OSError as error:
            raise errors.RunFolderError(
                f"{tempfile.gettempdir()} must have room for the workers' data, got: {error.strerror or error}. "
                "Make room, set TMPDIR to another place, or use --workers 0."
            ) from error
        self._vectors = self._shared.array("vectors", writable=True)
        self._free_rows = list(range(1, rows))
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._answered: set[Connection] = set()
        self._processes = []
        for _ in range(num_workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(blueprint, self._shared, there), daemon=True)
            with not_for_children():
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()
        self._shared.close()

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterator[Sent]:
        """Let clients train on all workers; yield in the order of ``clients``."""
        if clients:
            self._begin(round_number, model, public, lr)
            results = self._run([_Train(client) for client in clients], self._read_update)
            for client, (update, reports) in zip(clients, results, strict=True):
                yield Sent(client, update, reports)

    def score(self, round_number: int, requests: Sequence[ScoreRequest], model: Tensors) -> list[Score]:
        """Score models on all workers, chunk by chunk."""
        self._begin(round_number, model, {}, 0.0)
        pieces = [_ScoreChunk(request, start) for request in requests for start in chunks(self._data, request)]
        totals = dict.fromkeys(requests, Score())
        for chunk, part in zip(pieces, self._run(pieces, _read_score), strict=True):
            totals[chunk.request] += part
        return [totals[request] for request in requests]

    def _begin(self, round_number: int, model: Tensors, public: Tensors, lr: float) -> None:
        self._vectors[0] = self._net.shared_vector(model).numpy()
        message = _Begin(round_number, lr, to_safetensors(public))
        for pipe in self._pipes:
            self._send(pipe, message)

    def _run(self, tasks: Sequence[_Train | _ScoreChunk], read: Callable[[object, int], R]) -> Iterator[R]:
        """Hand out the tasks and yield their results in order; each task under way has its own row of the vectors."""
        waiting = deque(enumerate(tasks))
        load = dict.fromkeys(self._pipes, 0)
        done: dict[int, tuple[int, object, list[str]]] = {}
        for position in range(len(tasks)):
            while position not in done:
                for pipe in sorted(self._pipes, key=load.__getitem__):
                    if waiting and self._free_rows and load[pipe] < _AHEAD:
                        number, task = waiting.popleft()
                        self._send(pipe, (number, self._free_rows.pop(), task))
                        load[pipe] += 1
                for pipe, (number, row, result, alarms) in self._receive():
                    load[pipe] -= 1
                    done[number] = (row, result, alarms)
            row, result, alarms = done.pop(position)
            for alarm in alarms:
                announce(alarm)
            if isinstance(result, _Failure):
                raise _as_error(result)
            value = read(result, row)
            self._free_rows.append(row)
            yield value

    def _read_update(self, result: object, row: int) -> tuple[Update, Mapping[str, float]]:
        trained = cast(_Trained, result)
        if trained.tensors is None:  # an update of the model's own shape lies in the row
            vector = torch.from_numpy(self._vectors[row].copy())
            return self._net.to_update(vector, trained.num_examples), trained.reports
        tensors, buffers = map(safetensors.torch.load, (trained.tensors, trained.buffers))
        return Update(tensors, trained.num_examples, buffers), trained.reports

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise self._lost(pipe) from error

    def _receive(self) -> Iterable[tuple[Connection, tuple[int, int, object, list[str]]]]:
        for pipe in wait(self._pipes):
            if isinstance(pipe, Connection):
                try:
                    message = pipe.recv()
                    self._answered.add(pipe)
                    yield pipe, message
                except (EOFError, OSError) as error:
                    raise self._lost(pipe) from error

    def _lost(self, pipe: Connection) -> errors.WorkerError:
        process = self._processes[self._pipes.index(pipe)]
        process.join(5)
        if pipe not in self._answered:
            return errors.WorkerError(
                f"A worker process ended before its first answer (exit code {process.exitcode}). Workers import the "
                "script that starts them: guard its body with `if __name__ == '__main__':`, or use workers=0."
            )
        return errors.WorkerError(
            f"A worker process ended by itself (exit code {process.exitcode}; -9 often means that memory ran out). "
            "The last checkpoint is whole: run again with --resume, perhaps with fewer --workers."
        )


def _work(blueprint: Blueprint, shared: SharedFile, pipe: Connection) -> None:
    """Body of a worker process: serve tasks until the pipe closes."""
    keep_freed_memory()
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # output of a user's model is not a result
    warnings.simplefilter("ignore", TripwireWarning)  # the parent warns
    data = FederatedData.of_arrays(shared.array)
    vectors = shared.array("vectors", writable=True)
    devices: Devices | None = None
    begin = _Begin(0, 0.0, b"")
    received, public = torch.empty(0), dict[str, Tensor]()
    try:
        while True:
            message = pipe.recv()
            if isinstance(message, _Begin):
                begin, public = message, safetensors.torch.load(message.public)
                received = torch.from_numpy(vectors[0].copy())
                continue
            number, row, task = message
            result: object
            alarms = list[str]()
            try:
                if devices is None:
                    devices = _build_devices(blueprint, data)
                if isinstance(task, _ScoreChunk):
                    result = devices.score(task.request, task.start, begin.round_number, received)
                else:
                    with hearing() as alarms:
                        played = devices.train(task.client, Broadcast(received, begin.lr, begin.round_number, public))
                    update, vector = played.update, devices.net.to_vector(played.update)
                    if vector is None:
                        parts = to_safetensors(update.tensors), to_safetensors(update.buffers)
                        result = _Trained(update.num_examples, played.reports, *parts)
                    else:
                        vectors[row] = vector.detach().cpu().numpy()
                        result = _Trained(update.num_examples, played.reports)
            except errors.GradveilError as error:
                result = _Failure(type(error).__name__, str(error))
            except Exception:
                result = _Failure("", traceback.format_exc())
            pipe.send((number, row, result, alarms))
    except (EOFError, OSError):  # the parent closed the pipe, or is gone
        return


def _build_devices(blueprint: Blueprint, data: FederatedData) -> Devices:
    settings = blueprint.settings
    return Devices(
        settings,
        data,
        planned_defence(settings),
        lambda: make_network(settings, blueprint.shape, blueprint.num_classes, blueprint.normalisation, data.aux),
        blueprint.clients_folder,
    )


def _read_score(result: object, row: int) -> Score:
    return cast(Score, result)


def _as_error(failure: _Failure) -> Exception:
    """Return the worker's error: of the same class if it is one of gradveil's own errors."""
    error = errors.named_error(failure.kind, failure.message)
    return error or RuntimeError(f"A worker failed:\n{failure.message}")
