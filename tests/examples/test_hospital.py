"""The parts of examples/hospital: keys that TLS and Flower accept, policies that sites can read, commands that fit."""

import importlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from gradveil.config import make_train_settings
from gradveil.data import load_dataset
from gradveil.engines.site_policy import agree, read_policy

FOLDER = Path(__file__).parents[2] / "examples" / "hospital"


@pytest.fixture
def parts(monkeypatch):
    """Return the modules of the example."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found = importlib.import_module("keys"), importlib.import_module("run")
    yield found
    for module in found:
        sys.modules.pop(module.__name__)


def handshake(server, client, name):
    """Return the name that a TLS client has verified."""
    one, other = socket.socketpair()
    with one, other:
        thread = threading.Thread(target=lambda: server.wrap_socket(one, server_side=True).close())
        thread.start()
        try:
            with client.wrap_socket(other, server_hostname=name) as connection:
                return connection.getpeercert()["subject"]
        finally:
            other.close()
            thread.join(10)


def test_the_certificate_is_the_servers_and_of_the_authority(parts, tmp_path):
    keys, _ = parts
    keys.make_keys(tmp_path, ["localhost", "127.0.0.1"], 1)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=tmp_path / "ca.crt")
    server.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    for name in ("localhost", "127.0.0.1"):
        assert handshake(server, client, name)[0][0] == ("commonName", "localhost")


def test_node_keys_are_pairs_that_only_their_owner_can_read(parts, tmp_path):
    keys, _ = parts
    keys.make_keys(tmp_path / "keys", ["localhost"], 2)
    for number in range(2):
        secret = load_ssh_private_key((tmp_path / "keys" / f"node-{number}").read_bytes(), None)
        public = load_ssh_public_key((tmp_path / "keys" / f"node-{number}.pub").read_bytes())
        assert secret.public_key().public_numbers() == public.public_numbers()
        assert public.curve.name == "secp384r1"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()}
    assert {modes[name] for name in ("ca.key", "server.key", "node-0", "node-1")} == {0o600}


def test_each_site_has_its_own_images_policy_and_port(parts, tmp_path):
    _, run = parts
    run.deal("mnist-5k", tmp_path)
    sites = [load_dataset(str(tmp_path / f"site-{number}.npz")) for number in range(run.SITES)]
    seen = {image.tobytes() for site in sites for image in np.asarray(site.train.images)}
    assert len(seen) > 0.99 * sum(len(site.train) for site in sites)  # shared by none
    run.write_policies(tmp_path, "veil:mu=2,at=sum", "patches:filters=64", 20.0, "secure")
    settings = make_train_settings({
        "defence": "veil:mu=2,at=sum", "model": "patches:filters=64", "clients": 3, "momentum": 0.9, "lr": 0.05,
        "aggregation": "secure", "sum-bits": 22, "dataset": str(tmp_path / "test.npz"),
    })  # fmt: skip
    for number in range(run.SITES):
        policy = read_policy({"policy": str(tmp_path / f"site-{number}.toml")})
        assert (policy.partition_id, policy.max_epsilon) == (number, 20.0)
        assert agree(policy, settings).defence == "veil:mu=2,at=sum"
    commands = [run.node_command(tmp_path, 8000, number) for number in range(run.SITES)]
    assert len({command[command.index("--port") + 1] for command in commands}) == run.SITES
    assert "--insecure" not in [word for command in (*commands, run.server_command(tmp_path, 8000)) for word in command]


def test_the_recorded_run_is_that_of_the_page(parts):
    _, run = parts
    document = json.loads((FOLDER.parents[1] / "results" / "hospital.json").read_text())
    page = (FOLDER.parents[1] / "docs" / "deploy.md").read_text()
    facts = [run.table(document), document["date"], document["command"], document["machine"], document["defence"]]
    assert [text for text in (*facts, f"{document['seconds']} s") if text not in page] == []


def test_what_was_started_is_ended(parts, tmp_path):
    _, run = parts
    code = "import time; print('up', flush=True); time.sleep(60)"
    with run.started([sys.executable, "-c", code], tmp_path / "log", {}) as process:
        run.wait_for(tmp_path / "log", "up", process)
    assert process.returncode == -15
    ended = run.started([sys.executable, "-c", "print('up')"], tmp_path / "log", {})
    with pytest.raises(SystemExit, match="must contain 'never'"), ended as process:
        run.wait_for(tmp_path / "log", "never", process)
    assert subprocess.run([sys.executable, str(FOLDER / "run.py"), "--help"], check=True, capture_output=True).stdout


def free_port():
    """Return a port that is free together with those of the example's nodes above it."""
    for port in range(20000 + os.getpid() % 400 * 20, 30000, 20):
        try:
            for each in (port, *range(port + 10, port + 14)):
                with socket.socket() as found:
                    found.bind(("127.0.0.1", each))
        except OSError:
            continue
        return port
    raise AssertionError("No free port was found.")


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_whole_example_trains_with_tls_known_nodes_and_secure_sums(tmp_path):
    pytest.importorskip("flwr", reason="the example needs Flower: pip install 'gradveil[flower]'")
    out, options = tmp_path / "out", ["--rounds", "2", "--port", str(free_port()), "--wait", "900"]
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / "run.py"), *options, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=3600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, said
    assert "A node whose key is not registered was turned away." in said
    rows = read_lines(out / "run" / "rows.jsonl")
    assert [(row["round"], row["clients"]) for row in rows] == [(1, 3), (2, 3)]
    assert 'aggregation = "secure"' in (out / "run" / "settings.toml").read_text()
    for number in range(3):
        answered = read_lines(out / f"private-{number}" / f"history-{number}.jsonl")
        assert [line["round"] for line in answered if line["work"] == "train"] == [1, 2]
        assert 0 < answered[0]["total"] < answered[-1]["total"] <= 20
    models = {
        tuple(line["model"] for line in read_lines(out / f"private-{n}" / f"broadcasts-{n}.jsonl")) for n in range(3)
    }
    assert len(models) == 1  # all sites received the same
