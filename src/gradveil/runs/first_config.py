"""The settings that a newcomer starts an audit of their own data with, as a commented TOML file."""

import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import tomli_w

from gradveil.audits.settings import AuditSettings
from gradveil.data import Dataset

FEW = 50
"""Training images of a client that are enough to begin with."""


def chosen_for(dataset: Dataset) -> dict[str, Any]:
    """Return the settings that differ from the defaults for a data set: the worst case, short enough to begin with."""
    clients = int(np.clip(len(dataset.train) // FEW, 2, 10))
    return {
        "dataset": dataset.name,
        "model": "lenet-dlg" if dataset.shape[0] in (1, 3) and max(dataset.shape[1:]) <= 64 else "convnet",
        "defences": ["gaussian:std=0.01", "dp-sgd"],
        "adaptive": True,
        "effort": "quick",
        "protocol": "lab",
        "images": 1,
        "targets": min(4, clients),
        "tap": [1],
        "rounds": 50,
        "clients": clients,
    }


WHY: Mapping[str, str] = {
    "dataset": "Your data.",
    "model": "Your own network: file.py:factory, a function that returns a torch.nn.Module.",
    "defences": "`gradveil list defences` has all; `none` is always included.",
    "adaptive": "An attacker who knows the defence. Without it, most defences look better than they are.",
    "effort": "Begin with quick; take standard or thorough for a result that you rely on.",
    "protocol": "lab is the worst case: one gradient of few images. fedavg is how most federations train.",
    "images": "The fewer images behind an update, the more it leaks.",
    "tap": "Early rounds leak most.",
}
"""Why a newcomer starts with these, beside what each setting means."""


def first_config(dataset: Dataset) -> str:
    """Return the text of the file: the chosen settings, then all others, commented out with their defaults."""
    chosen = chosen_for(dataset)
    counts = np.bincount(dataset.train.labels, minlength=dataset.num_classes)
    channels, height, width = dataset.shape
    lines = [
        f"# {len(dataset.train):,} training and {len(dataset.test):,} test images of {channels}x{height}x{width}, "
        f"{dataset.num_classes} classes of {counts.min():,} to {counts.max():,} training images.",
        "# Run it:            gradveil audit --config THIS --out runs/own",
        "# How long it takes: gradveil audit --config THIS --out runs/own --estimate",
    ]
    if counts.min() == 0:
        lines.append("# At least one class has no training image. Are the labels right?")
    helps = {field.name: (field.metadata["help"], field.default) for field in fields(AuditSettings)}
    for name, value in chosen.items():
        lines += ["", *_comment(helps[name][0]), *_comment(WHY.get(name, "")), _line(name, value)]
    lines += ["", "# Everything else, with its default. Remove the # to change it."]
    for name, (text, default) in helps.items():
        if name not in chosen:
            value = list(default) if isinstance(default, tuple) else default
            lines += ["", *_comment(text), f"# {_line(name, value)}"]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# ")


def _line(name: str, value: object) -> str:
    return " ".join(tomli_w.dumps({name: value}).split()).replace("[ ", "[").replace(", ]", "]")
