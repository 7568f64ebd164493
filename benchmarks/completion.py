"""Attack dcs2 followed by pruning: plainly, by a search for image and concealed sample, and with the completed matrix.

Single digits of mnist-5k and an untrained lenet-dlg, labels known. ``joint`` searches the image together with its
concealed sample, by the surviving entries; ``completed`` also completes the last layer's rank-two gradient and
separates the image's part of it. Run from the root of the repository: python benchmarks/completion.py --data FOLDER
"""

import argparse
import json
import platform
import statistics
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from gradveil import create_model, load_dataset
from gradveil.attacks import build_attack
from gradveil.attacks.parts.adaptive import answers
from gradveil.attacks.parts.separation import OWN
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.metrics.psnr import Psnr
from gradveil.models import Normalisation
from gradveil.networks.grads import example_gradients
from gradveil.randomness import stream
from gradveil.threat import Knowledge, Observation, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

SEARCH = "gs:iterations=1500,sign=none,schedule=cosine,lr=0.3,tv=1e-3"


def observed(options: argparse.Namespace) -> tuple[Batch, Observation]:
    """Return the private digits and what the server sees of them, one update each."""
    data = load_dataset("mnist-5k", options.data)
    order = torch.randperm(len(data.train.labels), generator=stream(options.seed, "completion", "targets")).numpy()
    mine, others = order[: options.targets], order[options.targets : options.targets + 200]
    private, aux = (to_batch(data.train.images[some], data.train.labels[some]) for some in (mine, others))
    private = replace(private, sensitive=torch.ones(len(private), dtype=torch.bool))
    normalisation = Normalisation(data.mean, data.std)
    network = create_model("lenet-dlg", data.shape, data.num_classes, options.seed, normalisation)
    seen = observe(
        network.eval(),
        [private[slice(number, number + 1)] for number in range(len(private))],
        threat=ThreatModel.of("labels", "num-examples", "defence"),
        num_classes=data.num_classes,
        defence=build_defence(options.defence),
        federation=Federation(aux=aux, seed=options.seed),
    )
    return private, seen


def last_layer_error(private: Batch, seen: Observation) -> list[float | None]:
    """Return the relative error of the separated gradient of the last layer, for each target that was separated."""
    own = example_gradients(seen.network, private.images, private.labels)["fc.weight"]
    errors: list[float | None] = [None] * len(private)
    for answer in answers(seen):
        wanted = answer.move.look(seen.mean_gradients) if answer.move and answer.move.look else {}
        for row, target in enumerate(answer.targets if f"{OWN}fc.weight" in wanted else []):
            found = wanted[f"{OWN}fc.weight"][row]
            truth = own[target] * (found != 0)
            errors[target] = round(float((found - truth).norm() / truth.norm()), 5)
    return errors


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--defence", default="dcs2+prune")
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/completion.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    private, seen = observed(options)
    rows = []
    for name, adapt, view in (
        ("plain", "", seen.without(Knowledge.DEFENCE)), ("joint", ",adapt=joint", seen), ("completed", "", seen),
    ):  # fmt: skip
        found = build_attack(SEARCH + adapt)(view, stream(options.seed, "completion", "attack"))
        values = [round(value, 2) for value in Psnr()(private.images, found.images[:, 0]).tolist()]
        rows.append({"attacker": name, "psnr": round(statistics.fmean(values), 2), "each": values})
    result = {
        "command": f"python benchmarks/completion.py --data FOLDER --defence {options.defence} --targets "
        f"{options.targets} --seed {options.seed}",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attack": SEARCH,
        "last_layer_error": last_layer_error(private, seen),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
