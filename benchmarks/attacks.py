"""Compare the gradient inversion of gradveil (`gs`) and of breaching: milliseconds per step and target, in one run.

The network is lenet-dlg on 3x32x32 images of 10 classes (padded digits of mnist-5k), one image per target, label known.
Both use the published settings of GS: cosine distance, Adam on the sign of the gradient with learning rate 0.1, times
0.1 at 3/8, 5/8 and 7/8 of the steps, pixels clamped to their range, total variation 1e-4, one start from N(0, 1).
breaching attacks one target after the other; gradveil attacks all targets together.

All contenders take turns in one process, so that other load on the machine affects all of them alike. The time of a
step is the time of a long run minus that of a short run, divided by the difference in steps. It therefore excludes
start-up; the time of compilation is measured separately. The report has medians over the rounds and, from the same run,
the machine's peak speed in matrix products, the most expensive operators, the losses that both reach from the same
start, and with `--grow` the time and memory of 1,024 targets.

    python benchmarks/attacks.py [--steps 120] [--rounds 5] [--targets 1,8,32,128] [--threads 2] [--grow] [--json FILE]

A quick run: `--steps 40 --rounds 2 --targets 1,8`. While other processes use the cores, threads wait for each other at
every operator and the times say little; `--threads 1` is more reliable then.
"""

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.utils.flop_counter import FlopCounterMode

from gradveil import Batch, ThreatModel, create_model, load_dataset, observe
from gradveil.attacks.base import Attack
from gradveil.attacks.gs import Gs
from gradveil.attacks.parts import search
from gradveil.data.pixels import to_unit
from gradveil.models import Normalisation
from gradveil.registry import build
from gradveil.threat import Observation, Reconstruction

SHAPE, CLASSES = (3, 32, 32), 10
TV, LR, SEED = 1e-4, 0.1, 0
SHORT = 20  # steps of the short run; in runs of a multiple of 8 steps, breaching lowers the rate early
NORMALISATION = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # CIFAR-10's
GROWN = (128, 1024)
MODES = ("off", "on") if any(field.name == "compile" for field in dataclasses.fields(Gs)) else ("",)
NAMES = {"": "gradveil", "off": "gradveil eager", "on": "gradveil compiled"}
Run = Callable[[int], object]
"""A function that runs an attack with the given number of steps."""


def look(targets: int) -> tuple[nn.Module, Observation]:
    """Return the broadcast network, and what the server sees of ``targets`` clients."""
    digits = load_dataset("mnist-5k").train
    images = F.pad(to_unit(digits.images[:targets]), (2, 2, 2, 2)).expand(-1, *SHAPE)
    labels = torch.from_numpy(digits.labels[:targets])
    sensitive = torch.tensor([True])
    private = [Batch(images[i : i + 1].contiguous(), labels[i : i + 1], sensitive) for i in range(targets)]
    network = create_model("lenet-dlg", SHAPE, CLASSES, seed=SEED, normalisation=NORMALISATION).eval()
    threat = ThreatModel.of("labels", "num-examples")
    return network, observe(network, private, threat=threat, num_classes=CLASSES)


def gradveil(seen: Observation, mode: str, steps: int, keep: int = 0) -> Reconstruction:
    """Attack all targets together; ``mode`` is the setting ``compile``, or "" if the attack has no such setting."""
    spec = f"gs:iterations={steps},tv={TV},lr={LR},keep={keep}" + (f",compile={mode}" if mode else "")
    return build(Attack, spec)(seen, torch.Generator().manual_seed(SEED))


class Breaching:
    """The attacker of breaching with its configuration "invertinggradients", on one target."""

    def __init__(self, network: nn.Module, seen: Observation) -> None:
        from breaching import get_attack_config

        with contextlib.redirect_stdout(io.StringIO()):  # breaching prints its configuration
            self._config = get_attack_config(
                "invertinggradients",
                overrides=[
                    f"optim.step_size={LR}",
                    f"regularization.total_variation.scale={TV}",
                    "optim.callback=1000000",
                    "restarts.num_trials=1",
                    "init=randn",
                ],
            )
        self._plain = copy.deepcopy(network)
        self._plain._forward_pre_hooks.clear()  # breaching normalises outside the network
        metadata = SimpleNamespace(
            shape=SHAPE, mean=NORMALISATION.mean, std=NORMALISATION.std, modality="vision", classes=CLASSES
        )
        self._sent = [{"parameters": list(self._plain.parameters()), "buffers": None, "metadata": metadata}]
        names = [name for name, _ in self._plain.named_parameters()]
        known = {"labels": seen.labels[0], "num_data_points": 1, "local_hyperparams": None}
        gradients = [seen.gradients[name][0] for name in names]
        self._received = [{"gradients": gradients, "buffers": None, "metadata": known}]

    def __call__(self, steps: int, start: Tensor | None = None) -> tuple[Tensor, list[float]]:
        """Return the reconstruction (1, C, H, W) in normalised units, and the loss at each step."""
        from breaching.attacks import prepare_attack

        config = copy.deepcopy(self._config)
        config.optim.max_iterations = steps
        attacker = prepare_attack(self._plain, nn.CrossEntropyLoss(), config)
        # The empty dict of secrets is needed: breaching fails on None.
        found, stats = attacker.reconstruct(self._sent, self._received, {}, initial_data=start)
        return found["data"], stats["Trial_0_Val"]

    def on_one_thread(self, steps: int) -> None:
        """Run on one thread, as with one process per core."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self(steps)
        finally:
            torch.set_num_threads(threads)


def allow_torchvision() -> None:
    """Declare operators that a torchvision built for another torch needs at import; none of them is called."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # keep the declarations alive


class Compiler:
    """A replacement for gradveil's compiler that measures its time and reuses its results.

    gradveil compiles in every call of a compiled attack. Here the network never changes, so one result per set of
    shapes serves all later calls.
    """

    spent = 0.0
    kept: ClassVar[dict[tuple[torch.Size, ...], object]] = {}

    @classmethod
    def watch(cls) -> None:
        """Replace gradveil's compiler from now on."""
        original = search.compiled

        def timed(function: object, examples: tuple[Tensor, ...]) -> object:
            started = time.perf_counter()
            shapes = tuple(tensor.shape for tensor in examples)
            if shapes not in cls.kept:
                cls.kept[shapes] = original(function, examples)
            cls.spent += time.perf_counter() - started
            return cls.kept[shapes]

        search.compiled = timed


def seconds(run: Run, steps: int) -> float:
    """Return the wall-clock time of one run without compilation."""
    started, spent = time.perf_counter(), Compiler.spent
    run(steps)
    return time.perf_counter() - started - (Compiler.spent - spent)


def take_turns(runs: dict[str, Run], steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each contender, one value per round; all contenders must be warm."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            short, long = seconds(run, SHORT), seconds(run, SHORT + steps)
            found[name].append((long - short) / steps)
    return found


def count_flops(run: Run) -> int:
    """Return the floating-point operations of one step: those of two steps minus those of one."""
    totals = []
    for steps in (1, 2):
        with FlopCounterMode(display=False) as counter:
            run(steps)
        totals.append(counter.get_total_flops())
    return totals[1] - totals[0]


def peak_gflops() -> float:
    """Return the highest GFLOP/s reached by a product of 1024x1024 float32 matrices."""
    a, b = torch.randn(2, 1024, 1024)
    best = min(seconds(lambda _: a @ b, 0) for _ in range(30))
    return 2 * 1024**3 / best / 1e9


def profile(run: Run, steps: int, top: int = 12) -> list[dict[str, float | str]]:
    """Return the operators with the most own CPU time: their share, calls per step and milliseconds per step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(steps)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    evaluations = steps + 1  # the last guess is evaluated too
    return [
        {
            "operator": event.key,
            "share": event.self_cpu_time_total / total,
            "ms": event.self_cpu_time_total / evaluations / 1e3,
            "calls": event.count / evaluations,
        }
        for event in events[:top]
    ]


def cosine_distance(network: nn.Module, pixels: Tensor, seen: Observation) -> float:
    """Return the cosine distance of an image's gradient from the first target's, by plain autograd.

    It judges both contenders by the same code; pixels are in [0, 1].
    """
    loss = F.cross_entropy(network(pixels), seen.labels[0])
    guess = torch.autograd.grad(loss, list(network.parameters()))
    wanted = [seen.gradients[name][0] for name, _ in network.named_parameters()]
    ours, theirs = (torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (guess, wanted))
    return 1 - float(ours @ theirs / (ours.norm() * theirs.norm()))


def compare_losses(network: nn.Module, seen: Observation, rival: Breaching, steps: int) -> list[dict[str, float | str]]:
    """Return the loss that each contender reaches on the first target from the same start."""
    start = torch.randn(1, SHAPE[0] * SHAPE[1] * SHAPE[2], generator=torch.Generator().manual_seed(SEED))
    start = start.view(1, *SHAPE)  # the first draw of gradveil
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (NORMALISATION.mean, NORMALISATION.std))
    rows: list[dict[str, float | str]] = []
    for length in (SHORT, SHORT + steps):
        image, losses = rival(length, start)
        pixels = image * std + mean
        check = cosine_distance(network, pixels, seen)
        rows.append({"name": "breaching", "steps": len(losses), "loss": min(losses), "cosine": check})
        for mode in MODES:
            guess = gradveil(seen, mode, length, keep=length)
            check = cosine_distance(network, guess.images[0], seen)
            taken = len(guess.iterates) - 1  # the start counts as an iterate
            rows.append({"name": NAMES[mode], "steps": taken, "loss": float(guess.loss[0]), "cosine": check})
    return rows


def one_size(targets: int, mode: str, steps: int) -> None:
    """Measure one size in its own process; print initial and peak memory and the time of a step as JSON."""
    _, small = look(1)
    gradveil(small, mode, 2)
    before = peak_memory()
    _, seen = look(targets)
    update = sum(tensor.nbytes for tensor in seen.updates.values()) / 2**20
    gradveil(seen, mode, 2)  # also compiles
    # Includes start-up: a difference of two runs would be lost in the noise.
    step = seconds(lambda n: gradveil(seen, mode, n), steps) / steps
    after = peak_memory()
    print(json.dumps({"updates_mib": update, "before_mib": before, "peak_mib": after, "seconds": step}))


def peak_memory() -> float:
    """Return this process's peak resident MiB; getrusage would start a child process at its parent's peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def grow(mode: str, steps: int, rounds: int, threads: int) -> dict[int, dict[str, float]]:
    """Return medians for 128 and 1,024 targets, measured in turns, each run in its own process."""
    reports: dict[int, list[dict[str, float]]] = {targets: [] for targets in GROWN}
    for _ in range(rounds):
        for targets in GROWN:
            command = [sys.executable, __file__, "--one", str(targets), "--mode", mode, "--steps", str(steps)]
            result = subprocess.run(
                [*command, "--threads", str(threads)], capture_output=True, text=True, env=os.environ, check=False
            )
            if result.returncode:
                sys.exit(f"{targets} targets failed:\n{result.stderr[-3000:]}")
            reports[targets].append(json.loads(result.stdout.strip().splitlines()[-1]))
    return {
        targets: {key: statistics.median(report[key] for report in some) for key in some[0]}
        for targets, some in reports.items()
    }


def spread(values: list[float], scale: float = 1e3) -> str:
    """Format the median and the range."""
    return f"{statistics.median(values) * scale:.3f} ({min(values) * scale:.3f}-{max(values) * scale:.3f})"


def print_table(head: str, rows: list[str]) -> None:
    """Print a Markdown table."""
    print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row in rows:
        print(f"| {row} |")
    print()


def measure(options: argparse.Namespace) -> dict[str, object]:  # noqa: C901 - one report, printed from top to bottom
    """Run all measurements, print the tables, and return the numbers."""
    sizes = [int(text) for text in options.targets.split(",")]
    network, first = look(1)
    rival = Breaching(network, first)
    versions = {name: version(name) for name in ("gradveil", "breaching", "torch")}
    print(", ".join(f"{name} {number}" for name, number in versions.items()), end="; ")
    print(f"{options.threads} threads on {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}; ", end="")
    print(f"{options.rounds} rounds of {SHORT} and {SHORT + options.steps} steps.\n")

    losses = compare_losses(network, first, rival, options.steps)
    print("Same target, same start: loss is the contender's own lowest value (cosine + TV); cosine is the distance of")
    print("the returned image, measured alike for both.\n")
    print_table(
        "contender | optimiser steps | loss | cosine",
        [f"{row['name']} | {row['steps']} | {row['loss']:.5f} | {row['cosine']:.5f}" for row in losses],
    )

    eager = "off" if "off" in MODES else ""
    flops = {"breaching": count_flops(rival), "gradveil": count_flops(lambda n: gradveil(first, eager, n))}
    peaks = [peak_gflops()]
    blocks = []
    for targets in sizes:
        seen = look(targets)[1]
        several = min(8, targets)  # for breaching, whose turns would otherwise be too short to average the noise
        runs: dict[str, Run] = {"breaching": lambda n, several=several: [rival(n) for _ in range(several)]}
        if options.threads > 1:
            runs["breaching, 1 thread"] = lambda n, several=several: [rival.on_one_thread(n) for _ in range(several)]
        for mode in MODES:
            runs[NAMES[mode]] = lambda n, seen=seen, mode=mode: gradveil(seen, mode, n)
        with fresh_cache():  # start without compiled code in memory or on disk
            torch._dynamo.reset()
            costs = []
            for _ in range(2):
                spent = Compiler.spent
                Compiler.kept.clear()
                for run in runs.values():
                    run(SHORT)
                costs.append(Compiler.spent - spent)
            steps = take_turns(runs, options.steps, options.rounds)
        found = {
            name: [value / (several if "breaching" in name else targets) for value in values]
            for name, values in steps.items()
        }
        blocks.append({"targets": targets, "seconds": found, "compile_seconds": costs})
        peaks.append(peak_gflops())
        print(f"{targets} targets done", file=sys.stderr)
    peak = max(peaks)

    def row(name: str, targets: object, values: list[float], base: float, work: int) -> str:
        middle = statistics.median(values)
        speed = work / middle / 1e9
        return f"{name} | {targets} | {spread(values)} | {base / middle:.2f} | {speed:.1f} | {speed / peak:.0%}"

    base = [value for block in blocks for value in block["seconds"]["breaching"]]
    rows = [row("breaching", "one by one", base, statistics.median(base), flops["breaching"])]
    if options.threads > 1:
        single = [value / options.threads for block in blocks for value in block["seconds"]["breaching, 1 thread"]]
        name = f"breaching, {options.threads} processes at best"
        rows.append(row(name, "one by one", single, statistics.median(base), flops["breaching"]))
    for name in (NAMES[mode] for mode in MODES):
        for block in blocks:
            own = statistics.median(block["seconds"]["breaching"])
            rows.append(row(name, block["targets"], block["seconds"][name], own, flops["gradveil"]))
    print(
        "Speed-up is over breaching in the same rounds. Processes at best: breaching's time on one thread, divided by"
    )
    print("the number of threads, as if one process per thread ran without disturbing the others.\n")
    print_table(
        "contender | targets | ms per step and target (median; range) | speed-up | GFLOP/s | share of peak",
        rows,
    )
    millions = {name: f"{count / 1e6:.1f}" for name, count in flops.items()}
    print(f"MFLOP per step and target: gradveil {millions['gradveil']}, breaching {millions['breaching']}.")
    print("torch's FlopCounterMode counts 2 for each multiply-add of matrix products and convolutions, forward and")
    print("backward, and nothing for the rest; the compiled step is assumed to need as many as the eager step.")
    print(f"Peak: {peak:.1f} GFLOP/s, best of {30 * len(peaks)} products of 1024x1024 float32 matrices in this run.\n")

    if "on" in MODES:
        lines = []
        for block in blocks:
            slow, fast = (statistics.median(block["seconds"][NAMES[mode]]) for mode in ("off", "on"))
            saved = (slow - fast) * block["targets"]
            after = f"{block['compile_seconds'][0] / saved:,.0f}" if saved > 0 else "never"
            cold, warm = block["compile_seconds"]
            lines.append(f"{block['targets']} | {cold:.1f} | {warm:.1f} | {after}")
        print_table("targets | compilation, s | again with torch's cache, s | steps until compilation pays off", lines)

    profiled = min(32, max(sizes))
    seen = look(profiled)[1]
    operators = profile(lambda n: gradveil(seen, eager, n), SHORT)
    print(f"Operators of an eager step with {profiled} targets, by own CPU time of the calling thread:\n")
    print_table(
        "operator | share | ms per step | calls per step",
        [f"{line['operator']} | {line['share']:.1%} | {line['ms']:.2f} | {line['calls']:.1f}" for line in operators],
    )

    grown: dict[str, dict[int, dict[str, float]]] = {}
    if options.grow:
        lines = []
        for mode in MODES:
            grown[NAMES[mode]] = sizes_now = grow(mode, SHORT, min(3, options.rounds), options.threads)
            few, many = (sizes_now[targets] for targets in GROWN)
            lines += [
                f"{NAMES[mode]} | {targets} | {it['seconds'] / targets * 1e3:.3f} | {it['updates_mib']:.0f} | "
                f"{it['peak_mib'] - it['before_mib']:.0f} | {it['peak_mib']:.0f}"
                for targets, it in sizes_now.items()
            ]
            ratios = {key: many[key] / few[key] for key in many}
            more = (many["peak_mib"] - many["before_mib"]) / (few["peak_mib"] - few["before_mib"])
            lines.append(
                f"{NAMES[mode]} | ratio {GROWN[1] / GROWN[0]:.0f} | whole step {ratios['seconds']:.2f} | "
                f"{ratios['updates_mib']:.2f} | {more:.2f} | {ratios['peak_mib']:.2f}"
            )
        print_table(
            "contender | targets | ms per step and target | updates, MiB | increase up to peak, MiB | peak, MiB", lines
        )
    return {
        "versions": versions,
        "threads": options.threads,
        "steps": options.steps,
        "losses": losses,
        "flops": flops,
        "peak_gflops": peak,
        "blocks": blocks,
        "operators": operators,
        "grown": grown,
    }


def main() -> None:
    """Read the options, measure, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--targets", default="1,8,32,128")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "on" in MODES:
        Compiler.watch()
    warnings.filterwarnings("ignore")  # from breaching's outdated calls of hydra and torch
    if options.one:
        one_size(options.one, options.mode, options.steps)
        return
    allow_torchvision()
    numbers = measure(options)
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
