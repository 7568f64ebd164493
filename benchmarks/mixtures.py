"""Decode mixtures from inverted gradients: Mixup of a client's images, long searches of gs, and `unmix` on its guesses.

Each update is the gradient of one mixture. The private images are drawn from the training set, the public ones from the
test set. Run from the root of the repository: python benchmarks/mixtures.py --data FOLDER
"""

import argparse
import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from time import process_time

import torch

from gradveil import create_model, load_dataset
from gradveil.attacks import build_attack
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.parts.imitation import imitated
from gradveil.attacks.unmix import Unmix
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import align
from gradveil.metrics.psnr import Psnr
from gradveil.randomness import stream
from gradveil.threat import Knowledge, Observation, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

MODEL, PUBLIC = "lenet-dlg", 500


def scene(data: Path | None, dataset: str, images: int, seed: int) -> tuple[Batch, Batch]:
    """Return private and public images."""
    whole = load_dataset(dataset, data)
    order = torch.randperm(len(whole.train), generator=stream(seed, "mixtures", "targets"))[:images].numpy()
    private = to_batch(whole.train.images[order], whole.train.labels[order])
    return private, to_batch(whole.test.images[-PUBLIC:], whole.test.labels[-PUBLIC:])


def observed(private: Batch, public: Batch, defence: str, rounds: int, seed: int) -> Observation:
    """Return what the server sees: one gradient per mixture, with all that any of the attackers knows."""
    channels, height, width = private.images.shape[1:]
    network = create_model(MODEL, (channels, height, width), 10, seed).eval()
    return observe(
        network,
        [private],
        threat=ThreatModel.of("labels", "num-examples", "defence", "public-data", "encodings", "mixing"),
        num_classes=10,
        defence=build_defence(defence),
        protocol=Protocol(LocalSettings("fedsgd", batch_size=1, batch_norm="freeze"), rounds=rounds),
        public=PublicKnowledge(public),
        federation=Federation(aux=public, seed=seed),
    )


def figures(truth: torch.Tensor, guesses: torch.Tensor) -> list[float]:
    """Return the PSNR of each image, after assignment."""
    return [round(value, 2) for value in Psnr()(truth, align(truth, guesses)).tolist()]


def measured(options: argparse.Namespace) -> dict[str, object]:
    """Invert all mixtures once, and decode them with each attacker's knowledge, rehearsed and not."""
    private, public = scene(options.data, options.dataset, options.images, options.seed)
    seen = observed(private, public, options.defence, options.mixtures, options.seed)
    attack = build_attack(options.attack)
    began = process_time()
    found: Reconstruction = attack.run(
        seen.without(Knowledge.ENCODINGS, Knowledge.MIXING), stream(options.seed, "mixtures", "gs")
    )
    seconds = process_time() - began
    played = seen.without(Knowledge.MIXING)
    errors = imitated(attack.run, played, options.rehearsals, stream(options.seed, "mixtures", "played"), Unmix.keep)
    encoded = Encodings().run(seen, stream(options.seed, "mixtures", "encodings")).images
    inverted = Psnr()(encoded.flatten(0, 1), found.images.flatten(0, 1))
    rows = []
    for name, hidden in (
        ("blind", (Knowledge.LABELS, Knowledge.ENCODINGS, Knowledge.MIXING)),
        ("soft labels", (Knowledge.ENCODINGS, Knowledge.MIXING)),
        ("mixing", (Knowledge.ENCODINGS,)),
    ):
        for rehearsals, imitate in ((0, None), (options.rehearsals, errors)):
            began = process_time()
            rng = stream(options.seed, "mixtures", "decode")
            decoded = Unmix().decode(found, seen.without(*hidden), rng, imitate)
            values = figures(private.images, decoded.images.flatten(0, 1))
            rows.append({
                "decoder": name, "rehearsals": rehearsals, "psnr": round(sum(values) / len(values), 2),
                "best": max(values), "each": values, "seconds": round(process_time() - began, 1),
            })  # fmt: skip
    return {
        "inverted_psnr": round(float(inverted.mean()), 2), "gs_seconds": round(seconds, 1), "rows": rows,
    }  # fmt: skip


def main() -> None:
    """Measure, print, and add the run to the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--defence", default="mixup:k=4,pool=data")
    parser.add_argument("--attack", default="gs:iterations=3000,sign=none,schedule=cosine,lr=0.1,tv=1e-3,adapt=none")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--mixtures", type=int, default=160)
    parser.add_argument("--rehearsals", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/mixtures.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown = {key: value for key, value in vars(options).items() if key not in ("data", "out")}
    result = {
        "command": "python benchmarks/mixtures.py --data FOLDER "
        + " ".join(f"--{key} {value}" for key, value in shown.items()),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "model": MODEL,
        **measured(options),
    }
    before = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    runs = [run for run in before if run["command"] != result["command"]] + [result]
    options.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
