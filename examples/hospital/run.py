"""Three hospitals train together on this machine: TLS, known nodes only, secure sums, differential privacy by `veil`.

    python examples/hospital/run.py                                # digits
    python examples/hospital/run.py --data pneumoniamnist.npz      # chest X-rays (x_train, y_train, x_test, y_test)

It makes keys and certificates, deals the images to three sites, and starts a SuperLink and three SuperNodes on
loopback. A fourth node, whose key nobody registered, is turned away. The sites then train, compare what they received,
and show what each has answered and what that cost. Everything that was started is ended. docs/deploy.md explains each
step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from keys import make_keys

HERE = Path(__file__).resolve().parent
SITES = 3
NODE = [sys.executable, "-m", "gradveil.engines.quick_node"]
"""Flower's SuperNode with shorter pauses; `flower-supernode` does as well."""


def deal(data: str, folder: Path) -> None:
    """Write site-0.npz to site-2.npz, each with its own images, and test.npz for the server."""
    from gradveil.data import load_dataset

    found = load_dataset(data)
    order = np.random.default_rng(0).permutation(len(found.train))
    tests = {"x_test": found.test.images, "y_test": found.test.labels}
    for number in range(SITES):
        mine = order[number::SITES][:1000]
        parts = {"x_train": found.train.images[mine], "y_train": found.train.labels[mine]}
        np.savez(folder / f"site-{number}.npz", **parts, **{key: value[:50] for key, value in tests.items()})
    np.savez(folder / "test.npz", x_train=found.train.images[:1], y_train=found.train.labels[:1], **tests)


def environment(folder: Path, port: int) -> dict[str, str]:
    """Return an environment in which Flower keeps its files here and reports nothing to anyone."""
    home = folder / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "hospital"\n[superlink.hospital]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder}/keys/ca.crt"\n'
    )
    return os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip


def server_command(folder: Path, port: int) -> list[str]:
    """Return the command of the SuperLink: with TLS, and for registered nodes only."""
    keys = folder / "keys"
    return [
        "flower-superlink", "--port", str(port), "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile",
        str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth",
        "--disable-runtime-dependency-installation", "--database", str(folder / "superlink.db"),
    ]  # fmt: skip


def node_command(folder: Path, port: int, number: int) -> list[str]:
    """Return the command of one site's SuperNode; its policy is a file of the site."""
    keys = folder / "keys"
    return [
        *NODE, "--superlink", f"127.0.0.1:{port}", "--root-certificates", str(keys / "ca.crt"),
        "--auth-supernode-private-key", str(keys / f"node-{number}"), "--port", str(port + 10 + number),
        "--max-retries", "20", "--node-config", f"policy='{folder}/site-{number}.toml'",
    ]  # fmt: skip


def write_policies(folder: Path, defence: str, model: str, epsilon: float, aggregation: str) -> None:
    """Write what each site agrees to."""
    agreed = f'aggregation = "{aggregation}"\n' if aggregation == "secure" else ""
    for number in range(SITES):
        (folder / f"site-{number}.toml").write_text(
            f'partition-id = {number}\nprivate-folder = "{folder}/private-{number}"\n'
            f'data = "{folder}/site-{number}.npz"\ndefence = "{defence}"\nmodel = "{model}"\n'
            f'sensitive = "none"\nmax-epsilon = {epsilon}\n{agreed}'
        )


@contextmanager
def started(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process within the ``with`` block; at the end it is told to end, and killed if it does not."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)  # noqa: S603 - our own command
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Wait until a process has written a text. Raise if it ends or takes too long."""
    until = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{log} must contain {text!r}, got:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def call(command: list[str], env: dict[str, str]) -> str:
    """Run a command to its end and return what it printed. Raise if it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def turn_away(folder: Path, port: int, env: dict[str, str], seconds: float) -> None:
    """Start a node whose key is not registered. Raise unless the SuperLink refuses it (Flower's exit code 305)."""
    make_keys(folder / "stranger", ["stranger"], 1)
    command = node_command(folder, port, SITES)
    command[command.index(str(folder / "keys" / f"node-{SITES}"))] = str(folder / "stranger" / "node-0")
    with started(command, folder / "stranger.log", env) as stranger:
        stranger.wait(seconds)
    if "Exit Code: 305" not in (folder / "stranger.log").read_text(errors="replace"):
        raise SystemExit(f"An unregistered node must be turned away, got the opposite. See {folder}/stranger.log.")
    print("A node whose key is not registered was turned away.", flush=True)


def federation(given: argparse.Namespace, folder: Path) -> None:
    """Play the whole example in a folder."""
    start, port, env = time.monotonic(), given.port, environment(folder, given.port)
    make_keys(folder / "keys", ["localhost", "127.0.0.1"], SITES)
    deal(given.data, folder)
    write_policies(folder, given.defence, given.model, given.epsilon, given.aggregation)
    with started(server_command(folder, port), folder / "superlink.log", env) as server:
        wait_for(folder / "superlink.log", "Uvicorn running", server, given.wait)
        for number in range(SITES):
            call(["flwr", "supernode", "register", str(folder / "keys" / f"node-{number}.pub"), "hospital"], env)
        turn_away(folder, port, env, given.wait)
        nodes = [started(node_command(folder, port, n), folder / f"node-{n}.log", env) for n in range(SITES)]
        with nodes[0] as one, nodes[1] as two, nodes[2] as three:
            for number, node in enumerate((one, two, three)):
                wait_for(folder / f"node-{number}.log", "SuperNode ID", node, given.wait)
            out, app, bits = folder / "run", str(HERE.parent / "flower"), 22 if given.aggregation == "secure" else 0
            settings = (
                f"defence='{given.defence}' model='{given.model}' dataset='{folder}/test.npz' clients={SITES} "
                f"rounds={given.rounds} aggregation='{given.aggregation}' sum-bits={bits} out='{out}'"
            )
            call(["flwr", "run", app, "hospital", "--stream", "-c", settings], env)
    show(folder, env)
    if given.record is not None:
        record(given, folder, time.monotonic() - start)


def record(given: argparse.Namespace, folder: Path, seconds: float) -> None:
    """Write what was run and what came of it, for the documentation."""
    rows = [json.loads(line) for line in (folder / "run" / "rows.jsonl").read_text().splitlines()]
    history = [json.loads(line) for line in (folder / "private-0" / "history-0.jsonl").read_text().splitlines()]
    result = {
        "command": f"python examples/hospital/run.py --data {Path(given.data).name} --rounds {given.rounds}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seeds": [0],
        "versions": {name: version(name) for name in ("flwr", "torch")},
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.0f}",
        "defence": given.defence,
        "model": given.model,
        "aggregation": given.aggregation,
        "seconds": round(seconds),
        "rounds": [{key: round(row[key], 4) for key in ("round", "accuracy", "seconds")} for row in rows],
        "epsilon": [round(line["total"], 3) for line in history],
    }
    given.record.write_text(json.dumps(result, indent=1) + "\n")


def table(document: dict[str, Any]) -> str:
    """Return a record as the table of docs/deploy.md."""
    lines = ["| round | accuracy | seconds | ε of site 0 so far |", "|---|---|---|---|"]
    for row, epsilon in zip(document["rounds"], document["epsilon"], strict=True):
        lines.append(f"| {row['round']} | {100 * row['accuracy']:.1f} % | {row['seconds']:.0f} | {epsilon:.2f} |")
    return "\n".join(lines)


def show(folder: Path, env: dict[str, str]) -> None:
    """Print the accuracy, whether all sites got the same models, and what the first site has answered."""
    rows = folder / "run" / "rows.jsonl"
    if not rows.exists():
        raise SystemExit(f"The run must write {rows}, got none. The logs in {folder} say why.")
    for row in map(json.loads, rows.read_text().splitlines()):
        print(f"round {row['round']}: accuracy {row['accuracy']:.3f}, {row['seconds']:.1f} s")
    files = [str(folder / f"private-{number}" / f"broadcasts-{number}.jsonl") for number in range(SITES)]
    gradveil = [sys.executable, "-m", "gradveil"]
    print(call([*gradveil, "compare", *files], env).strip())
    print("Site 0 has answered:")
    print(call([*gradveil, "ledger", str(folder / "private-0" / "history-0.jsonl")], env).strip())


def main() -> None:
    """Read the command line and play the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist-5k", help="an .npz file of images, or a named data set")
    parser.add_argument("--defence", default="veil:mu=2,at=sum")
    parser.add_argument("--model", default="patches:filters=64")
    parser.add_argument("--aggregation", default="secure", choices=["none", "secure"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=20.0, help="what each site agrees to spend in all runs")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait", type=float, default=120, help="seconds within which each process must have started")
    parser.add_argument("--out", type=Path, help="keep all files here (a new folder)")
    parser.add_argument("--record", type=Path, help="write a summary as JSON")
    given = parser.parse_args()
    if given.out is not None:
        given.out.mkdir(mode=0o700, parents=True)
        federation(given, given.out.resolve())
        return
    with tempfile.TemporaryDirectory(prefix="hospital") as folder:
        federation(given, Path(folder))


if __name__ == "__main__":
    main()
