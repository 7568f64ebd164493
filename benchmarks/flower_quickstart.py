"""Run examples/flower-quickstart with real processes: SuperLink and SuperNodes on loopback, or Flower's simulation.

``loopback`` starts a SuperLink and two SuperNodes; ``simulation`` starts a SuperLink that simulates 100 SuperNodes with
Ray (``pip install 'flwr[simulation]'``). Each runs the app as it stands, and once more without the line that protects.
Figures are added to those in --out. Everything that was started is ended. Run from the root of the repository:
python benchmarks/flower_quickstart.py loopback simulation
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

APP = Path("examples/flower-quickstart")
TOOLS = Path(sys.executable).parent
LINE = re.compile(r"ClientApp\(mods=\[.*\]\)")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "loopback": {"nodes": 2, "config": "num-server-rounds=3"},
    "simulation": {
        "nodes": 100,
        "config": "num-server-rounds=10 fraction-train=0.1 min-nodes=10 batch-size=8 local-epochs=2",
    },
}
PORT = 8731


@contextmanager
def started(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a process, and end it with all of its children."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, kind)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


@contextmanager
def federation(way: str, folder: Path, environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Start a federation, and yield the further arguments of ``flwr run``."""
    link = [str(TOOLS / "flower-superlink"), "--insecure", "--port", str(PORT)]
    link += ["--disable-runtime-dependency-installation", *["--simulation"] * (way == "simulation")]
    with started(link, folder / "superlink.log", environment):
        time.sleep(6)
        if way == "simulation":
            options = f"num-supernodes={WAYS[way]['nodes']} client-resources-num-cpus=1 client-resources-num-gpus=0.0"
            yield ["--federation-config", options]
            return
        nodes = []
        for number in range(2):
            place = ["--superlink", f"127.0.0.1:{PORT}", "--port", str(PORT + 1 + number)]
            config = f"partition-id={number} num-partitions=2"
            nodes.append([str(TOOLS / "flower-supernode"), "--insecure", *place, "--node-config", config])
        with (
            started(nodes[0], folder / "node-0.log", environment),
            started(nodes[1], folder / "node-1.log", environment),
        ):
            yield []


def run(way: str, *, protected: bool) -> dict[str, Any]:
    """Run the app once, and return accuracy and times."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        app = shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        if not protected:
            file = app / "quickstart" / "client_app.py"
            text, changed = LINE.subn("ClientApp()", file.read_text())
            file.write_text(text if changed == 1 else sys.exit(f"{file} must have one line that protects."))
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(f'[superlink.here]\naddress = "127.0.0.1:{PORT}"\ninsecure = true\n')
        environment = os.environ | {
            "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        config = f"{WAYS[way]['config']} tap='{folder / 'tapped'}' save='{folder / 'accuracy.json'}'"
        with federation(way, folder, environment) as more:
            command = [str(TOOLS / "flwr"), "run", str(app), "here", "--stream", "-c", config, *more]
            begun = time.perf_counter()
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            seconds = time.perf_counter() - begun
        told = re.search(r"finished in ([\d.]+)s", ended.stdout + ended.stderr)
        if told is None or not (folder / "accuracy.json").exists():
            logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
            sys.exit(f"The run failed.\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}\n{logs}")
        accuracy = list(json.loads((folder / "accuracy.json").read_text()).values())
        failures = [int(count) for count in re.findall(r"and (\d+) failures", ended.stdout + ended.stderr)]
        return {
            "accuracy": accuracy,
            "round_seconds": round(float(told[1]) / (len(accuracy) - 1), 1),
            "wall_seconds": round(seconds, 1),
            "failures": sum(failures),
            "updates_tapped": len(list((folder / "tapped").rglob("*.toml"))),
        }


def table(document: Mapping[str, Any]) -> str:
    """Return the figures as a table of Markdown."""
    lines = [
        "| federation | mod | accuracy after the last round | seconds per round | updates tapped |",
        "|" + "---|" * 5,
    ]
    for way, runs in document["figures"].items():
        for name, found in runs.items():
            nodes = f"{way}, {WAYS[way]['nodes']} nodes"
            cells = (f"{found['accuracy'][-1]:.1%}", f"{found['round_seconds']:.1f}", str(found["updates_tapped"]))
            lines.append(f"| {nodes} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="+", choices=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("results/flower-quickstart.json"))
    given = parser.parse_args()
    figures = json.loads(given.out.read_text())["figures"] if given.out.exists() else {}
    mod = LINE.search((APP / "quickstart" / "client_app.py").read_text())
    name = re.findall(r'"(.*)"', mod[0])[0] if mod else ""
    for way in given.ways:
        figures[way] = {name: run(way, protected=True), "none": run(way, protected=False)}
        document = {
            "command": "python benchmarks/flower_quickstart.py loopback simulation",
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "flwr", "ray")},
            "seeds": "none: initial weights and noise are drawn anew in each run",
            "figures": figures,
        }
        given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
