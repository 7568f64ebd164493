"""Learned perceptual similarity: the base of its two versions, and loading their weights without running code."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.data import data_root
from gradveil.errors import ConfigError, DataError
from gradveil.metrics.base import Metric, MetricUnavailable
from gradveil.storage import load_tensors

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""The published scaling layer: ImageNet's mean and standard deviation, for inputs in [-1, 1]."""
EPSILON = 1e-10
PIXELS_AT_ONCE = 2**18
"""Images are measured in groups of about this many pixels, which bounds the memory of their features."""


@dataclass(frozen=True)
class Lpips(Metric):
    """Base of LPIPS v0.1: compares images by the outputs of some layers of a convolutional trunk.

    Attributes:
        weights: a file with heads and trunk; empty means `default_file` in the data root's folder ``weights/``. With
            ``trunk``, a file with the heads: that of the package ``lpips``, e.g. lpips/weights/v0.1/alex.pth.
        trunk: a file with the trunk alone, such as torchvision's checkpoint; empty if ``weights`` holds it too.
    """

    weights: str = ""
    trunk: str = ""

    higher_is_leakier: ClassVar[bool] = False
    default_file: ClassVar[str]
    """File of heads and trunk below the data root's ``weights`` folder."""
    public_files: ClassVar[tuple[str, str]]
    """Heads of the package ``lpips`` and trunk of torchvision, by the names they are published under."""
    smallest: ClassVar[int]
    """The smallest side, in pixels, that leaves a pixel for each compared layer."""
    compared: ClassVar[Mapping[int, int]]
    """Index of each compared layer, with its number of channels."""

    def __post_init__(self) -> None:
        if self.trunk and not self.weights:
            raise ConfigError(f"weights of metric {self.name!r} must name the heads when trunk is set, got nothing.")

    @staticmethod
    @abstractmethod
    def layers() -> list[nn.Module]:
        """Return the trunk up to the last compared layer, numbered as torchvision's ``features``."""

    def measure(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Compare the features of both, layer by layer, in float32 as published."""
        if truth.shape[1] not in (1, 3):
            raise ConfigError(f"Images for metric {self.name!r} must have 1 or 3 channels, got {truth.shape[1]}.")
        files = tuple(self._find(text) for text in filter(None, (self.weights or self.default_file, self.trunk)))
        features, heads = _load(type(self), files, truth.device)
        size = max(1, PIXELS_AT_ONCE // (truth.shape[2] * truth.shape[3]))
        groups = (slice(start, start + size) for start in range(0, len(truth), size))
        return torch.cat([self._distance(features, heads, truth[group], guess[group]) for group in groups])

    def _distance(self, features: nn.Sequential, heads: list[Tensor], truth: Tensor, guess: Tensor) -> Tensor:
        x, y = self._prepare(truth), self._prepare(guess)
        total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        weights = iter(heads)
        for index, layer in enumerate(features):
            x, y = layer(x), layer(y)
            if index in self.compared:
                difference = (_normalise(x) - _normalise(y)).square()
                total += (next(weights) * difference).sum(1).mean((1, 2)).double()
        return total

    def _prepare(self, images: Tensor) -> Tensor:
        """Return images with three channels, scaled as published, and large enough for the trunk."""
        colour = (2 * images.float() - 1).expand(-1, 3, -1, -1)
        shift, scale = (colour.new_tensor(values).view(3, 1, 1) for values in (SHIFT, SCALE))
        colour = (colour - shift) / scale
        factor = self.smallest / min(colour.shape[2:])
        if factor <= 1:
            return colour
        sides = [max(self.smallest, round(side * factor)) for side in colour.shape[2:]]
        return F.interpolate(colour, size=sides, mode="bilinear", align_corners=False)

    def _find(self, text: str) -> Path:
        """Return the path of a file in the working directory or in the data root's ``weights`` folder."""
        path, folder = Path(text).expanduser(), data_root() / "weights"
        for place in (path, folder / path) if self.weights else (folder / path,):
            if place.is_file():
                return place
        heads, trunk = self.public_files
        raise MetricUnavailable(
            f"Metric {self.name!r} needs pretrained weights, and {folder / path} is not there. Put the file there, or "
            f"name files of the packages lpips and torchvision: {self.name}:weights=PATH/{heads},trunk=PATH/{trunk}."
        )


@lru_cache(maxsize=4)
def _load(kind: type[Lpips], files: tuple[Path, ...], device: torch.device) -> tuple[nn.Sequential, list[Tensor]]:
    """Return trunk and heads on a device; the last few are cached, a failure is not."""
    with torch.device("meta"):  # no weights yet, so none are drawn from the global generator
        features = nn.Sequential(*kind.layers())
    trunk = {f"features.{name}": tensor.shape for name, tensor in features.state_dict().items()}
    lins = {
        f"lin{index}.model.1.weight": torch.Size((1, channels, 1, 1))
        for index, channels in enumerate(kind.compared.values())
    }
    parts = [(files[0], lins | trunk)] if len(files) == 1 else [(files[0], lins), (files[1], trunk)]
    tensors: dict[str, Tensor] = {}
    for path, wanted in parts:
        tensors |= _pick(path, _read(path), wanted, device)
    state = {name.removeprefix("features."): tensors[name] for name in trunk}
    features.load_state_dict(state, assign=True)
    return features.requires_grad_(requires_grad=False).eval(), [tensors[name] for name in lins]


def _read(path: Path) -> Mapping[str, Tensor]:
    """Read tensors by name: .pth and .pt files by torch's loader that refuses code, others as safetensors."""
    if path.suffix not in (".pth", ".pt"):
        return load_tensors(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile bytes can raise anything; torch's own message advises to trust the file
        raise DataError(
            f"{path} must be a whole state dict of tensors and nothing else, got what torch.load(weights_only=True) "
            f"refuses ({type(error).__name__}). Get the file from its publisher again."
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise DataError(f"{path} must be a state dict, tensors by name, got {type(content).__name__} of other things.")
    return content


def _pick(
    path: Path, given: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], device: torch.device
) -> dict[str, Tensor]:
    """Return the wanted tensors of a file, which may hold others, such as torchvision's classifier."""
    for name, shape in wanted.items():
        if name not in given or given[name].shape != shape:
            got = tuple(given[name].shape) if name in given else "none"
            raise DataError(f"{path} must hold {name} of shape {tuple(shape)}, got {got}.")
        if not bool(given[name].isfinite().all()):
            raise DataError(f"{path} must hold finite weights, got NaN or infinity in {name}.")
    return {name: given[name].to(device, torch.float32) for name in wanted}


def _normalise(features: Tensor) -> Tensor:
    """Scale each position's vector of channels to length 1."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + EPSILON)
