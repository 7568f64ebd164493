"""How long a round over Flower takes on loopback, with gradveil and with a bare Flower app, at the same nodes.

A SuperLink and two SuperNodes run here. The bare app and gradveil train LeNet-5 on mnist-5k in turn, over the same
nodes. Both train for one epoch on 2,000 images per site. First with Flower's own SuperNodes, then with those of
`gradveil.engines.quick_node`. The first round of each run, which starts processes, is left out.

    python benchmarks/flower_rounds.py --out results/flower-rounds.json
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CLIENTS, ROUNDS, REPEATS, DEFENCE = 2, 5, 1, "prune"
NODES = {"flower-supernode": ["flower-supernode"], "quick_node": [sys.executable, "-m", "gradveil.engines.quick_node"]}
PORT = 8790


def environment(home: Path) -> dict[str, str]:
    """Return an environment in which Flower reports nothing and each process has one thread."""
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "loop"\n[superlink.loop]\naddress = "127.0.0.1:{PORT}"\ninsecure = true\n'
    )
    return os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip


@contextmanager
def federation(folder: Path, node: list[str], env: dict[str, str]) -> Iterator[None]:
    """Run a SuperLink and the SuperNodes within the ``with`` block."""
    server = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(PORT)]
    commands = [[*server, "--database", str(folder / "state.db")]]
    for number in range(CLIENTS):
        config = f"partition-id={number} private-folder='{folder}/site-{number}' defence='{DEFENCE}' repeatable=true"
        where = ["--insecure", "--superlink", f"127.0.0.1:{PORT}", "--port", str(PORT + 10 + number)]
        commands.append([*node, *where, "--node-config", config])
    processes = []
    try:
        for number, command in enumerate(commands):
            log = (folder / f"log-{number}").open("wb")
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            while number == 0 and "Uvicorn running" not in (folder / "log-0").read_text(errors="replace"):
                time.sleep(0.2)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def run(app: Path, config: str, env: dict[str, str]) -> None:
    """Run an app to its end."""
    command = ["flwr", "run", str(app), "loop", "--stream", "-c", config]
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


def one_run(kind: str, folder: Path, data: Path, env: dict[str, str], seed: int) -> list[dict[str, float]]:
    """Return the seconds of each round of one run."""
    out = folder / f"{kind}-{seed}"
    if kind == "bare":
        run(HERE / "bare_flower", f"out='{out}' data='{data}' clients={CLIENTS} rounds={ROUNDS}", env)
        return [json.loads(line) for line in out.read_text().splitlines()]
    settings = f"out='{out}' defence='{DEFENCE}' clients={CLIENTS} rounds={ROUNDS} seed={seed}"
    run(HERE.parent / "examples" / "flower", settings, env)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return [{"round": row["round"], "seconds": row["seconds"]} for row in rows]


def measure(save: Callable[[list[dict[str, Any]]], None]) -> None:
    """Save one entry per kind of node, as soon as it is measured: seconds of all steady rounds of both apps."""
    from gradveil.data import load_dataset

    digits, found = load_dataset("mnist-5k"), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="fr") as name:
        data = Path(name) / "digits.npz"
        np.savez(data, x_train=digits.train.images[:4000], y_train=digits.train.labels[:4000])
        for kind, command in NODES.items():
            folder = Path(name) / kind[:1]
            (folder / "home").mkdir(parents=True)
            env = environment(folder / "home")
            seconds: dict[str, list[float]] = {"bare": [], "gradveil": [], "training": []}
            with federation(folder, command, env):
                for seed in range(REPEATS):
                    for app in ("bare", "gradveil"):
                        rounds = one_run(app, folder, data, env, seed)
                        if len(rounds) != ROUNDS:
                            raise SystemExit(f"{app} must play {ROUNDS} rounds, got {len(rounds)}. See {folder}.")
                        rounds = rounds[1:]
                        seconds[app] += [each["seconds"] for each in rounds]
                        seconds["training"] += [each["training"] for each in rounds if "training" in each]
                        print(kind, app, [round(each["seconds"], 2) for each in rounds], flush=True)
            found.append({"node": kind, **{key: [round(v, 3) for v in values] for key, values in seconds.items()}})
            save(found)
            shutil.rmtree(folder)


def summary(entry: dict[str, Any]) -> dict[str, float]:
    """Return medians of one kind of node, and what a round costs beside the training."""
    bare, ours, training = (median(entry[key]) for key in ("bare", "gradveil", "training"))
    return {
        "median_bare": bare, "median_gradveil": ours, "median_training": training,
        "bare_beside": bare - training, "gradveil_beside": ours - training, "ratio": ours / bare,
    }  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """Return the medians as a table."""
    lines = [
        "| SuperNodes | bare Flower app | gradveil | training alone, in the bare app | gradveil beside that |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        bare, ours, training = (row[f"median_{key}"] for key in ("bare", "gradveil", "training"))
        beside = row["gradveil_beside"]
        lines.append(f"| `{row['node']}` | {bare:.1f} s | {ours:.1f} s | {training:.1f} s | {beside:.1f} s |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    load = os.getloadavg()[0]

    def save(found: list[dict[str, Any]]) -> None:
        result = {
            "command": "python benchmarks/flower_rounds.py --out results/flower-rounds.json",
            "date": datetime.now(UTC).date().isoformat(),
            "seeds": list(range(REPEATS)),
            "versions": {name: version(name) for name in ("flwr", "torch")} | {"python": platform.python_version()},
            "machine": f"{os.cpu_count()} cores, load {load:.1f} before and {os.getloadavg()[0]:.1f} after, niceness "
            f"{os.nice(0)}",
            "rounds_per_run": ROUNDS,
            "rows": [{**entry, **summary(entry)} for entry in found],
        }
        out.write_text(json.dumps(result, indent=1) + "\n")

    measure(save)


if __name__ == "__main__":
    main()
