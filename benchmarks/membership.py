"""Measure how well attacks tell a client's training images from others; write docs/membership.md.

Run from the root of the repository, with the data sets in FOLDER:

    python benchmarks/membership.py --data FOLDER --seeds 3
    python benchmarks/membership.py --page          # only write the page again from results/membership.json

Training and test images of each set are first mixed and divided anew: in some published sets they differ, and then an
attack that only tells one set from the other would look like one that finds members. All attacks judge the same
candidates of the same training, whose last round is attacked. Figures that are there already are not measured again.
"""

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from gradveil.attacks import MembershipAttack
from gradveil.audits.membership import infer_membership
from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.datasets import Split
from gradveil.registry import build
from gradveil.report.summary import interval

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "membership.json", ROOT / "docs" / "membership.md"
FEW = {"clients": 5, "rounds": 3, "epochs": 10, "partition": "iid:images=200"}
CASES: dict[str, dict[str, Any]] = {
    "mnist-5k, one epoch": {"dataset": "mnist-5k", "model": "lenet5", "rounds": 10},
    "mnist-5k, few images": {"dataset": "mnist-5k", "model": "lenet5", **FEW},
    "pneumoniamnist, few images": {"dataset": "pneumoniamnist.npz", "model": "lenet5", **FEW},
    "cifar10, few images": {"dataset": "cifar10", "model": "lenet5", "lr": 0.02, **FEW},
    "cifar10, few images, dp-sgd": {
        "dataset": "cifar10", "model": "lenet5", "lr": 0.02, **FEW, "defence": "dp-sgd:noise=4.0",
    },
}  # fmt: skip
ATTACKS = ("boundary:queries=250", "lira", "rmia", "rmia:play=training,shadows=4")
TEST = 2000
"""Images at most that are no client's, of which 500 or half are public."""


def divided(dataset: Dataset, seed: int = 0) -> Dataset:
    """Return the set with its training and test images mixed and divided anew: at most `TEST` are test images."""
    images = np.concatenate([dataset.train.images, dataset.test.images])
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    order = np.random.default_rng(seed).permutation(len(images))
    count = min(TEST, len(dataset.test))
    parts = (Split(images[own], labels[own]) for own in (order[count:], order[:count]))
    train, test = parts
    return dataclasses.replace(dataset, train=train, test=test)


def measured(case: str, attack: str, adaptive: bool, seed: int, data: Path) -> dict[str, Any]:
    """Return the figures of one attack on the last round of one training."""
    facts = dict(CASES[case])
    place = facts.pop("dataset")
    dataset = divided(load_dataset(str(data / place) if place.endswith(".npz") else place, data))
    settings = TrainSettings(**facts, dataset=place, seed=seed)
    spec = f"{attack}{',' if ':' in attack else ':'}every={settings.rounds}"
    started = time.process_time()
    (row,) = infer_membership(
        settings, build(MembershipAttack, spec), dataset=dataset, adaptive=adaptive, apart=True, data_root=data
    )
    kept = ("auc", "auc_low", "auc_high", "tpr_at_1_fpr", "auc_loss", "members", "why")
    figures = {key: round(row[key], 4) if isinstance(row[key], float) else row[key] for key in kept}
    gap = round(row["accuracy_members"] - row["accuracy_non_members"], 4)
    seconds = round(time.process_time() - started, 1)
    own = {"case": case, "attack": attack, "adaptive": adaptive, "seed": seed}
    return own | figures | {"gap": gap, "cpu_seconds": seconds}


def wanted(seeds: int) -> Iterator[tuple[str, str, bool, int]]:
    """Yield everything to measure: attacks with shadow models are played a second time if there is a defence.

    Trainings under the defence are slow, so that only the first seed is measured.
    """
    for seed in range(seeds):
        for case, facts in CASES.items():
            if seed and "defence" in facts:
                continue
            for attack in ATTACKS:
                yield case, attack, False, seed
                if "defence" in facts and not attack.startswith("boundary"):
                    yield case, attack, True, seed


def page(results: Mapping[str, Any]) -> str:
    """Return docs/membership.md."""
    return f"""# Membership

Was this image used for training? `boundary` asks a client's model for labels only. `lira` and `rmia` compare its
outputs with those of shadow models, which the server plays with public images (`gradveil describe lira`). This page is
made from `results/membership.json` by `benchmarks/membership.py`; a test checks that they agree.
Measured {results["date"]} with Python {results["python"]}, torch {results["torch"]}: `{results["command"]}`.

The attacked model is that of a random client in the last round, as the server knows it from the client's update.
Members are the client's images. The others are as many images of the same classes that nobody trained on and that are
not public. Training and test images were mixed and divided anew first, so that both come from one distribution.
AUC is the mean over seeds with its 95 % t interval, or for one seed with its interval over images; 0.5 is guessing.
TPR is the share of the members that are found while 1 % of the others are taken for members. "AUC, loss" is a threshold
on the loss alone. Seconds are the computing time of one attack, with the training that it attacks.

{_table(results["rows"])}

| case | settings |
|---|---|
{chr(10).join(f"| {case} | `{_options(facts)}` |" for case, facts in results["cases"].items())}

In the mean over seeds:

{_verdict(results["rows"])}

`play=round` (the default) begins shadow models at the model that was broadcast in the attacked round: it asks what this
client's round added. `play=training` plays the whole training again, from the same initial weights, with fewer images
per client. Adaptive attackers know the defence and play shadow models under it.
"""


def _options(facts: Mapping[str, Any]) -> str:
    return " ".join(f"--{key} {value}" for key, value in facts.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "| case | seeds | attack | attacker | AUC | TPR at 1 % FPR | AUC, loss | accuracy gap | seconds |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for (case, attack, adaptive), own in _groups(rows).items():
        auc = [row["auc"] for row in own]
        low, high = interval(auc) or (own[0]["auc_low"], own[0]["auc_high"])
        mean = {key: fmean(row[key] for row in own) for key in ("tpr_at_1_fpr", "auc_loss", "gap", "cpu_seconds")}
        lines.append(
            f"| {case} | {len(own)} | `{attack}` | {'adaptive' if adaptive else 'plain'} | {fmean(auc):.3f} "
            f"[{max(low, 0):.2f}, {min(high, 1):.2f}] | {100 * mean['tpr_at_1_fpr']:.1f} % | {mean['auc_loss']:.3f} | "
            f"{100 * mean['gap']:+.1f} % | {mean['cpu_seconds']:.0f} |"
        )
    return "\n".join(lines)


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return in words which attacks beat boundary in the mean over seeds, and by how much."""
    told = []
    groups = _groups(rows)
    for case in dict.fromkeys(row["case"] for row in rows):
        areas = {key[1:]: fmean(row["auc"] for row in own) for key, own in groups.items() if key[0] == case}
        base = areas.pop((ATTACKS[0], False))
        (attack, adaptive), best = max(areas.items(), key=lambda item: item[1])
        name = f"`{attack}`{' (adaptive)' if adaptive else ''}"
        told.append(
            f"- {case}: the best attack with shadow models is {name} with {best:.3f}; `boundary` has {base:.3f}."
        )
    return "\n".join(told)


def _groups(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, bool], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["case"], row["attack"], row["adaptive"]), []).append(row)
    return dict(sorted(found.items(), key=lambda item: list(CASES).index(item[0][0])))


def main() -> None:
    """Measure what is missing, and write the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if not options.page:
        known = {tuple(row[key] for key in ("case", "attack", "adaptive", "seed")) for row in results["rows"]}
        results |= {
            "command": f"python benchmarks/membership.py --data FOLDER --seeds {options.seeds}",
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seeds": options.seeds,
            "cases": CASES,
        }
        for what in wanted(options.seeds):
            if what not in known:
                results["rows"].append(measured(*what, options.data))
                print(results["rows"][-1], flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
