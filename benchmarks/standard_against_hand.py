"""Set `standard`, which needs no settings, against gradient matching with settings that a person chose.

::

    python benchmarks/standard_against_hand.py --data-root DIR --parts DIR    # CIFAR-10; finished parts are kept
    python benchmarks/standard_against_hand.py --table                        # print the table from the results

Private images are test images, one behind each update of an untrained network; both attackers see the same updates and
know the labels. `standard` also has 2,000 training images as public ones, on which it compares ways to attack. On
CIFAR-10 both take as many steps per search, fewer than `standard` takes by itself, and there are few targets, to bound
the time: the network of width 64 takes about ten minutes.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradveil import create_model, load_dataset
from gradveil.attacks import build_attack
from gradveil.data.pixels import to_batch
from gradveil.metrics.psnr import Psnr
from gradveil.models import Normalisation
from gradveil.randomness import stream
from gradveil.scratch import scratch_in
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "standard-against-hand.json"
SEED, PUBLIC = 0, 2000


class Scene(NamedTuple):
    """Updates to attack, and how: ``hand`` is the spec that a person chose, ``free`` the one without settings."""

    dataset: str
    model: str
    targets: int
    hand: str
    free: str


SCENES = (
    Scene(
        "cifar10",
        "convnet:width=16",
        4,
        hand="gs:sign=none,boxed=false,iterations=300",
        free="standard:effort=quick,iterations=300",
    ),
    Scene(
        "cifar10",
        "convnet:width=64",
        2,
        hand="gs:sign=none,boxed=false,iterations=200",
        free="standard:effort=quick,iterations=200",
    ),
    Scene(
        "mnist-5k",
        "lenet-dlg",
        8,
        hand="gs:iterations=1200,sign=none,schedule=cosine,lr=0.3,tv=1e-6",
        free="standard",
    ),
)


def measured(scene: Scene, attack: str, root: Path, scratch: Path) -> dict[str, Any]:
    """Play the clients, attack them, and return figures and CPU seconds."""
    data = load_dataset(scene.dataset, None if scene.dataset == "mnist-5k" else root)
    network = create_model(scene.model, data.shape, data.num_classes, SEED, Normalisation(data.mean, data.std)).eval()
    mine = torch.randperm(len(data.test.labels), generator=torch.Generator().manual_seed(SEED))[: scene.targets].numpy()
    private = to_batch(data.test.images[mine], data.test.labels[mine])
    some = torch.randperm(len(data.train.labels), generator=stream(SEED, "public"))[:PUBLIC].numpy()
    seen = observe(
        network,
        [private[slice(number, number + 1)] for number in range(len(private))],
        threat=ThreatModel.of("labels", "num-examples", "public-data"),
        num_classes=data.num_classes,
        public=PublicKnowledge(to_batch(data.train.images[some], data.train.labels[some])),
    )
    begin = time.process_time()
    with scratch_in(scratch):
        found = build_attack(attack)(seen, torch.Generator().manual_seed(SEED))
    seconds = time.process_time() - begin
    each = [round(value, 2) for value in Psnr()(private.images, found.images[:, 0]).tolist()]
    return {
        "dataset": scene.dataset,
        "model": scene.model,
        "targets": scene.targets,
        "attack": attack,
        "psnr": round(statistics.fmean(each), 2),
        "each": each,
        "seconds": round(seconds, 1),
        "why": found.why[0] if found.why else "",
        "flags": sorted({flag for flags in found.flags or () for flag in flags}),
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the table of docs/attacks.md."""
    head = ["data and network", "images", "attack", "mean PSNR", "least", "CPU seconds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in results["rows"]:
        cells = [f"{row['dataset']}, `{row['model']}`", str(row["targets"]), f"`{row['attack']}`"]
        cells += [f"{row['psnr']:.1f}", f"{min(row['each']):.1f}", f"{row['seconds']:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure both attackers in each scene, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--parts", type=Path, help="folder that keeps finished parts")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.parts or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for number, scene in enumerate(SCENES):
            for kind in ("hand", "free"):
                path = folder / f"{number}-{kind}.json"
                if not path.exists():
                    found = measured(scene, getattr(scene, kind), options.data_root, folder)
                    path.write_text(json.dumps(found))
                rows.append(json.loads(path.read_text()))
                print(rows[-1], flush=True)
    document = {
        "command": "python benchmarks/standard_against_hand.py --data-root DIR",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seeds": [SEED],
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
