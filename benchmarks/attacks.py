"""Milliseconds a step and target: gradveil's gradient inversion `gs` and breaching's, on the same work, in one run.

lenet-dlg on 3x32x32 images of 10 classes (digits of mnist-5k, padded), one image a target, its label known. Both search
with the published settings of GS: cosine distance, the sign of the gradient into Adam at 0.1, times 0.1 at 3/8, 5/8 and
7/8 of the steps, guesses kept in the box, total variation 1e-4, one start from N(0, 1). breaching takes one target
after the other; gradveil takes them together.

All run in one process, taken in turns, so that a noisy machine is noisy to all. The time of a step is the difference of
a long and a short run by their difference in steps, so that start-up is no part of it; what compiling costs is measured
apart. Reported: medians over the rounds, and from the same run the machine's peak in matrix products, the operators
that take the time, the losses that both reach from the same start, and with `--grow` time and memory of 1,024 targets.

    python benchmarks/attacks.py [--steps 120] [--rounds 5] [--targets 1,8,32,128] [--threads 2] [--grow] [--json FILE]

Quick: `--steps 40 --rounds 2 --targets 1,8`. While other processes use the cores, threads wait for each other at every
operator and the figures say little; `--threads 1` is steadier then.
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
from gradveil.models import Normalisation
from gradveil.registry import build
from gradveil.threat import Observation, Reconstruction

SHAPE, CLASSES = (3, 32, 32), 10
TV, LR, SEED = 1e-4, 0.1, 0
SHORT = 20  # steps of the short run; where a run is a multiple of 8, breaching lowers the rate one step early
NORMALISATION = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # CIFAR-10's
GROWN = (128, 1024)
MODES = ("off", "on") if any(field.name == "compile" for field in dataclasses.fields(Gs)) else ("",)
NAMES = {"": "gradveil", "off": "gradveil eager", "on": "gradveil compiled"}
Run = Callable[[int], object]
"""Attacks with so many steps."""


def look(targets: int) -> tuple[nn.Module, Observation]:
    """The broadcast network and what the server sees of so many clients."""
    digits = load_dataset("mnist-5k").train
    images = F.pad(torch.from_numpy(digits.images[:targets]).float() / 255, (2, 2, 2, 2)).expand(-1, *SHAPE)
    labels = torch.from_numpy(digits.labels[:targets])
    sensitive = torch.tensor([True])
    private = [Batch(images[i : i + 1].contiguous(), labels[i : i + 1], sensitive) for i in range(targets)]
    network = create_model("lenet-dlg", SHAPE, CLASSES, seed=SEED, normalisation=NORMALISATION).eval()
    threat = ThreatModel.of("labels", "num-examples")
    return network, observe(network, private, threat=threat, num_classes=CLASSES)


def gradveil(seen: Observation, mode: str, steps: int, keep: int = 0) -> Reconstruction:
    """All targets together; ``mode`` is the setting compile, "" where the attack has none."""
    spec = f"gs:iterations={steps},tv={TV},lr={LR},keep={keep}" + (f",compile={mode}" if mode else "")
    return build(Attack, spec)(seen, torch.Generator().manual_seed(SEED))


class Breaching:
    """breaching's own attacker with its own configuration "invertinggradients", on one target."""

    def __init__(self, network: nn.Module, seen: Observation) -> None:
        from breaching import get_attack_config

        with contextlib.redirect_stdout(io.StringIO()):  # it prints
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
        self._plain._forward_pre_hooks.clear()  # breaching normalises outside the network, so it is spared the work
        metadata = SimpleNamespace(
            shape=SHAPE, mean=NORMALISATION.mean, std=NORMALISATION.std, modality="vision", classes=CLASSES
        )
        self._sent = [{"parameters": list(self._plain.parameters()), "buffers": None, "metadata": metadata}]
        names = [name for name, _ in self._plain.named_parameters()]
        known = {"labels": seen.labels[0], "num_data_points": 1, "local_hyperparams": None}
        gradients = [seen.gradients[name][0] for name in names]
        self._received = [{"gradients": gradients, "buffers": None, "metadata": known}]

    def __call__(self, steps: int, start: Tensor | None = None) -> tuple[Tensor, list[float]]:
        """The image (1, C, H, W) that it finds, in normalised units, and its loss at each step."""
        from breaching.attacks import prepare_attack

        config = copy.deepcopy(self._config)
        config.optim.max_iterations = steps
        attacker = prepare_attack(self._plain, nn.CrossEntropyLoss(), config)
        # Without a dict of secrets it fails: it looks for a key in None.
        found, stats = attacker.reconstruct(self._sent, self._received, {}, initial_data=start)
        return found["data"], stats["Trial_0_Val"]

    def on_one_thread(self, steps: int) -> None:
        """The same on one thread, as it would run with a process on each core."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self(steps)
        finally:
            torch.set_num_threads(threads)


def allow_torchvision() -> None:
    """Declare the operators without which torchvision, built for another torch, is not imported; none is called."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # the declarations live as long as it does


class Compiler:
    """Stands in for gradveil's own, which every call of a compiled attack runs: adds up its time, and keeps its work.

    The network is the same throughout, so what was compiled for some shapes serves all later calls.
    """

    spent = 0.0
    kept: ClassVar[dict[tuple[torch.Size, ...], object]] = {}

    @classmethod
    def watch(cls) -> None:
        """From now on."""
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
    """Wall-clock time of one run, without what it spent on compiling."""
    started, spent = time.perf_counter(), Compiler.spent
    run(steps)
    return time.perf_counter() - started - (Compiler.spent - spent)


def take_turns(runs: dict[str, Run], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each contender, one number a round; all have run before."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            short, long = seconds(run, SHORT), seconds(run, SHORT + steps)
            found[name].append((long - short) / steps)
    return found


def count_flops(run: Run) -> int:
    """Of one step: of a run of two steps less those of a run of one."""
    totals = []
    for steps in (1, 2):
        with FlopCounterMode(display=False) as counter:
            run(steps)
        totals.append(counter.get_total_flops())
    return totals[1] - totals[0]


def peak_gflops() -> float:
    """The most GFLOP/s that a product of 1024x1024 float32 matrices reached."""
    a, b = torch.randn(2, 1024, 1024)
    best = min(seconds(lambda _: a @ b, 0) for _ in range(30))
    return 2 * 1024**3 / best / 1e9


def profile(run: Run, steps: int, top: int = 12) -> list[dict[str, float | str]]:
    """The operators with the most CPU time of their own: share of all, calls and milliseconds a step."""
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
    """Of the gradient of an image in [0, 1] from the first target's, by plain autograd: a referee of both."""
    loss = F.cross_entropy(network(pixels), seen.labels[0])
    guess = torch.autograd.grad(loss, list(network.parameters()))
    wanted = [seen.gradients[name][0] for name, _ in network.named_parameters()]
    ours, theirs = (torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (guess, wanted))
    return 1 - float(ours @ theirs / (ours.norm() * theirs.norm()))


def compare_losses(network: nn.Module, seen: Observation, rival: Breaching, steps: int) -> list[dict[str, float | str]]:
    """What each reaches on the first target from the same start."""
    start = torch.randn(1, SHAPE[0] * SHAPE[1] * SHAPE[2], generator=torch.Generator().manual_seed(SEED))
    start = start.view(1, *SHAPE)  # gradveil's own first draw
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
            taken = len(guess.iterates) - 1  # the start is one of them
            rows.append({"name": NAMES[mode], "steps": taken, "loss": float(guess.loss[0]), "cosine": check})
    return rows


def one_size(targets: int, mode: str, steps: int) -> None:
    """In a process of its own: memory before and at its peak, and the time of a step, as JSON on the last line."""
    _, small = look(1)
    gradveil(small, mode, 2)
    before = peak_memory()
    _, seen = look(targets)
    update = sum(tensor.nbytes for tensor in seen.updates.values()) / 2**20
    gradveil(seen, mode, 2)  # also compiles
    step = seconds(lambda n: gradveil(seen, mode, n), steps) / steps  # with start-up: a difference is lost in the noise
    after = peak_memory()
    print(json.dumps({"updates_mib": update, "before_mib": before, "peak_mib": after, "seconds": step}))


def peak_memory() -> float:
    """Peak resident MiB of this process; getrusage would start a child at its parent's peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def grow(mode: str, steps: int, rounds: int, threads: int) -> dict[int, dict[str, float]]:
    """Medians of 128 and 1,024 targets, each in processes of their own, taken in turns."""
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
    """Median and range."""
    return f"{statistics.median(values) * scale:.3f} ({min(values) * scale:.3f}-{max(values) * scale:.3f})"


def print_table(head: str, rows: list[str]) -> None:
    """A Markdown table."""
    print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row in rows:
        print(f"| {row} |")
    print()


def measure(options: argparse.Namespace) -> dict[str, object]:
    """All of it; prints as it goes and returns the numbers."""
    sizes = [int(text) for text in options.targets.split(",")]
    network, first = look(1)
    rival = Breaching(network, first)
    versions = {name: version(name) for name in ("gradveil", "breaching", "torch")}
    print(", ".join(f"{name} {number}" for name, number in versions.items()), end="; ")
    print(f"{options.threads} threads on {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}; ", end="")
    print(f"{options.rounds} rounds of {SHORT} and {SHORT + options.steps} steps.\n")

    losses = compare_losses(network, first, rival, options.steps)
    print("Same target, same start: loss is the contender's own least (cosine + TV); cosine is the referee's, of the")
    print("image handed back.\n")
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
        several = min(8, targets)  # for breaching, else its turns would be too short to share the noise
        runs: dict[str, Run] = {"breaching": lambda n, several=several: [rival(n) for _ in range(several)]}
        if options.threads > 1:
            runs["breaching, 1 thread"] = lambda n, several=several: [rival.on_one_thread(n) for _ in range(several)]
        for mode in MODES:
            runs[NAMES[mode]] = lambda n, seen=seen, mode=mode: gradveil(seen, mode, n)
        with fresh_cache():  # nothing compiled earlier, in memory or on disk, may help
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
        "Speed is against breaching's time in the same rounds. Processes at best: its time on one thread by the number"
    )
    print("of threads, as if so many processes did not disturb each other.\n")
    print_table(
        "contender | targets | ms a step and target (median; range) | speed against breaching | GFLOP/s | of the peak",
        rows,
    )
    print(f"MFLOP a step and target: gradveil {flops['gradveil'] / 1e6:.1f}, breaching {flops['breaching'] / 1e6:.1f}.")
    print("torch's FlopCounterMode counts 2 for each multiply-add of matrix products and convolutions, forward and")
    print("backward, and nothing for the rest; the compiled step is credited with the eager step's count.")
    print(f"Peak: {peak:.1f} GFLOP/s, best of {30 * len(peaks)} products of 1024x1024 float32 matrices in this run.\n")

    if "on" in MODES:
        lines = []
        for block in blocks:
            slow, fast = (statistics.median(block["seconds"][NAMES[mode]]) for mode in ("off", "on"))
            saved = (slow - fast) * block["targets"]
            after = f"{block['compile_seconds'][0] / saved:,.0f}" if saved > 0 else "never"
            cold, warm = block["compile_seconds"]
            lines.append(f"{block['targets']} | {cold:.1f} | {warm:.1f} | {after}")
        print_table("targets | compiling, s | again, from torch's cache, s | the first pays after so many steps", lines)

    profiled = min(32, max(sizes))
    seen = look(profiled)[1]
    operators = profile(lambda n: gradveil(seen, eager, n), SHORT)
    print(f"Where the time of an eager step with {profiled} targets goes (own CPU time of the calling thread):\n")
    print_table(
        "operator | share | ms a step | calls a step",
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
            "contender | targets | ms a step and target | updates seen, MiB | peak less before, MiB | peak MiB", lines
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
    warnings.filterwarnings("ignore")  # of breaching's old calls into hydra and torch
    if options.one:
        one_size(options.one, options.mode, options.steps)
        return
    allow_torchvision()
    numbers = measure(options)
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
