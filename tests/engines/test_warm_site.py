"""A site's warm worker: the same answers, without torch in Flower's process; private, replaceable, and gone in time."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Context, RecordDict

from gradveil.data import load_dataset
from gradveil.engines import warm_site
from gradveil.engines.flower import flower_training
from gradveil.engines.flower_site import LOG
from gradveil.engines.warm_wire import LONGEST_PATH, receive, send, socket_path, usable
from gradveil.engines.warm_worker import end_with, listening_at, serve
from tests.engines.test_flower import LocalGrid, _a_task, play, settings  # noqa: F401 - fixtures


@pytest.fixture
def short(tmp_path_factory):
    """Return a folder whose path is short enough for a socket."""
    folder = tmp_path_factory.mktemp("w")
    assert usable(folder / "keys" / "worker-0.sock")
    return folder


def test_flowers_process_does_not_import_torch():
    code = "import sys, gradveil.engines.warm_site; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_gives_the_same_answers_and_is_used_again(settings, short):  # noqa: F811 - a fixture
    run = replace(settings, defence="prune", clients=1, rounds=2)
    plain = LocalGrid(run, short / "plain")
    wanted = play(flower_training(plain, run, load_dataset(run.dataset)))
    warm = LocalGrid(run, short / "keys")
    warm.app = warm_site.client_app()
    assert str(play(flower_training(warm, run, load_dataset(run.dataset)))) == str(wanted)
    path = socket_path(str(short / "keys"), 0)
    assert path.stat().st_mode & 0o777 == 0o600
    with warm_site.connected(path, 1.0) as connection:
        worker = peer(connection)
    os.kill(worker, 9)
    time.sleep(0.2)  # its socket is still there, but nobody listens
    run = replace(run, seed=1)
    again = LocalGrid(run, short / "keys")
    again.app = warm_site.client_app()
    play(flower_training(again, run, load_dataset(run.dataset)))
    with warm_site.connected(path, 1.0) as connection:
        assert peer(connection) != worker
        os.kill(peer(connection), 9)
    assert [worker.wait() for worker in warm_site.STARTED] == [-9, -9]


def peer(connection):
    """Return the process at the other end of a connection."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(raw[:4], sys.byteorder)


def answer_slowly(kind, content, context):
    LOG.warning("asked to %s by run %s", kind, context.run_id)
    return RecordDict({"facts": ConfigRecord({"kind": kind})})


@pytest.fixture
def worker(short):
    """Return the path of a worker in this process that ends after a second without messages."""
    path = short / "worker-0.sock"
    with listening_at(path) as listening:
        thread = threading.Thread(target=serve, args=(listening, 1.0, answer_slowly))
        thread.start()
        yield path
        thread.join(5)
        assert not thread.is_alive()
    assert not path.exists()


def test_logs_travel_with_the_answer(worker, caplog):
    context = Context(7, 1, {}, RecordDict(), {})
    policy = warm_site.read_policy({"partition-id": 0, "private-folder": str(worker.parent)})
    LOG.propagate, before = True, LOG.propagate
    answer = warm_site._worked(policy, worker, "train", RecordDict({}), context)
    LOG.propagate = before
    assert answer["facts"]["kind"] == "train"
    assert "asked to train by run 7" in caplog.text


def test_a_broken_connection_does_not_end_the_worker(worker):
    for pieces in ([], [b"train"]):
        with warm_site.connected(worker, 1.0) as connection:
            send(connection, pieces)
    with listening_at(worker) as second:
        assert second is None  # one worker per client
    with warm_site.connected(worker, 1.0) as connection:
        send(connection, [b"query", b"", b""])
        assert len(receive(connection, 2)) == 2


def test_a_path_that_is_too_long_has_no_worker(tmp_path):
    path = tmp_path / ("long" * 30) / "worker-0.sock"
    assert not usable(path)
    policy = warm_site.SitePolicy(partition_id=0, private_folder=str(path.parent))
    assert not warm_site._wants_worker(policy, path)
    short = path.with_name("w")
    assert len(str(short)) > LONGEST_PATH
    assert not warm_site._wants_worker(replace(policy, warm_minutes=0.0), short)


def test_a_worker_ends_with_the_process_that_it_belongs_to():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as node:
        code = (
            f"from {end_with.__module__} import end_with; end_with({node.pid}, 0.05); print('up', flush=True); input()"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            assert worker.stdout.readline() == b"up\n"
            assert worker.poll() is None
            node.kill()
            node.wait()
            assert worker.wait(20) == 0
