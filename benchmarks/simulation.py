"""Compare gradveil, a plain sequential loop and Flower's simulation on the same work: seconds per round, in one run.

LeNet-5 on MNIST, 100 clients of 200 images, 10 sampled per round, batch 32, 1 epoch, SGD with learning rate 0.01, no
evaluation. Each contender runs in its own process, and the contenders take turns, so that other load on the machine
affects all of them alike. The report has the median of the steady rounds (2 to the last) over all repeats; the start-up
time, from loaded data and libraries to the end of round 1, minus a steady round; and the time of the whole process.

    python benchmarks/simulation.py [--data-root DIR] [--repeats 3] [--rounds 10] [--only gradveil,loop]

Without MNIST in the data root, the 4,000 training images of mnist-5k are used several times; the work is the same.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workload import BATCH, CLIENTS, IMAGES, LR, SAMPLED, load

CONTENDERS = ("gradveil", "gradveil-in-process", "loop", "flower")


def run_gradveil(rounds: int, workers: int | None) -> list[float]:
    """Return the time when data and libraries were loaded, and the time when each round ended."""
    from gradveil import Simulation, TrainSettings

    settings = TrainSettings(
        clients=CLIENTS, sampled=SAMPLED, rounds=rounds, batch_size=BATCH, lr=LR, momentum=0.0, eval_every=rounds + 1
    )
    data = load()
    ends = [time.time()]
    with Simulation(settings, dataset=data, workers=workers) as simulation:
        for number in range(1, rounds):  # the last round would be evaluated
            simulation.step(number)
            ends.append(time.time())
    return ends


def run_loop(rounds: int) -> list[float]:
    """Run a plain loop on one core, one client after the other; return times as `run_gradveil` does."""
    import torch
    from torch import nn

    from gradveil.data.pixels import to_unit
    from gradveil.models import Normalisation, create_model

    torch.set_num_threads(1)
    data = load()
    ends = [time.time()]
    normalise = Normalisation(data.mean, data.std)
    images = normalise(to_unit(data.train.images))
    labels = torch.from_numpy(data.train.labels)
    parts = torch.randperm(len(labels)).split(IMAGES)
    model = create_model("lenet5", data.shape, 10, seed=0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(1, rounds):
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for client in torch.randperm(CLIENTS)[:SAMPLED].tolist():
            model.load_state_dict(weights)
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for indices in parts[client][torch.randperm(IMAGES)].split(BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
                optimiser.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / SAMPLED
        weights = total
        ends.append(time.time())
    return ends


def one(name: str, rounds: int) -> None:
    """Run a contender in this process; print the times when its rounds ended as JSON on the last line."""
    if name == "loop":
        ends = run_loop(rounds)
    elif name == "flower":
        from flower_app import run_flower

        ends = run_flower(rounds - 1)
    else:
        ends = run_gradveil(rounds, 0 if name == "gradveil-in-process" else None)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"ends": ends, "peak_mib": peak // 1024}))


def main() -> None:
    """Run the contenders in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.rounds + 1)
        return
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    quiet |= {"PYTHONPATH": str(Path(__file__).parent), "BENCH_DATA": options.data_root or ""}
    quiet |= {"RAY_DEDUP_LOGS": "0", "FLWR_HOME": tempfile.mkdtemp(), "GRADVEIL_OFFLINE": "1"}
    names = options.only.split(",")
    steady: dict[str, list[float]] = {name: [] for name in names}
    start: dict[str, list[float]] = {name: [] for name in names}
    whole: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, int] = dict.fromkeys(names, 0)
    for repeat in range(options.repeats):
        for name in names:
            command = [sys.executable, __file__, "--one", name, "--rounds", str(options.rounds)]
            started = time.time()
            result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **quiet}, check=False)
            if result.returncode:
                sys.exit(f"{name} failed:\n{result.stderr[-3000:]}")
            report = json.loads(result.stdout.strip().splitlines()[-1])
            ready, *ends = report["ends"]
            steady[name].append(statistics.median(b - a for a, b in itertools.pairwise(ends)))
            start[name].append(ends[0] - ready - steady[name][-1])
            whole[name].append(ends[-1] - started)
            peaks[name] = max(peaks[name], report["peak_mib"])
            print(f"repeat {repeat + 1}, {name}: {steady[name][-1]:.3f} s per round", file=sys.stderr)
    print("| engine | s/round (median; range) | speed-up over the loop | start-up, s | whole job, s | peak MiB |")
    print("|---|---|---|---|---|---|")
    base = statistics.median(steady.get("loop", [float("nan")]))
    for name in names:
        middle, low, high = statistics.median(steady[name]), min(steady[name]), max(steady[name])
        setup, job = statistics.median(start[name]), statistics.median(whole[name])
        figures = f"{base / middle:.2f} | {setup:.1f} | {job:.1f} | {peaks[name]}"
        print(f"| {name} | {middle:.3f} ({low:.3f}-{high:.3f}) | {figures} |")


if __name__ == "__main__":
    main()
