"""Compare published settings of GGL's objective on single digits: squared differences, and cosine with TV and KL.

An untrained lenet-dlg, training digits as targets, test digits as public images. GGL's own code has squared differences
and a divergence weight of 0.1 for them, 1e-4 for the cosine; DCS2's code has the cosine with total variation 1e-4 and
divergence 1e-4. Run from the root of the repository: python benchmarks/ggl.py --data FOLDER
"""

import argparse
import json
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch

from gradveil import create_model, load_dataset
from gradveil.attacks import build_attack
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.metrics.psnr import Psnr
from gradveil.models import Normalisation
from gradveil.randomness import stream
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe

OBJECTIVES = {
    "l2, kl 1e-3": "distance=l2,tv=0,kl=1e-3",
    "l2, kl 0.1": "distance=l2,tv=0,kl=0.1",
    "cosine, tv 1e-4, kl 1e-4": "distance=cosine,tv=1e-4,kl=1e-4",
}
SEARCH = "ggl:optimiser=adam,iterations={},restarts=4,lr=0.3,{},generator={}"
DEFENCES = ("none", "prune:fraction=0.9", "gaussian:std=0.1")


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--generator", default="", help="a trained generator of digits; by default only principal")
    parser.add_argument("--targets", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/ggl.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset("mnist-5k", options.data)
    order = torch.randperm(len(data.train.labels), generator=stream(options.seed, "ggl", "targets")).numpy()
    mine = order[: options.targets]
    private, public = to_batch(data.train.images[mine], data.train.labels[mine]), data.test
    known = PublicKnowledge(to_batch(public.images, public.labels))
    rows = []
    for defence in DEFENCES:
        network = create_model(
            "lenet-dlg", data.shape, data.num_classes, options.seed, Normalisation(data.mean, data.std)
        )
        seen = observe(
            network.eval(), [private[slice(number, number + 1)] for number in range(len(private))],
            threat=ThreatModel.of("num-examples", "public-data"), num_classes=data.num_classes,
            defence=build_defence(defence), public=known,
        )  # fmt: skip
        for generator in ("principal", *filter(None, [options.generator])):
            for name, objective in OBJECTIVES.items():
                attack = build_attack(SEARCH.format(options.iterations, objective, generator))
                found = attack(seen, stream(options.seed, "ggl", "attack"))
                values = [round(value, 2) for value in Psnr()(private.images, found.images[:, 0]).tolist()]
                kind = "principal" if generator == "principal" else "trained"
                row = {"defence": defence, "generator": kind, "objective": name, "each": values}
                rows.append(row | {"psnr": round(statistics.fmean(values), 2)})
                print({key: value for key, value in rows[-1].items() if key != "each"}, flush=True)
    result = {
        "command": f"python benchmarks/ggl.py --data FOLDER{' --generator FILE' * bool(options.generator)} --targets "
        f"{options.targets} --iterations {options.iterations} --seed {options.seed}",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attack": SEARCH.format(options.iterations, "...", "..."),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
