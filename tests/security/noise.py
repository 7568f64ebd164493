"""A victim for the attack on noise; ``python -m tests.security.noise --out results/noise-removal.json`` attacks it.

The victim has units that never fire, as networks have: their gradient is exactly zero, so an update shows bare noise.
"""

import argparse
import contextlib
import datetime
import json
import platform
import secrets
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradveil.defences import Client
from gradveil.defences.dp_sgd import DpSgd
from gradveil.defences.pogz import Pogz
from gradveil.federated.client import train_locally
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.randomness import stream
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from tests.security.twister import half_layout, remove, torch_layout

DEAD, UNITS, PIXELS = 28, 32, 144
LAYOUTS = {"torch": (3840, torch_layout), "cipher": (4032, partial(half_layout, apart=UNITS * PIXELS // 2))}
"""Entries of bare noise that the attack looks at, all of dead units, and how it pairs them."""
IMAGES = 4
ONE_STEP = LocalSettings("fedsgd", batch_size=0)
DEFENCES = {"dp-sgd": DpSgd(noise=4.0, sampling="shuffle"), "pogz": Pogz(noise=1.0, clip=1.0)}
STD = {"dp-sgd": 4.0 / IMAGES, "pogz": 2 / np.sqrt(2) / np.sqrt(0.5)}
"""Standard deviation of the noise in the first layer of an update, which everyone can compute."""


def victim():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, UNITS), nn.ReLU(), nn.Linear(UNITS, 3))
    with torch.no_grad():
        network[1].bias[:DEAD] = -100.0
    return network


def sent_by(defence, seed=0):
    """Return the first layer's part of an update of one step with rate 1, and the same with next to no noise."""
    found = []
    for chosen in (defence, replace(defence, noise=1e-12)):
        net = FlatModel(victim())
        rng = torch.Generator().manual_seed(1)
        data = Batch(torch.rand(IMAGES, 1, 12, 12, generator=rng), torch.arange(IMAGES) % 3, torch.zeros(IMAGES) > 0)
        received = net.values[net.shared].clone()
        client = Client(0, 1, net.module, net.shared_tensors(received), data, {}, {}, SecretStream(seed))
        update = train_locally(net, received, client, chosen, ONE_STEP, 1.0, SecretStream(seed))
        found.append(update.tensors["1.weight"].double().flatten().numpy())
    return found


def error(guess, truth):
    """Return the error of a guess relative to the truth, over the units that fire."""
    own = slice(DEAD * PIXELS, None)
    return np.linalg.norm(guess[own] - truth[own]) / np.linalg.norm(truth[own])


@contextlib.contextmanager
def twister_noise():
    """Give defences the noise that they had: torch.randn with a generator whose whole state is secret."""
    rng = stream(secrets.randbits(256) | 2**255, "noise")

    def steps(like, std, grid, _):
        return torch.randn(like.shape, generator=rng).double() * std / grid

    def added(tensor, std, _):
        return tensor + std * torch.randn(tensor.shape, generator=rng)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradveil.defences.dp_sgd.gaussian_steps", steps)
        patch.setattr("gradveil.defences.gaussian.add_gaussian", added)
        yield


def attacked(name, layout="torch"):
    """Return the errors of what a defence sent and of what is left of it after the attack; None if that found nothing.

    ``layout`` says how the attacker pairs the noise: as torch.randn makes it, or as the cipher's stream does.
    """
    sent, truth = sent_by(DEFENCES[name])
    sign = -1 if name == "dp-sgd" else 1  # a step goes against the gradient
    bare, pairs = LAYOUTS[layout]
    found = remove(sign * sent, STD[name], bare, pairs)
    return error(sent, truth), None if found is None else error(sign * found, truth)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the figures.")
    options = parser.parse_args()
    figures = []
    for name in DEFENCES:
        for source in ("Mersenne Twister", "cipher"):
            with twister_noise() if source == "Mersenne Twister" else contextlib.nullcontext():
                begin = time.perf_counter()
                before, after = attacked(name)
            line = {"defence": DEFENCES[name].spec, "noise": source, "error_sent": round(float(before), 1)}
            line |= {"error_after": None if after is None else float(f"{after:.1e}")}
            figures.append(line | {"seconds": round(time.perf_counter() - begin, 1)})
            sys.stdout.write(json.dumps(figures[-1]) + "\n")
    if options.out:
        document = {
            "command": f"python -m tests.security.noise --out {options.out}",
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": "of the control's noise: 256 bits from the system; of all else: 0",
            "figures": figures,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
