"""Time DCS2's search for concealed samples: many images together, and one image at a time, in one run.

    python benchmarks/dcs2.py [--images 64] [--alone 2] [--steps 1000] [--threads 2] [--json FILE]

The images are from mnist-5k, the network is an untrained lenet-dlg. No image stops early (`far=0`), so that both ways
take all steps. The paper states 172 s for a round with its defence and 102 s without, on another task and on a GPU.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch

from gradveil import create_model, load_dataset
from gradveil.data.pixels import to_unit
from gradveil.defences.base import Client
from gradveil.defences.dcs2 import Dcs2
from gradveil.models.base import Normalisation
from gradveil.types import Batch


class Spent(NamedTuple):
    """Wall-clock seconds, and CPU seconds of all cores, which other load on the machine affects less."""

    clock: float
    cores: float


def spent_on(defence: Dcs2, images: Batch, data: Batch, network: torch.nn.Module) -> Spent:
    """Time the concealing of ``images`` on a client that holds ``data``."""
    client = Client(0, 1, network, {}, data, {}, {}, torch.Generator().manual_seed(0))
    clock, cores = time.perf_counter(), time.process_time()
    defence.conceal(network, images, client)
    return Spent(time.perf_counter() - clock, time.process_time() - cores)


def main() -> None:
    """Read the options, measure, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--alone", type=int, default=2, help="number of images to conceal one at a time")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dataset = load_dataset("mnist-5k")
    count = options.images
    places = torch.linspace(0, len(dataset.train) - 1, 2 * count).long().numpy()
    pixels = to_unit(dataset.train.images[places])
    marks = torch.arange(2 * count) % 2 == 0
    data = Batch(pixels, torch.from_numpy(dataset.train.labels[places]), marks)
    sensitive = data[marks]
    network = create_model("lenet-dlg", dataset.shape, 10, 0, Normalisation(dataset.mean, dataset.std)).eval()
    defence = Dcs2(steps=options.steps, far=0.0)
    spent_on(Dcs2(steps=3, far=0.0), sensitive[slice(2)], data, network)  # warm-up
    alone = [spent_on(defence, sensitive[slice(each, each + 1)], data, network) for each in range(options.alone)]
    together = spent_on(defence, sensitive, data, network)
    single = Spent(*(sum(times) / len(alone) for times in zip(*alone, strict=True)))
    ratios = [count * one / all_ for one, all_ in zip(single, together, strict=True)]
    print(
        f"{count} images together, {options.steps} steps: {together.clock:.1f} s ({together.cores:.1f} s of CPU time)"
    )
    print(f"one at a time: {single.clock:.2f} s per image ({single.cores:.2f} s of CPU time)")
    print(f"speed-up per image when concealed together: {ratios[0]:.1f} by the clock, {ratios[1]:.1f} by CPU time")
    if options.json:
        found = {"images": count, "steps": options.steps, "together": together, "alone": single, "ratios": ratios}
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
