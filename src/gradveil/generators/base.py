"""Generators: networks from latent numbers to images in [0, 1], and the one function that loads trained ones."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.config import refuse_code
from gradveil.data.own import MAX_CLASSES
from gradveil.errors import ConfigError, DataError
from gradveil.models.base import call_factory
from gradveil.models.weights import misfits
from gradveil.randomness import global_stream
from gradveil.registry import Component, build, parse_spec
from gradveil.storage import load_tensors, read_metadata
from gradveil.validate import in_range, is_file

KEYS = "trained_on"
"""The tensor of a generator's file that names the images it was trained on, by `gradveil.data.auxiliary.image_keys`."""


@dataclass(frozen=True)
class Generator(Component, ABC):
    """Base of the generators that gradveil can build: frozen settings, like those of a model.

    Attributes:
        latent: length of the latent vector that an image is made from.
    """

    kind: ClassVar[str] = "generators"

    latent: int = 64

    def __post_init__(self) -> None:
        in_range("latent", self.latent, 1)

    @abstractmethod
    def build(self, shape: tuple[int, int, int], num_classes: int) -> "Latent":
        """Build the network for images of ``shape`` (C, H, W); draws its weights from torch's global generator."""


class Latent(nn.Module, ABC):
    """A generator's network. Latents are N(0, 1) in training.

    Attributes:
        latent: length of the latent vector per image.
        conditional: whether it makes images of a given class, passed as ``labels``.
        keys: keys of the images that it was trained on, if its file has them.
    """

    conditional = False
    keys: frozenset[int] = frozenset()

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.latent = latent

    @abstractmethod
    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return images (N, C, H, W) in [0, 1] for latents (N, latent).

        ``labels`` are (N,), or (N, classes) as probabilities; only a conditional generator reads them.
        """


class _Own(Latent):
    """The user's own network, which takes latents only, or latents and labels."""

    def __init__(self, network: nn.Module, latent: int) -> None:
        super().__init__(latent)
        self.network = network
        self.conditional = bool(getattr(network, "conditional", False))

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        images: Tensor = self.network(latents, labels) if self.conditional else self.network(latents)
        return images


def load_generator(text: str, shape: tuple[int, int, int], num_classes: int) -> Latent:
    """Load the generator that ``text`` names, in evaluation mode and frozen.

    Args:
        text: a safetensors file that ``gradveil train-generator`` wrote, or one with only the weights of an `MlpGan`;
            or the user's own ``path/file.py:factory``, a function that returns a torch.nn.Module with a number
            ``latent``.
        shape: (C, H, W) that its images must have.
        num_classes: number of classes of the task.
    """
    if ".py:" in text:
        network = _own(text, shape, num_classes)
    else:
        network = _from_file(Path(text).expanduser(), shape, num_classes)
    network.eval().requires_grad_(False)
    _try(network, text, shape, num_classes)
    return network


def _from_file(path: Path, shape: tuple[int, int, int], num_classes: int) -> Latent:
    if not is_file(path):
        raise ConfigError(
            f"generator must be a safetensors file, or file.py:factory, got {str(path)!r}, which is no file. "
            "Train one: gradveil train-generator."
        )
    tensors = load_tensors(path)
    keys = tensors.pop(KEYS, torch.empty(0, dtype=torch.int64))
    metadata = read_metadata(path)
    spec = metadata.get("generator") or _spec_of_mlp(tensors, path)
    refuse_code(spec, path)
    classes = metadata.get("classes", str(num_classes))
    if not classes.isdecimal() or not 1 <= int(classes[:9]) <= MAX_CLASSES:
        raise DataError(f"Generator {str(path)!r} must state 1 to {MAX_CLASSES:,} classes, got {classes[:20]!r}.")
    with torch.device("meta"):  # only its shapes: a file can't ask for more memory than it has numbers
        problems = misfits(build(Generator, spec).build(shape, int(classes)).state_dict(), tensors)
    if problems:
        raise ConfigError(
            f"Generator {str(path)!r} must make images of shape {shape}, got weights that do not fit: "
            f"{'; '.join(problems)}. Train one on images like those attacked: gradveil train-generator."
        )
    with global_stream(0, "generator"):
        network = build(Generator, spec).build(shape, int(classes))
    network.load_state_dict(tensors, strict=False)
    network.keys = frozenset(keys.tolist())
    return network


def _spec_of_mlp(tensors: dict[str, Tensor], path: Path) -> str:
    """Return the spec for a file without our metadata: three linear layers of a plain sequence."""
    if set(tensors) != {f"{number}.{kind}" for number in (0, 2, 4) for kind in ("weight", "bias")}:
        raise DataError(
            f"Generator {str(path)!r} must be a file of gradveil train-generator, or of layers 0, 2 and 4 of a "
            f"sequence, got {', '.join(sorted(tensors)[:3])}, ... For another network give file.py:factory."
        )
    hidden, latent = tensors["0.weight"].shape
    return f"mlp-gan:latent={latent},hidden={hidden}"


def _own(text: str, shape: tuple[int, int, int], num_classes: int) -> Latent:
    reference, settings = parse_spec(text)
    with global_stream(0, "generator"):
        network = call_factory(reference, {"shape": shape, "num_classes": num_classes}, settings)
    latent = getattr(network, "latent", None)
    if not isinstance(latent, int) or latent < 1:
        raise ConfigError(f"{reference!r} must return a module with a number `latent`, at least 1, got {latent!r}.")
    return network if isinstance(network, Latent) else _Own(network, latent)


@torch.no_grad()
def _try(network: Latent, text: str, shape: tuple[int, int, int], num_classes: int) -> None:
    """Raise ConfigError unless the generator makes images of the right shape in [0, 1]."""
    latents = torch.randn(2, network.latent, generator=torch.Generator().manual_seed(0))
    try:
        images = network(latents, torch.zeros(2, dtype=torch.int64) % num_classes)
    except Exception as error:
        raise ConfigError(
            f"Generator {text!r} must take latents (N, {network.latent}), got {type(error).__name__}: {error}."
        ) from error
    if images.shape != (2, *shape):
        raise ConfigError(f"Generator {text!r} must make images of shape {shape}, got {tuple(images.shape[1:])}.")
    low, high = (float(edge) for edge in images.aminmax())
    if not (low >= 0 and high <= 1):
        raise ConfigError(
            f"Generator {text!r} must make images in [0, 1], got {low:.3g} to {high:.3g}. "
            "Rescale the output of tanh by (x + 1) / 2."
        )
