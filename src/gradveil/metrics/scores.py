"""The figures of a row: how near guesses are to the truth, and why a figure is missing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from gradveil.errors import ConfigError, DataError
from gradveil.metrics.base import Metric, is_guess
from gradveil.metrics.columns import STANDARD, build_metric, metric_column
from gradveil.metrics.lpips import Lpips

Figures = dict[str, float | None]


def score_targets(
    truth: Tensor, guess: Tensor, root: Path | None = None, metrics: Sequence[str] = STANDARD
) -> tuple[list[Figures], list[list[str]]]:
    """Score the guesses of each target, (T, B, C, H, W): means over the target's images that have a guess.

    Args:
        truth: the private images.
        guess: the guesses in the order of the truth, see `gradveil.metrics.align`.
        root: the data root, which holds the weights of metrics.
        metrics: the metrics to compute, by name or as ``file.py:Class``.

    Returns:
        The figures of each target by the metrics' fields, None if one can't be measured; and for each target the
        reasons why figures are missing.
    """
    targets = len(truth)
    flat = [images.flatten(0, 1).cpu() for images in (truth, guess)]
    guessed = is_guess(flat[1]).view(targets, -1)
    figures: list[Figures] = [{} for _ in range(targets)]
    reasons = [_missing(row.numel(), int(row.sum())) for row in guessed]
    for metric in map(build_metric, metrics):
        try:
            means = _with_weights(metric, root)(*flat).view(targets, -1).nanmean(1).tolist()
        except (ConfigError, DataError) as error:  # weights are missing or broken, or don't take such images
            means = [math.nan] * targets
            for each in reasons:
                each.append(str(error).split(". ")[0].removesuffix("."))
        except Exception as error:  # a user's own metric; the other figures remain
            means = [math.nan] * targets
            first = (str(error).splitlines() or [""])[0]
            for each in reasons:
                each.append(f"Metric {metric.name!r} failed: {type(error).__name__}: {first}")
        for row, mean in zip(figures, means, strict=True):
            row[metric_column(metric).key] = mean if math.isfinite(mean) else None
    return figures, reasons


def _with_weights(metric: Metric, root: Path | None) -> Metric:
    """Return the metric with its weights below the data root, if it needs any and names none."""
    if root is None or not isinstance(metric, Lpips) or metric.weights:
        return metric
    return replace(metric, weights=str(root / "weights" / metric.default_file))


def _missing(images: int, guessed: int) -> list[str]:
    if guessed == images:
        return []
    return [f"no guess for {images - guessed} of {images} images" + ", scored are the others" * bool(guessed)]
