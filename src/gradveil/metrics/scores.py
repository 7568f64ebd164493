"""The figures of a row: how near guesses are to the truth, and why a figure is missing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
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
    values, reasons = score_images(truth, guess, root, metrics)
    means = {key: each.nanmean(1).tolist() for key, each in values.items()}
    figures: list[Figures] = [
        {key: each[target] if math.isfinite(each[target]) else None for key, each in means.items()}
        for target in range(len(truth))
    ]
    return figures, reasons


def score_images(
    truth: Tensor, guess: Tensor, root: Path | None = None, metrics: Sequence[str] = STANDARD
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Score each image of each target, (T, B, C, H, W), with the arguments of `score_targets`.

    Returns:
        The values (T, B) by the metrics' fields, NaN if one can't be measured; and for each target the reasons why
        values are missing.
    """
    targets = len(truth)
    flat = [images.flatten(0, 1).cpu() for images in (truth, guess)]
    guessed = is_guess(flat[1]).view(targets, -1)
    values: dict[str, Tensor] = {}
    reasons = [_missing(row.numel(), int(row.sum())) for row in guessed]
    for metric in map(build_metric, metrics):
        found = torch.full(guessed.shape, math.nan, dtype=torch.float64)
        try:
            found = _with_weights(metric, root)(*flat).view(targets, -1)
        except (ConfigError, DataError) as error:  # weights are missing or broken, or don't take such images
            for each in reasons:
                each.append(str(error).split(". ")[0].removesuffix("."))
        except Exception as error:  # a user's own metric; the other figures remain
            first = (str(error).splitlines() or [""])[0]
            for each in reasons:
                each.append(f"Metric {metric.name!r} failed: {type(error).__name__}: {first}")
        values[metric_column(metric).key] = found
    return values, reasons


def _with_weights(metric: Metric, root: Path | None) -> Metric:
    """Return the metric with its weights below the data root, if it needs any and names none."""
    if root is None or not isinstance(metric, Lpips) or metric.weights:
        return metric
    return replace(metric, weights=str(root / "weights" / metric.default_file))


def _missing(images: int, guessed: int) -> list[str]:
    if guessed == images:
        return []
    return [f"no guess for {images - guessed} of {images} images" + ", scored are the others" * bool(guessed)]
