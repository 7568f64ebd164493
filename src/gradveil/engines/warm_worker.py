"""A site's warm worker: a process that has imported everything, and answers one message after another.

Started by `gradveil.engines.warm_site`. It ends after some idle minutes, and at once if the process ends that started
it: Flower's SuperExec, which ends with the SuperNode. A second worker for the same client ends at once.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradveil.engines.flower_site import LOG, answered
from gradveil.engines.warm_wire import receive, send

from flwr.app import Context, RecordDict  # isort: skip - flower_site says if it is missing
from flwr.common.serde import context_from_proto, recorddict_from_proto, recorddict_to_proto  # isort: skip
from flwr.proto.message_pb2 import Context as ProtoContext  # isort: skip
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict  # isort: skip

Answering = Callable[[str, RecordDict, Context], RecordDict]


class _Kept(logging.Handler):
    """Keeps what is logged while a message is answered; it goes to Flower's log with the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, self.format(record)))


def serve(listening: socket.socket, idle_seconds: float, answer: Answering = answered) -> int:
    """Answer messages one by one until none came for a while; return how many it were."""
    listening.settimeout(idle_seconds)
    count = 0
    while True:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            return count
        with connection, suppress(ConnectionError):
            connection.settimeout(None)
            _answer_one(connection, answer)
            count += 1


def _answer_one(connection: socket.socket, answer: Answering) -> None:
    kind, content, context = receive(connection, 3)
    asked, about = recorddict_from_proto(ProtoRecordDict.FromString(content)), ProtoContext.FromString(context)
    kept = _Kept()
    LOG.addHandler(kept)
    try:
        reply = answer(kind.decode(), asked, context_from_proto(about))
    finally:
        LOG.removeHandler(kept)
    send(connection, [json.dumps(kept.lines).encode(), recorddict_to_proto(reply).SerializeToString()])


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket | None]:
    """Listen at a path within the ``with`` block; yield None if another worker does."""
    import fcntl

    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            listening.bind(os.fspath(path))
        finally:
            os.umask(mask)
        listening.listen()
        try:
            yield listening
        finally:
            path.unlink(missing_ok=True)
            os.close(lock)


def end_with(parent: int, every: float = 1.0) -> None:
    """End this process, whatever it does, soon after the process ``parent`` has ended."""
    born = _birth(parent)

    def watch() -> None:
        while _birth(parent) == born is not None:
            time.sleep(every)
        os._exit(0)  # nothing is lost: all files of a site are replaced as a whole

    threading.Thread(target=watch, daemon=True).start()


def _birth(process: int) -> str | None:
    """Return when a process started, or "" if the system does not tell; None if there is no such process."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except ProcessLookupError:
        return None
    except (OSError, IndexError):
        return ""


def main() -> None:
    """Run the worker whose socket, parent and idle minutes the command line names."""
    path, parent, minutes = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    end_with(parent)
    with listening_at(path) as listening:
        if listening is not None:
            serve(listening, 60 * minutes)


if __name__ == "__main__":
    main()
