"""The yardstick of an audit: blind guesses, and other images among which a guess must find the true one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.parts.label_counts import rounded
from gradveil.audits.settings import AuditSettings
from gradveil.data import Dataset
from gradveil.data.auxiliary import image_keys
from gradveil.data.pixels import to_unit
from gradveil.metrics import align, label_accuracy, score_targets
from gradveil.metrics.columns import build_metric, metric_column
from gradveil.metrics.identification import identified
from gradveil.metrics.recognition import WORSE_THAN_BLIND, recognisable
from gradveil.metrics.scores import score_images
from gradveil.randomness import derive_seed

OTHERS = 1000
"""Other images, at most, among which a guess must find the true one."""
AVERAGE, MEAN, GREY = "class average", "mean image", "grey picture"
"""The blind guesses: of someone who knows the label, who knows nothing, and if there are no public images."""


@dataclass(frozen=True)
class Yardstick:
    """What the guesses of an attack are compared with; it depends on the data and the targets alone.

    Attributes:
        averages: the mean public image of each class, (classes, C, H, W); that of all images if a class has none.
        mean: the mean public image, (C, H, W), or None if no image is public.
        others: images that are no targets, (K, C, H, W).
        shares: each class's share of the public images, (classes,); equal ones if no image is public.
    """

    averages: Tensor
    mean: Tensor | None
    others: Tensor
    shares: Tensor

    def guess(self, truth: Tensor, labels: Tensor, informed: bool) -> Tensor:
        """Return the blind guess of a batch (B, C, H, W), in the order of the truth like any other guess."""
        if self.mean is None:
            return torch.full_like(truth, 0.5)
        return align(truth, self.averages[labels]) if informed else self.mean.expand_as(truth).clone()

    def name(self, informed: bool) -> str:
        """Return what the blind guess is."""
        return GREY if self.mean is None else AVERAGE if informed else MEAN


def yardstick(dataset: Dataset, targets: Tensor, seed: int) -> Yardstick:
    """Return the yardstick of some targets, (N, C, H, W).

    Public images are the test images that are nobody's training images, whatever the attacker was granted. The other
    images are drawn from the training images that are no targets, and from public ones if these are too few.
    """
    private, test = image_keys(dataset.train.images), image_keys(dataset.test.images)
    public = np.flatnonzero(~np.isin(test, private))
    images, labels = to_unit(dataset.test.images[public]), torch.from_numpy(dataset.test.labels[public])
    own = [images[labels == c] if bool((labels == c).any()) else images for c in range(dataset.num_classes)]
    averages = torch.stack([some.mean(0) for some in own]) if len(public) else images[:0]
    chosen = np.flatnonzero(~np.isin(private, image_keys(targets.cpu().numpy())))
    chosen = np.random.default_rng(derive_seed(seed, "candidates")).permutation(chosen)[:OTHERS]
    others = torch.cat([to_unit(dataset.train.images[chosen]), images[: OTHERS - len(chosen)]])
    counts = torch.bincount(labels, minlength=dataset.num_classes) + float(not len(public))
    return Yardstick(averages, images.mean(0) if len(public) else None, others, counts / counts.sum())


def judged(
    truth: Tensor,
    guess: Tensor,
    labels: Tensor,
    informed: Sequence[bool],
    rule: Yardstick,
    settings: AuditSettings,
    root: Path | None = None,
) -> list[dict[str, Any]]:
    """Return, for each target, the fields of its row that compare its guesses with blind ones, image by image.

    Args:
        truth: the private images, (T, B, C, H, W).
        guess: the attack's guesses in the order of the truth.
        labels: of the private images, (T, B).
        informed: for each target, whether the attacker knows labels or guessed any: then it could guess their averages.
        rule: what to compare with.
        settings: those of the audit, which name the metrics.
        root: the data root, which holds the weights of metrics.
    """
    blind = torch.stack([rule.guess(*each) for each in zip(truth, labels, informed, strict=True)])
    figures, _ = score_targets(truth, blind, root, settings.metrics)
    specs = _specs(settings)
    ours, theirs = (score_images(truth, images, metrics=specs)[0] for images in (guess, blind))
    passed = None
    if "ssim" in ours:
        passed = recognisable(ours["ssim"], ours.get("psnr"), theirs["ssim"], theirs.get("psnr"))
    picked, by_blind = (
        identified(truth.flatten(0, 1), images.flatten(0, 1), rule.others).view(len(truth), -1).float().mean(1).tolist()
        for images in (guess, blind)
    )
    rows = []
    for number, known in enumerate(informed):
        rows.append(
            {
                "images": truth.shape[1],
                "images_recognisable": None if passed is None else int(passed[number].sum()),
                "identified": picked[number],
                "candidates": len(rule.others) + 1,
                "blind": rule.name(known),
                "blind_identified": by_blind[number],
                "blind_label_accuracy": label_accuracy(labels[number], rounded(rule.shares, truth.shape[1])),
                **{f"blind_{key}": value for key, value in figures[number].items()},
                **_lists({key: values[number] for key, values in ours.items()}),
                "flags": [WORSE_THAN_BLIND] * _worse(ours, theirs, number),
            }
        )
    return rows


def _worse(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], number: int) -> bool:
    """Return whether a target's mean PSNR is below that of its blind guess; False if there is no guess."""
    return "psnr" in ours and bool(ours["psnr"][number].nanmean() < theirs["psnr"][number].nanmean())


def _lists(figures: Mapping[str, Tensor]) -> dict[str, list[float] | None]:
    """Return PSNR and SSIM of each guessed image of a batch, the largest first, or None for a single image."""
    lists: dict[str, list[float] | None] = {"image_psnr": None, "image_ssim": None}
    leak = figures.get("psnr", figures.get("ssim"))
    if leak is None or len(leak) == 1:
        return lists
    order = [place for place in leak.argsort(descending=True).tolist() if bool(leak[place].isfinite())]
    return lists | {
        f"image_{key}": [round(float(values[place]), 4) for place in order] for key, values in figures.items()
    }


def _specs(settings: AuditSettings) -> list[str]:
    """Return the audit's metrics that decide what is recognisable."""
    return [spec for spec in settings.metrics if metric_column(build_metric(spec)).key in ("ssim", "psnr")]
