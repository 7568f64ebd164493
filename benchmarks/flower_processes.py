"""Real federations on loopback whose processes are killed, and whose bytes are searched.

Every part starts a SuperLink and SuperNodes (`gradveil.engines.quick_node`) as processes of this machine, and ends them
by their ids. Figures are added to those in --out. Run from the root of the repository:

    python benchmarks/flower_processes.py server bytes nodes fuzz

``nodes`` kills nodes in each step of a secure sum, ``server`` kills the server (benchmarks/flower_kills.py), ``bytes``
searches traffic, files and memory (benchmarks/flower_bytes.py), ``fuzz`` lets nodes send broken answers
(benchmarks/flower_fuzz.py).
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
NODE = [sys.executable, "-m", "gradveil.engines.quick_node"]
PARTS = {"server": "flower_kills", "bytes": "flower_bytes", "nodes": "flower_kills", "fuzz": "flower_fuzz"}
FAILURES = 900.0
"""Seconds after which something that should have happened counts as failed."""


class Processes:
    """A SuperLink, its SuperNodes and runs, each the head of a tree of processes.

    Args:
        folder: for everything that they write.
        port: of the SuperLink; nodes use those from ten above it.
        by_way_of: port to which nodes and runs connect, if it is not the SuperLink's.
    """

    def __init__(self, folder: Path, port: int, by_way_of: int = 0) -> None:
        self.folder, self.port, self.way = folder, port, by_way_of or port
        home = folder / "flwr"
        home.mkdir(parents=True)
        address = f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}')
        self.env = os.environ | {
            "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str]) -> None:
        """Start a process that writes to a log of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start_link(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        before = self.log("link").count("Uvicorn running")
        state = ["--database", str(self.folder / "state.db"), "--disable-runtime-dependency-installation"]
        self.start("link", ["flower-superlink", "--insecure", "--port", str(self.port), *state])
        until("the SuperLink listens", lambda: self.log("link").count("Uvicorn running") > before)

    def start_node(self, number: int, policy: str) -> None:
        """Start a site's node with its policy, in the form of a node config; $NUMBER in it is the site's number."""
        policy = policy.replace("$NUMBER", str(number))
        config = f"partition-id={number} private-folder='{self.folder}/site-{number}' {policy}"
        place = ["--insecure", "--superlink", f"127.0.0.1:{self.way}", "--port", str(self.port + 10 + number)]
        self.start(f"node-{number}", [*NODE, *place, "--node-config", config])

    def run(self, app: Path, out: Path, settings: Mapping[str, object]) -> subprocess.Popen[bytes]:
        """Start a training into a folder."""
        given = {**settings, "out": str(out)}
        config = " ".join(f"{key}='{value}'" if isinstance(value, str) else f"{key}={value}" for key, value in
                          given.items())  # fmt: skip
        self.start(f"run-{out.name}", ["flwr", "run", str(app), "here", "--stream", "-c", config])
        return self.running[f"run-{out.name}"]

    def log(self, name: str) -> str:
        """Return what a process has written."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def of_link(self, command: str) -> list[int]:
        """Return the ids of the SuperLink's descendants whose command line has a text."""
        return [pid for pid in tree_of(self.running["link"].pid) if command in command_line(pid)]

    def kill(self, name: str) -> None:
        """Kill a process and its children at once (SIGKILL)."""
        for pid in tree_of(self.running[name].pid):
            kill(pid)
        self.running[name].wait()

    def end(self) -> None:
        """End everything that was started."""
        trees = [pid for process in self.running.values() for pid in tree_of(process.pid)]
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        time.sleep(3)
        for pid in trees:
            kill(pid)


@contextmanager
def federation(folder: Path, port: int, sites: int, policy: str, by_way_of: int = 0) -> Iterator[Processes]:
    """Start a SuperLink and nodes with one policy; end them after the ``with`` block."""
    found = Processes(folder, port, by_way_of)
    try:
        found.start_link()
        for number in range(sites):
            found.start_node(number, policy)
        yield found
    finally:
        found.end()


def kill(pid: int) -> None:
    """Kill a process (SIGKILL) that may have ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def tree_of(head: int) -> list[int]:
    """Return the ids of a process that was started here and of all that descend from it."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [head]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


def command_line(pid: int) -> str:
    """Return a process's command, or "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def until(what: str, happened: Callable[..., bool], *arguments: Any) -> None:  # noqa: ANN401 - of any function
    """Wait until a function of some arguments is true. Raise if it takes too long."""
    end = time.monotonic() + FAILURES
    while not happened(*arguments):
        if time.monotonic() > end:
            raise SystemExit(f"It must happen within {FAILURES:g} seconds that {what}, got nothing.")
        time.sleep(0.02)


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Return the rows that a run has written so far."""
    path = out / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_rows(out: Path, count: int, run: "subprocess.Popen[bytes] | None" = None) -> bool:
    """Return whether a run has written some rows, or has ended."""
    return len(rows_of(out)) >= count or (run is not None and run.poll() is not None)


def table(document: Mapping[str, Any], part: str) -> str:
    """Return the figures of one part as a table of Markdown."""
    return importlib.import_module(PARTS[part]).TABLES[part](document["figures"][part])


def main() -> None:
    """Play some parts, and write their figures as JSON as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("results/flower-processes.json"))
    parser.add_argument("--folder", type=Path, default=None, help="keep logs and runs here")
    parser.add_argument("--most", type=int, default=0, help="kills of nodes, 0 is 20; broken answers, 0 is 1,000")
    given = parser.parse_args()
    document = json.loads(given.out.read_text()) if given.out.exists() else {"commands": {}, "figures": {}}
    for part in given.parts:
        more = f" --most {given.most}" if given.most else ""
        document["commands"][part] = f"python benchmarks/flower_processes.py {part}{more}"

        def save(figures: Any, part: str = part) -> None:  # noqa: ANN401 - of any part
            document["figures"][part] = figures
            document.update({
                "date": datetime.now(UTC).date().isoformat(), "seeds": [0], "python": platform.python_version(),
                "flwr": importlib.metadata.version("flwr"), "torch": importlib.metadata.version("torch"),
                "load": {**document.get("load", {}), part: round(os.getloadavg()[0], 1)},
            })  # fmt: skip
            given.out.write_text(json.dumps(document, indent=1) + "\n")

        folder = (given.folder or Path(tempfile.mkdtemp(prefix="fp"))) / part
        importlib.import_module(PARTS[part]).PLAY[part](folder, save, given.most)


if __name__ == "__main__":
    main()
