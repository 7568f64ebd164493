"""What a metric is: one number per pair of a true image and a guess."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gradveil.errors import ConfigError, MissingDataError
from gradveil.registry import Component


class MetricUnavailable(MissingDataError):  # noqa: N818 - a state that rows report, with the message as the reason
    """A state in which a metric can't be computed because a file is missing; the message says where to put it."""


@dataclass(frozen=True)
class Metric(Component, ABC):
    """Base of all metrics. A subclass defines `measure`; users call the object, which checks the images first.

    Rows and tables take what they say about a metric from its class; the first line of its docstring explains it.

    Attributes:
        higher_is_leakier: whether a higher value means a guess closer to the private image.
        field: the metric's key in rows; by default its name with underscores.
        head: what stands above its column; by default the key.
        format: how tables write it: digits behind the point, ``%`` for a share, or ``g`` (see `gradveil.rows.Column`).
    """

    kind: ClassVar[str] = "metrics"
    higher_is_leakier: ClassVar[bool]
    field: ClassVar[str] = ""
    head: ClassVar[str] = ""
    format: ClassVar[str] = "g"

    @abstractmethod
    def measure(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Return one value per example, (N,), from images that `__call__` has checked.

        Args:
            truth: (N, C, H, W), float64 in [0, 1], with N >= 1 and at least one pixel.
            guess: the same shape, type and range.
        """

    @final
    def __call__(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Return the metric of each example: (N,), float64, on the CPU, without a gradient.

        Values outside [0, 1] are clamped first, in both. A guess that holds NaN or infinity is no guess: its value is
        NaN, and does not affect the others. Without examples the shape is (0,).

        Args:
            truth: (N, C, H, W), floating point, finite.
            guess: the same shape, in the same order (see `gradveil.metrics.align`).

        Raises:
            ConfigError: the shapes differ or are no images, or the truth is not finite.
            MetricUnavailable: the metric needs a file that is not there.
        """
        check_images(truth, guess)
        if len(truth) != len(guess):
            raise ConfigError(
                "truth and guess must have the same number of images, "
                f"got {tuple(truth.shape)} and {tuple(guess.shape)}. "
                "Bring a batch of guesses into the order of the truth with gradveil.metrics.align."
            )
        usable = is_guess(guess)
        values = torch.full((len(truth),), math.nan, dtype=torch.float64)
        if bool(usable.any()):
            with torch.no_grad():
                result = self.measure(unit(truth, truth.device)[usable], unit(guess, truth.device)[usable])
            if result.shape != (int(usable.sum()),):
                raise ConfigError(
                    f"measure of metric {self.name!r} must return one value per example, "
                    f"got shape {tuple(result.shape)} for {int(usable.sum())} examples."
                )
            values[usable] = result.to("cpu", torch.float64)
        return values


def check_images(truth: Tensor, guess: Tensor) -> None:
    """Raise unless both are batches of images of one size, and the truth is finite."""
    shapes = f"{tuple(truth.shape)} and {tuple(guess.shape)}"
    if truth.ndim != 4 or truth.shape[1:] != guess.shape[1:] or 0 in truth.shape[1:]:
        raise ConfigError(f"truth and guess must be images (N, C, H, W) of one size, got {shapes}.")
    if not (truth.is_floating_point() and guess.is_floating_point()):
        raise ConfigError(
            f"truth and guess must be floating point in [0, 1], got {truth.dtype} and {guess.dtype}. "
            "Divide bytes by 255 first."
        )
    if not bool(truth.isfinite().all()):
        raise ConfigError("truth must be finite, got NaN or infinity: a guess needs a truth to be compared with.")


def is_guess(guess: Tensor) -> Tensor:
    """Return which images are finite and so count as guesses: (N,) bool, on the CPU."""
    return guess.isfinite().flatten(1).all(1).cpu()


def unit(images: Tensor, device: torch.device) -> Tensor:
    """Return a copy clamped to [0, 1] as float64 on a device (on the CPU for Apple's, which has no float64)."""
    place = torch.device("cpu") if device.type == "mps" else device
    return images.detach().to(place).to(torch.float64).clamp(0, 1)
