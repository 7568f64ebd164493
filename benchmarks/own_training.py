"""Measure what a fact about a training loop is worth to an attack, and whether its absence is diagnosed.

Run from the root of the repository, with the data sets in FOLDER:

    python benchmarks/own_training.py --data FOLDER
    python benchmarks/own_training.py --page        # only write the table again from results/own-training.json

A small network with BatchNorm and Dropout takes a step on chest X-rays, in a plain torch loop that `gradveil.Recorder`
records. The update is attacked twice: with the recorded specification, and with one where a fact is missing or wrong.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import gradveil
from gradveil.runs.diagnose import diagnose_files
from gradveil.runs.update_spec import make_spec

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "own-training.json", ROOT / "docs" / "audit-your-own-model.md"
BEGIN, END = "<!-- facts: python benchmarks/own_training.py -->\n", "<!-- end of facts -->"
ATTACK = "gs:iterations=400"
FIRST = (100, 900, 1700)
"""Positions of the first image of each repetition."""
MEAN, STD = 0.572, 0.168


def network() -> nn.Module:
    """Return a small network with BatchNorm and Dropout."""
    first = nn.Conv2d(1, 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 5, 2, 2), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 49, 2))


def sgd(parameters: Any, **options: float) -> torch.optim.Optimizer:  # noqa: ANN401 - as torch takes them
    """Return SGD with a usual rate."""
    return torch.optim.SGD(parameters, lr=0.01, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Loop:
    """A training loop, and a specification of it that is wrong.

    Attributes:
        wrong: keys of the specification that replace the recorded ones; None leaves a key out.
        images: images of the round.
        steps: steps of the optimiser.
        accumulate: batches per step.
        optimiser: makes the optimiser.
        dropout: whether Dropout is on.
        statistics: whether BatchNorm takes the batch's statistics.
        smoothing: label smoothing.
        normalised: whether the loader normalises images.
    """

    wrong: dict[str, Any]
    images: int = 1
    steps: int = 1
    accumulate: int = 1
    optimiser: Callable[..., torch.optim.Optimizer] = sgd
    dropout: bool = False
    statistics: bool = False
    smoothing: float = 0.0
    normalised: bool = field(default=False)


LOOPS = {
    "normalisation not stated": Loop({"normalise": "none"}, normalised=True),
    "Dropout not stated": Loop({"dropout": "off"}, dropout=True),
    "BatchNorm's mode and Dropout not stated": Loop(
        {"batch_norm": "freeze", "dropout": "off"}, images=4, dropout=True, statistics=True
    ),
    "Adam not stated": Loop(
        {"optimiser": None, "betas": None, "eps": None}, optimiser=lambda p: torch.optim.Adam(p, lr=1e-3)
    ),
    "accumulation taken for steps": Loop({"accumulate": None, "batch_size": 1}, images=4, accumulate=4),
    "weight decay not stated": Loop({"weight_decay": 0.0}, optimiser=lambda p: sgd(p, weight_decay=0.05)),
    "rate ten times too large": Loop({"lr": 0.1}),
    "momentum not stated": Loop({"momentum": 0.0}, images=4, steps=4, optimiser=lambda p: sgd(p, momentum=0.9)),
}


def recorded(loop: Loop, images: Tensor, labels: Tensor, out: Path) -> gradveil.Recorder:
    """Run a training loop inside a Recorder."""
    torch.manual_seed(1)
    model = network().train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and not loop.dropout:
            layer.eval()
        if isinstance(layer, nn.BatchNorm2d) and not loop.statistics:
            layer.eval()
    optimiser = loop.optimiser(model.parameters())
    normalise = f"{MEAN}/{STD}" if loop.normalised else "none"
    inputs = (images - MEAN) / STD if loop.normalised else images
    size = len(images) // (loop.steps * loop.accumulate)
    with gradveil.Recorder(model, optimiser, out, factory=network, images=True, normalise=normalise) as recorder:
        for number, some in enumerate(torch.arange(len(images)).split(size), 1):
            outputs = model(inputs[some])
            loss = nn.functional.cross_entropy(outputs, labels[some], label_smoothing=loop.smoothing)
            (loss / loop.accumulate).backward()
            if number % loop.accumulate == 0:
                optimiser.step()
                optimiser.zero_grad()
    return recorder


def measured(loop: Loop, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the PSNR with the right and with the wrong specification, and the diagnoses of the wrong one."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        recorder = recorded(loop, images, labels, Path(folder) / "recorded")
        files = recorder.files
        wrong = {key: value for key, value in (files["spec"] | loop.wrong).items() if value is not None}
        for name, spec in (("stated", files["spec"]), ("wrong", wrong)):
            arguments = files | {"spec": spec, "attack": ATTACK, "metrics": "psnr", "out": Path(folder) / name}
            found[name] = gradveil.attack(**arguments).rows[0]["psnr"]
            told = diagnose_files(files["model_file"], [files["update"]], make_spec(spec, name))[0]
            found[f"diagnosed_{name}"] = [one.name for one in told]
    return found


def measure(data: Path) -> None:
    """Measure all loops, and write the results."""
    split = gradveil.load_dataset(str(data / "pneumoniamnist.npz")).train
    figures = {}
    for name, loop in LOOPS.items():
        each = []
        for first in FIRST:
            own = slice(first, first + loop.images)
            images = torch.from_numpy(split.images[own]).float() / 255
            each.append(measured(loop, images, torch.from_numpy(split.labels[own])))
        figures[name] = {key: round(fmean(one[key] for one in each), 1) for key in ("stated", "wrong")}
        for key in ("diagnosed_stated", "diagnosed_wrong"):
            figures[name][key] = sorted({told for one in each for told in one[key]})
        print(name, figures[name], flush=True)
    document = {
        "command": "python benchmarks/own_training.py --data FOLDER",
        "date": datetime.now(UTC).date().isoformat(),
        "attack": ATTACK,
        "images": list(FIRST),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "figures": figures,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def table() -> str:
    """Return the table of the page."""
    document = json.loads(RESULTS.read_text())
    lines = ["| wrong in the spec | PSNR, stated rightly | PSNR, stated wrongly | diagnosed |", "|---|---|---|---|"]
    for name, one in document["figures"].items():
        told = ", ".join(one["diagnosed_wrong"]) or "nothing"
        lines.append(f"| {name} | {one['stated']:.1f} dB | {one['wrong']:.1f} dB | {told} |")
    lines += ["", f"(`{document['command']}`, {document['date']}, attack `{document['attack']}`.)", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure if data are given, and write the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.data:
        measure(given.data)
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
