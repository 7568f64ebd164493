"""Undo ATS after gradient inversion, with and without a rehearsal on inverted public images.

::

    python benchmarks/untransform.py [--data DIR]       # writes results/untransform.json
    python benchmarks/untransform.py --table            # print the table from the results

Private images are training images, public ones test images; one image behind each update of an untrained lenet-dlg.
Inversions stop early or late: the fewer steps, the larger the errors that a rehearsal can learn.
"""

import argparse
import json
import platform
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gradveil import create_model, load_dataset
from gradveil.attacks import build_attack
from gradveil.attacks.parts.imitation import imitated
from gradveil.attacks.untransform import Untransform
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.metrics.psnr import Psnr
from gradveil.models import Normalisation
from gradveil.randomness import stream
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe

RESULTS = Path(__file__).parents[1] / "results" / "untransform.json"
SEEDS, TARGETS, PUBLIC, REHEARSALS = (0,), 4, 500, 8
DEFENCES = ("ats", "ats:policy=0")
ATTACKS = tuple(
    f"gs:iterations={steps},sign=none,schedule=cosine,lr=0.1,tv=1e-3,adapt=none" for steps in (100, 300)
)  # fmt: skip


def measured(defence: str, attack: str, seed: int, root: Path | None) -> dict[str, Any]:
    """Invert all updates once, and decode them with and without a rehearsal."""
    data = load_dataset("mnist-5k", root)
    order = torch.randperm(len(data.train.labels), generator=stream(seed, "untransform"))[:TARGETS].numpy()
    private = to_batch(data.train.images[order], data.train.labels[order])
    network = create_model("lenet-dlg", data.shape, data.num_classes, seed, Normalisation(data.mean, data.std)).eval()
    seen = observe(
        network,
        [private[slice(number, number + 1)] for number in range(TARGETS)],
        threat=ThreatModel.of("labels", "num-examples", "defence", "public-data"),
        num_classes=data.num_classes,
        defence=build_defence(defence),
        public=PublicKnowledge(to_batch(data.test.images[:PUBLIC], data.test.labels[:PUBLIC])),
    )
    inner = build_attack(attack)
    found = inner.run(seen, stream(seed, "invert"))
    errors = imitated(inner.run, seen, REHEARSALS, stream(seed, "rehearse"))
    row: dict[str, Any] = {"defence": defence, "attack": attack, "seed": seed}
    for name, imitate in (("plain", None), ("rehearsed", errors)):
        images = Untransform().decode(found, seen, stream(seed, "decode"), imitate).images[:, 0]
        row[name] = [round(value, 2) for value in Psnr()(private.images, images).tolist()]
    return row


def table(results: Mapping[str, Any]) -> str:
    """Return the table of docs/hiding-images.md: mean PSNR over targets and seeds."""
    lines = ["| defence | steps of `gs` | not rehearsed | rehearsed |", "|---|---|---|---|"]
    for defence in DEFENCES:
        for attack in ATTACKS:
            own = [row for row in results["rows"] if (row["defence"], row["attack"]) == (defence, attack)]
            means = [statistics.fmean(value for row in own for value in row[key]) for key in ("plain", "rehearsed")]
            steps = attack.partition("iterations=")[2].partition(",")[0]
            lines.append(f"| `{defence}` | {steps} | {means[0]:.1f} | {means[1]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        rows = []
        for defence in DEFENCES:
            for attack in ATTACKS:
                rows += [measured(defence, attack, seed, options.data) for seed in SEEDS]
                print(rows[-1], flush=True)
        document = {
            "command": "python benchmarks/untransform.py",
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seeds": list(SEEDS),
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
