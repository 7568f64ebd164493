"""Attacks on updates under FedKL: with and without the lock, and with a shared key or lock."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from gradveil.attacks import build_attack
from gradveil.data import Dataset, load_dataset
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.metrics import MetricUnavailable, score_targets
from gradveil.metrics.lpips_alex import LpipsAlex
from gradveil.metrics.rmse import Rmse
from gradveil.models import create_model
from gradveil.progress import listening
from gradveil.randomness import derive_seed, stream
from gradveil.reproduce.base import Lab, Result, picture_lines, rounded
from gradveil.reproduce.trainings import thinned
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch, Tensors

LOCKED, WIDE = "fedkl:lock=common,scale=paper", "fedkl:init=uniform,lock=common,scale=paper"
"""The server hands out the initial lock, as in the paper; WIDE draws it within 0.5, as in the authors' attacks."""
ATTACKS: Mapping[str, str] = {
    "dlg": "dlg:iterations={short}",
    "gs": "gs:iterations={long},restarts={starts},sign=none,schedule=cosine,lr=0.3,tv=1e-6",
    "grnn": "grnn:iterations={long}",
    "ggl": "ggl:iterations={short}",
}
"""The attacks by name; {short} counts L-BFGS steps or CMA-ES generations, {long} all other steps."""
MOST_PRIOR_IMAGES = 2000
"""At most this many test images serve as public data for attacks with a prior."""


@dataclass(frozen=True)
class Attacked:
    """True and reconstructed images, (T, C, H, W) each, and the number of targets on which the attack converged."""

    truth: Tensor
    guess: Tensor
    converged: int


def attacked(
    lab: Lab,
    data: Dataset,
    defence: str,
    attack: str,
    knows: Sequence[str],
    *,
    targets: int,
    tell: Callable[[float], None],
) -> Attacked:
    """Attack gradients of single images on an untrained lenet-dlg; the label is known, as in the authors' code.

    Test images serve as public data for attacks that need it.
    """
    rng = stream(lab.seed, "reproduce", "fedkl", "targets")
    chosen = torch.randperm(len(data.train), generator=rng)[:targets].numpy()
    whole = to_batch(data.train.images[chosen], data.train.labels[chosen])
    truth, private = whole.images, [whole[t : t + 1] for t in range(targets)]
    network = create_model("lenet-dlg", data.shape, data.num_classes, derive_seed(lab.seed, "fedkl")).eval()
    attacker = build_attack(attack)
    threat = ThreatModel(ThreatModel.of("labels", "num-examples", *knows).knows | attacker.needs)
    seen = observe(
        network,
        private,
        threat=threat,
        num_classes=data.num_classes,
        defence=build_defence(defence),
        public=PublicKnowledge(_public(data)),
        federation=Federation(seed=lab.seed),
    )

    def work() -> Tensors:
        with listening(tell):
            result = attacker(seen, stream(lab.seed, "reproduce", "fedkl", attack))
        return {"guess": result.images[:, 0], "converged": result.converged}

    found = lab.tensors_once(("attack", data.name, defence, attack, sorted(threat.knows), targets), work)
    return Attacked(truth, found["guess"], int(found["converged"].sum()))


def _public(data: Dataset) -> Batch:
    some = thinned(data.test, MOST_PRIOR_IMAGES)
    return to_batch(some.images, some.labels)


def figures_of(found: Attacked, root: Path | None) -> dict[str, float | None]:
    """Return means over the targets: our metrics, and the paper's metrics under their true names."""
    whole, _ = score_targets(found.truth[:, None], found.guess[:, None], root)
    rmse = 255 * Rmse()(found.truth, found.guess)
    means: dict[str, float | None] = {name: _mean([row[name] for row in whole]) for name in ("psnr", "ssim", "lpips")}
    return {
        **means,
        "rmse_255": float(rmse.nanmean()),
        "psnr_from_rmse": float((10 * (255**2 / rmse.clamp_min(1e-9)).log10()).nanmean()),
        "lpips_on_0_255": _raw_lpips(found, root),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _raw_lpips(found: Attacked, root: Path | None) -> float | None:
    """Return LPIPS of pixels from 0 to 255, as in the authors' code, though the network expects -1 to 1."""
    metric = LpipsAlex() if root is None else LpipsAlex(weights=str(root / "weights" / LpipsAlex.default_file))
    usable = found.guess.flatten(1).isfinite().all(1)
    pair = [(255 * images[usable].double() + 1) / 2 for images in (found.truth, found.guess)]
    try:
        value = float(metric.measure(*pair).mean()) if bool(usable.any()) else math.nan
    except MetricUnavailable:
        return None
    return value if math.isfinite(value) else None


def _specs(lab: Lab) -> dict[str, str]:
    """Return the attack specs with the number of steps of this scale."""
    sizes = {"short": lab.pick(8, 100, 500), "long": lab.pick(20, 1500, 20_000), "starts": lab.pick(1, 8, 8)}
    return {name: spec.format(**sizes) for name, spec in ATTACKS.items()}


# --- Tables 4 to 6: with and without the lock -------------------------------------------------------------------------

PAPER_6 = {
    ("dlg", "mnist", False): "49.97 / 32.71 / 0.724",
    ("dlg", "mnist", True): "140.87 / 26.64 / -0.003",
    ("dlg", "cifar10", False): "29.62 / 41.14 / 0.724",
    ("dlg", "cifar10", True): "98.76 / 28.20 / 0.006",
    ("grnn", "mnist", False): "0.35 / 52.78 / 1.000",
    ("grnn", "mnist", True): "103.46 / 28.00 / 0.108",
    ("grnn", "cifar10", False): "0.78 / 49.29 / 1.000",
    ("grnn", "cifar10", True): "92.12 / 28.52 / 0.101",
}


def table_6(lab: Lab) -> Result:
    """Compare attacks without the lock, with it, and with it by an attacker who also searches its scales."""
    cases = {
        "none": ("none", ()),
        "FedKL": (LOCKED, ()),
        "FedKL, scales searched": (LOCKED, ("defence",)),
        "FedKL, lock within 0.5": (WIDE, ()),
        "FedKL, lock within 0.5, scales searched": (WIDE, ("defence",)),
    }
    specs, targets = _specs(lab), lab.pick(2, 4, 32)
    datasets = lab.pick(("mnist-5k",), ("mnist-5k", "cifar10"), ("mnist", "cifar10", "cifar100"))
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Figure] = {}
    total = len(datasets) * len(specs) * len(cases)
    for dataset in datasets:
        data = load_dataset(dataset, lab.data_root)
        shown: dict[str, Tensor] = {}
        for name, spec in specs.items():
            for case, (defence, knows) in cases.items():
                tell = lab.telling(f"{name} on {dataset}, {case}", len(rows), total)
                found = attacked(lab, data, defence, spec, knows, targets=targets, tell=tell)
                shown |= {"truth": found.truth, f"{name}, {case}": found.guess}
                figures = {key: rounded(value) for key, value in figures_of(found, lab.data_root).items()}
                paper = PAPER_6.get((name, "mnist" if "mnist" in dataset else dataset, case != "none"))
                rows.append(
                    {"dataset": dataset, "attack": spec, "defence": case, **figures,
                     "converged": f"{found.converged} of {targets}",
                     "paper_rmse_psnr_ssim": paper if "searched" not in case else None}
                )  # fmt: skip
        pictures[f"pictures-{dataset}"] = picture_lines(shown)
    return Result(rows, _notes(targets), pictures)


# --- Table 7: what the client shares ----------------------------------------------------------------------------------

SHARED: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "nothing, scales at random": (("defence",), "none", "fails"),
    "nothing, scales searched": (("defence",), "joint", ""),
    "key": (("defence", "key"), "known", "recovers"),
    "lock's gradient": (("defence", "lock"), "known", "fails"),
    "both": (("defence", "key", "lock"), "known", "recovers best"),
}
"""By what the client shares: the attacker's knowledge, its countermove, and the outcome in the paper."""


def table_7(lab: Lab) -> Result:
    """Compare reconstructions when the client shares its key, its lock's gradient, both or nothing."""
    targets = lab.pick(2, 4, 32)
    datasets = lab.pick(("mnist-5k",), ("mnist-5k", "cifar10"), ("mnist", "cifar10", "cifar100"))
    specs = [spec for name, spec in _specs(lab).items() if name != "dlg"]
    rows: list[dict[str, Any]] = []
    pictures: dict[str, Figure] = {}
    for dataset in datasets:
        data = load_dataset(dataset, lab.data_root)
        for spec in specs:
            shown: dict[str, Tensor] = {}
            for shared, (knows, move, paper) in SHARED.items():
                tell = lab.telling(f"{dataset}, {shared}", len(rows), len(SHARED) * len(datasets) * len(specs))
                attack = f"{spec},adapt={move}"
                found = attacked(lab, data, LOCKED, attack, knows, targets=targets, tell=tell)
                shown |= {"truth": found.truth, shared: found.guess}
                figures = {key: rounded(value) for key, value in figures_of(found, lab.data_root).items()}
                rows.append({"dataset": dataset, "attack": spec, "shared": shared, **figures, "paper": paper or None})
            pictures[f"shared-{dataset}-{spec.partition(':')[0]}"] = picture_lines(shown)
    notes = [
        *_notes(targets),
        "In the paper the server hands out the initial lock (`lock=common`), so the key alone reveals scales and "
        "shifts in round 1. The paper says that the lock's gradient does not reveal the key (Section 4.4); it does, by "
        "one division.",
    ]
    return Result(rows, notes, pictures)


def _notes(targets: int) -> list[str]:
    return [
        f"lenet-dlg, untrained, all weights uniform within 0.5, {targets} images, one per update, labels known; "
        f"defence `{LOCKED}`. The paper resizes to 32x32 and shows single images. BatchNorm uses running statistics.",
        "The paper calls `rmse_255` MSE, `psnr_from_rmse` PSNR (10 log10(255^2 / RMSE)), and `lpips_on_0_255` LPIPS "
        "(AlexNet); `psnr`, `ssim` and `lpips` are the standard metrics.",
        "Attacks: DLG, GRNN and GGL as in the paper, and GS in addition. GGL uses CMA-ES to search the principal "
        "components of test images; the paper uses a trained GAN.",
    ]
