"""The figures of a row: how near guesses are to the truth, and why a figure is missing."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from gradveil.errors import ConfigError, DataError
from gradveil.metrics.base import Metric, is_guess
from gradveil.metrics.lpips import Lpips
from gradveil.registry import build

METRICS: Mapping[str, str] = {"mse": "mse", "psnr": "psnr", "ssim": "ssim", "lpips": "lpips-alex"}
"""The metric behind each figure of a row."""

Figures = dict[str, float | None]


def score_targets(truth: Tensor, guess: Tensor, root: Path | None = None) -> tuple[list[Figures], list[list[str]]]:
    """Figures of each target (T, B, C, H, W): means over those of its images that there is a guess for.

    Guesses are in the order of the truth, see `gradveil.metrics.align`. ``root`` is the data root, where the weights of
    metrics lie.

    Returns:
        For each target its figures, None where one can't be measured, and the reasons for what is missing.
    """
    targets = len(truth)
    flat = [images.flatten(0, 1).cpu() for images in (truth, guess)]
    guessed = is_guess(flat[1]).view(targets, -1)
    figures: list[Figures] = [{} for _ in range(targets)]
    reasons = [_missing(row.numel(), int(row.sum())) for row in guessed]
    for name, metric in METRICS.items():
        try:
            means = _built(metric, root)(*flat).view(targets, -1).nanmean(1).tolist()
        except (ConfigError, DataError) as error:  # weights are missing or broken, or don't take such images
            means = [math.nan] * targets
            for each in reasons:
                each.append(str(error).split(". ")[0].removesuffix("."))
        for row, mean in zip(figures, means, strict=True):
            row[name] = mean if math.isfinite(mean) else None
    return figures, reasons


def _built(name: str, root: Path | None) -> Metric:
    metric = build(Metric, name)
    if root is None or not isinstance(metric, Lpips) or metric.weights:
        return metric
    return replace(metric, weights=str(root / "weights" / metric.default_file))


def _missing(images: int, guessed: int) -> list[str]:
    if guessed == images:
        return []
    return [f"no guess for {images - guessed} of {images} images" + ", scored are the others" * bool(guessed)]
