"""Run a secure training over Flower on this machine, kill a node with SIGKILL in the middle of a round, and restart it.

Starts a SuperLink and three SuperNodes on loopback, each in its own process. The first run has no faults, and its model
is compared with the simulation's. In the second run, node 1 is killed two seconds after the first round was saved, and
restarted at once; node 2 is killed two seconds after the third round, and restarted after the fourth.
Run from the root of the repository: python benchmarks/flower_faults.py
"""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from gradveil.storage import load_tensors

SITES, PORT = 3, 8741
SETTINGS = {
    "dataset": "mnist-5k", "model": "lenet5", "defence": "prune", "clients": SITES, "aggregation": "secure",
    "sum-bits": 22, "sum-range": 1.0,
}  # fmt: skip
BIN = Path(sys.executable).parent


class Federation:
    """A SuperLink and its SuperNodes, each the head of a process group of its own."""

    def __init__(self, folder: Path, data_root: str) -> None:
        self.folder, self.data_root = folder, data_root
        self.env = os.environ | {
            "FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        (folder / "flwr").mkdir()
        config = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{PORT}"\ninsecure = true\n'
        (folder / "flwr" / "config.toml").write_text(config)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str]) -> None:
        """Start a process that writes to a log of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def start_link(self) -> None:
        """Start the SuperLink."""
        self.start(
            "link", ["flower-superlink", "--insecure", "--port", str(PORT), "--disable-runtime-dependency-installation"]
        )

    def start_node(self, number: int) -> None:
        """Start the node of a site that agrees to secure sums only."""
        config = (
            f"partition-id={number} private-folder='{self.folder / 'sites'}' data-root='{self.data_root}' "
            "defence='prune' aggregation='secure' repeatable=true"
        )
        self.start(f"node-{number}", [
            "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{PORT}", "--port", str(PORT + 10 + number),
            "--node-config", config,
        ])  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill a process and its children at once."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def run(self, out: Path, settings: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start a training into a folder."""
        given = {**SETTINGS, **settings, "out": str(out), "data-root": self.data_root}
        config = " ".join(f"{key}='{value}'" if isinstance(value, str) else f"{key}={value}" for key, value in
                          given.items())  # fmt: skip
        self.start(out.name, ["flwr", "run", "examples/flower", "here", "--stream", "-c", config])
        return self.processes[out.name]

    def end(self) -> None:
        """End everything that was started, by its id."""
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def federation(folder: Path, data_root: str) -> Iterator[Federation]:
    """Start a SuperLink and its nodes, and end them."""
    found = Federation(folder, data_root)
    try:
        found.start_link()
        time.sleep(10)
        for number in range(SITES):
            found.start_node(number)
        yield found
    finally:
        found.end()


def rows_of(out: Path) -> list[dict[str, object]]:
    """Return the rows that a run has written so far."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(run: subprocess.Popen[bytes], out: Path, rounds: int, limit: float) -> None:
    """Wait until a run has saved some rounds, or has ended."""
    until = time.monotonic() + limit
    while run.poll() is None and len(rows_of(out)) < rounds and time.monotonic() < until:
        time.sleep(0.2)


def kept(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the fields of rows that the document holds."""
    return [{key: row.get(key) for key in ("round", "clients", "dropped", "accuracy", "seconds")} for row in rows]


def simulated(folder: Path, data_root: str, rounds: int) -> Path:
    """Return the model of the same training by simulation."""
    options = [part for key, value in SETTINGS.items() for part in (f"--{key}", str(value))]
    command = [str(BIN / "gradveil"), "train", *options, "--rounds", str(rounds), "--out", str(folder / "simulated")]
    command += ["--data-root", data_root] if data_root else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "simulated" / "model.safetensors"


def same(one: Path, other: Path) -> bool:
    """Return whether two files hold the same tensors, bit for bit."""
    left, right = load_tensors(one), load_tensors(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def measured(folder: Path, data_root: str) -> dict[str, object]:
    """Play both runs and return what they gave."""
    with federation(folder, data_root) as nodes:
        started = time.monotonic()
        calm = nodes.run(folder / "calm", {"rounds": 2})
        wait_for(calm, folder / "calm", 99, 1200)
        calm_seconds = time.monotonic() - started
        started = time.monotonic()
        out = folder / "killed"
        faulty = nodes.run(out, {"rounds": 6, "min-clients": 2, "seed": 1})
        wait_for(faulty, out, 1, 600)
        time.sleep(2)
        nodes.kill("node-1")
        killed_at = time.monotonic() - started
        nodes.start_node(1)
        wait_for(faulty, out, 3, 900)
        time.sleep(2)
        nodes.kill("node-2")
        wait_for(faulty, out, 4, 900)
        nodes.start_node(2)
        wait_for(faulty, out, 99, 1800)
        killed_seconds = time.monotonic() - started
    model = folder / "calm" / "model.safetensors"
    return {
        "calm": {
            "rows": kept(rows_of(folder / "calm")), "seconds": round(calm_seconds, 1),
            "equals simulation": same(model, simulated(folder, data_root, 2)),
        },
        "killed": {
            "rows": kept(rows_of(out)), "seconds": round(killed_seconds, 1), "killed after": round(killed_at, 1),
            "finished": (out / "model.safetensors").exists(),
        },
    }  # fmt: skip


def main() -> None:
    """Measure and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/flower-faults.json"))
    parser.add_argument("--data-root", default="")
    parser.add_argument("--folder", type=Path, default=None, help="Keep logs and runs here.")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    document = {
        "command": "python benchmarks/flower_faults.py",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flwr": importlib.metadata.version("flwr"),
        "settings": SETTINGS,
        "seeds": [0, 1],
        "load": [round(each, 1) for each in os.getloadavg()],
        "runs": measured(folder, given.data_root),
    }
    given.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
