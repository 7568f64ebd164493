"""A site's ClientApp that starts in no time: it hands each message to a warm worker of the site.

Flower starts a new process for each message. Importing torch there takes longer than many a round of training, so this
process imports Flower and the policy only, and a worker that stays (`gradveil.engines.warm_worker`) does the work of
`gradveil.engines.flower_site`. The worker is started by the first message. It ends after some idle minutes, or when the
node ends. Messages reach it over a unix socket in the site's private folder, mode 0600. It runs the installed gradveil
only, never code that came with a run.

If there can't be a worker (no unix sockets, a path that is too long, ``warm-minutes=0``), or it does not start, this
process answers the message itself.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from gradveil.engines.site_kinds import app_of
from gradveil.engines.site_policy import SitePolicy, read_policy
from gradveil.engines.warm_wire import receive, send, socket_path, usable
from gradveil.errors import GradveilError

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.common.serde import context_to_proto, recorddict_from_proto, recorddict_to_proto
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
except ImportError as error:
    raise ImportError("gradveil over Flower needs Flower. Run `pip install 'gradveil[flower]'`.") from error

LOG = logging.getLogger("flwr")
STARTING = 120.0
"""Seconds within which a worker must have started."""
STARTED: list["subprocess.Popen[bytes]"] = []
"""Workers that this process has started; they outlive it."""


def client_app() -> ClientApp:
    """Return a ClientApp for one site, whose policy names its images. It answers as that of `flower_site` does."""
    return app_of(_answer)


def _answer(kind: str, message: Message, context: Context) -> Message:
    """Return the worker's answer to a message, or that of this process if there is no worker."""
    try:
        policy = read_policy(context.node_config)
        path = socket_path(policy.private_folder, policy.partition_id)
        content = _worked(policy, path, kind, message.content, context) if _wants_worker(policy, path) else None
    except GradveilError:
        content = None  # answered below, with the right code
    if content is None:
        from gradveil.engines.flower_site import answered  # imports torch

        content = answered(kind, message.content, context)
    return Message(content, reply_to=message)


def _wants_worker(policy: SitePolicy, path: Path) -> bool:
    return bool(policy.warm_minutes and policy.private_folder) and policy.partition_id >= 0 and usable(path)


def _worked(policy: SitePolicy, path: Path, kind: str, content: RecordDict, context: Context) -> RecordDict | None:
    """Return a worker's answer, or None if none starts.

    A worker that ends in the middle is replaced once: a site answers the very same request again with the same answer.
    """
    context = Context(context.run_id, context.node_id, context.node_config, RecordDict(), context.run_config)
    request = [kind.encode(), recorddict_to_proto(content).SerializeToString()]
    request.append(context_to_proto(context).SerializeToString())
    for _ in range(2):
        connection = connected(path, policy.warm_minutes)
        if connection is None:
            return None
        with connection, suppress(ConnectionError):
            send(connection, request)
            logged, answer = receive(connection, 2)
            for level, text in json.loads(logged):
                LOG.log(level, "%s", text)
            return recorddict_from_proto(ProtoRecordDict.FromString(answer))
    LOG.error("The site's worker ended twice while it answered. %s has its last words.", log_path(path))
    failure = ConfigRecord({"code": "internal", "number": policy.partition_id})
    return RecordDict({"error": failure})


def log_path(path: Path) -> Path:
    """Return where a worker's own output goes; what it logs about a message goes to Flower's log instead."""
    return path.with_suffix(".log")


def connected(path: Path, idle_minutes: float) -> socket.socket | None:
    """Return a connection to the worker at a path, which is started if it does not run; None if it can't be."""
    connection = _connect(path)
    if connection is not None:
        return connection
    module, parent = "gradveil.engines.warm_worker", os.getppid()
    command = [sys.executable, "-P", "-m", module, str(path), str(parent), str(idle_minutes)]
    with os.fdopen(_open_log(path), "wb") as log:
        worker = subprocess.Popen(  # noqa: S603 - this Python, and arguments of the site's own policy
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    STARTED.append(worker)
    until = time.monotonic() + STARTING
    while time.monotonic() < until:
        ended = worker.poll() is not None  # before the attempt: another process may have started one at the same time
        connection = _connect(path)
        if connection is not None:
            return connection
        if ended:
            break
        time.sleep(0.02)
    LOG.warning("The site's worker did not start, so that this process answers. %s says why.", log_path(path))
    return None


def _open_log(path: Path) -> int:
    """Return the descriptor of an empty file for a worker's output, which others can't read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(log_path(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.fspath(path))
    except OSError:
        connection.close()
        return None
    return connection
