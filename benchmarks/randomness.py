"""What noise from the cipher costs beside torch.randn, and within a client's round.

Run it with ``python benchmarks/randomness.py --data-root DIR``; ``--out results/randomness.json`` also writes the
figures. All times are of one thread, in one run, taking turns; the least of ``--repeats`` counts, since
other work on the machine only adds to a time.
"""

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gradveil.data import load_dataset
from gradveil.data.pixels import to_batch
from gradveil.defences import Defence
from gradveil.defences.parts.grid import add_gaussian, add_laplace
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.models import create_model
from gradveil.secret_stream import SecretStream

ENTRIES = 262_144
"""Numbers in an update of 1 MB in float32."""
LENET5 = 61_706
"""Numbers in an update of lenet5."""
CLIENTS = {"400 images": 400, "6,000 images": 6_000}
"""A client's images if ten share mnist-5k, or mnist."""


def rounds(root: Path | None) -> dict[str, Callable[[], object]]:
    """Return functions that play a lenet5 client's round of one epoch, without a defence."""
    dataset = load_dataset("mnist-5k", root)
    net = FlatModel(create_model("lenet5", dataset.shape, dataset.num_classes, 0), lambda name: False)
    received = net.values[net.shared].clone()
    how = LocalSettings(batch_size=32, momentum=0.9)

    def play(count: int) -> object:
        some = np.arange(count) % len(dataset.train)  # the time does not depend on what the images show
        device = Device(to_batch(dataset.train.images[some], dataset.train.labels[some]))
        return play_client(net, device, Broadcast(received, 0.01), Defence(), how, Streams.of(0, 0, 1))

    return {f"round of {name}": partial(play, count) for name, count in CLIENTS.items()}


def measured(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least milliseconds of each piece of work; the pieces take turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, run in work.items():
            begin = time.perf_counter()
            run()
            if number:  # the first turn warms up
                times[name].append(1000 * (time.perf_counter() - begin))
    return {name: min(some) for name, some in times.items()}


def main() -> None:
    """Print the figures, and write them to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="Turns of each piece of work.")
    parser.add_argument("--data-root", type=Path, help="Where data sets are.")
    parser.add_argument("--out", type=Path, help="JSON file for the figures.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng, twister = SecretStream(0), torch.Generator().manual_seed(0)
    update = torch.randn(ENTRIES, generator=twister)
    draws = measured(
        {
            "torch.randn": lambda: torch.randn(ENTRIES, generator=twister),
            "SecretStream.normal": lambda: rng.normal((ENTRIES,)),
            "add_gaussian": lambda: add_gaussian(update, 0.1, rng),
            "add_laplace": lambda: add_laplace(update, 0.1, rng),
            "add_gaussian, lenet5": lambda: add_gaussian(update[:LENET5], 0.1, rng),
        },
        10 * options.repeats,
    )
    played = measured(rounds(options.data_root), options.repeats)
    figures = {
        "milliseconds": {name: round(value, 3) for name, value in (draws | played).items()},
        "times_torch_randn": {name: round(draws[name] / draws["torch.randn"], 2) for name in list(draws)[1:4]},
        "share_of_a_lenet5_round": {name: round(draws["add_gaussian, lenet5"] / played[name], 4) for name in played},
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        document = {
            "command": f"python benchmarks/randomness.py --repeats {options.repeats} --out {options.out}",
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": 0,
            "entries": ENTRIES,
            "figures": figures,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
