"""Models: settings that build a torch.nn.Module for a shape and a number of classes, and its normalisation."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gradveil.errors import ConfigError
from gradveil.models.trunk import trunk_of
from gradveil.own import is_own, load_own
from gradveil.randomness import global_stream
from gradveil.registry import Component, build, parse_spec
from gradveil.validate import in_range, one_of

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "leaky-relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}
INITIALISATIONS = ("default", "uniform")
NORMS = ("batch", "group")
MOST_GROUPS = 16


SMALL_MODEL = 10_000_000
"""Numbers of a model that may always be built."""


@dataclass(frozen=True)
class Normalisation:
    """Per-channel (x - mean) / std, applied by the model itself, so that images are in [0, 1] everywhere else.

    Attributes:
        mean: subtracted; one number per channel, or one for all channels.
        std: divisor; as many numbers as ``mean``, each above 0.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ConfigError(f"mean and std must each have one number per channel, got {self.mean} and {self.std}.")
        for mean, std in zip(self.mean, self.std, strict=True):
            in_range("mean", mean)
            in_range("std", std, 0, open_low=True)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise images (N, C, H, W)."""
        mean, std = _columns(self, images.dtype, images.device)
        return (images - mean) / std


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def parse_normalisation(text: str, channels: int, also: str = "") -> Normalisation | None:
    """Parse a normalisation: none, imagenet or mean/std. ``also`` names further choices in the error message.

    Example:
        >>> parse_normalisation("0.5/0.25", channels=3)
        Normalisation(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    """
    if text == "none":
        return None
    if text == "imagenet":
        chosen = IMAGENET
    else:
        try:
            mean, std = (tuple(float(value) for value in part.split(",")) for part in text.split("/"))
        except ValueError as error:
            raise ConfigError(f"normalise must be {also}imagenet, none or mean/std, got {text!r}.") from error
        try:
            chosen = Normalisation(
                mean * channels if len(mean) == 1 else mean, std * channels if len(std) == 1 else std
            )
        except ConfigError as error:
            raise ConfigError(f"normalise must have a mean and a positive std, got {text!r}: {error}") from error
    if len(chosen.mean) != channels:
        raise ConfigError(f"normalise must have a mean and a std for each of {channels} channels, got {text!r}.")
    return chosen


@cache
def _columns(normalisation: Normalisation, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and std as (C, 1, 1) tensors, cached because every step of every client needs them."""
    with torch.inference_mode(False):
        mean = torch.tensor(normalisation.mean, dtype=dtype, device=device).view(-1, 1, 1)
        return mean, torch.tensor(normalisation.std, dtype=dtype, device=device).view(-1, 1, 1)


class PixelMean(nn.Module):
    """Mean of each channel, (N, C, H, W) to (N, C); torch's adaptive pooling is slow under vmap, and warns about it."""

    def forward(self, images: Tensor) -> Tensor:
        """Average over the pixels."""
        return images.mean((2, 3))


@dataclass(frozen=True)
class Model(Component, ABC):
    """Base of the model zoo: frozen settings that build a network.

    Attributes:
        activation: the non-linearity of every hidden layer.
        init: ``default`` is PyTorch's; ``uniform`` draws every weight and bias from U(-0.5, 0.5) as DLG's code does.
        norm: ``batch`` keeps BatchNorm layers; ``group`` has GroupNorm of up to 16 groups in their place, which treats
            each image by itself, as differential privacy needs. Frozen parts keep theirs.
    """

    activation: str = "relu"
    init: str = "default"
    norm: str = "batch"

    kind: ClassVar[str] = "models"
    smallest: ClassVar[int] = 1
    """The smallest height and width that the network accepts."""
    uses_aux: ClassVar[bool] = False
    """Whether ``build_from`` makes something of public pictures, ``--aux``."""

    def __post_init__(self) -> None:
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("init", self.init, INITIALISATIONS)
        one_of("norm", self.norm, NORMS)

    @abstractmethod
    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build the network for images of ``shape`` (C, H, W); draws its weights from torch's global generator."""

    def build_from(self, shape: tuple[int, int, int], num_classes: int, public: Tensor | None) -> nn.Module:
        """Build the network as `build` does, with ``public`` pictures (N, C, H, W) in [0, 1] at hand, or None."""
        return self.build(shape, num_classes)

    def create(self, shape: tuple[int, int, int], num_classes: int, public: Tensor | None = None) -> nn.Module:
        """Check the shape, build the network and initialise it; draws from torch's global generator.

        ``public`` are pictures for a model that uses them.
        """
        in_range("channels", shape[0], 1)
        in_range("num_classes", num_classes, 1)
        if min(shape[1:]) < self.smallest:
            raise ConfigError(
                f"Images for model {self.name!r} must be at least {self.smallest}x{self.smallest}, "
                f"got {shape[1]}x{shape[2]}. Choose a smaller model (`gradveil list models`)."
            )
        network = self.build_from(shape, num_classes, public)
        if self.norm == "group" and trunk_of(network) is None:
            _use_group_norm(network)
        if self.init == "uniform":
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.uniform_(-0.5, 0.5)
        return network

    def num_numbers(self, shape: tuple[int, int, int], num_classes: int) -> int:
        """Return how many numbers the network has, frozen ones included, without taking their memory."""
        with torch.device("meta"):  # shapes only
            network = self.create(shape, num_classes)
        return sum(parameter.numel() for parameter in network.parameters())

    def act(self) -> nn.Module:
        """Return a new activation layer."""
        return ACTIVATIONS[self.activation]()


def _use_group_norm(network: nn.Module) -> None:
    """Put a GroupNorm of the same name in the place of every BatchNorm2d; groups divide the channels evenly."""
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            owner, _, key = name.rpartition(".")
            groups = math.gcd(MOST_GROUPS, layer.num_features)
            setattr(network.get_submodule(owner), key, nn.GroupNorm(groups, layer.num_features))


def create_model(
    spec: str,
    shape: tuple[int, int, int],
    num_classes: int,
    seed: int,
    normalisation: Normalisation | None = None,
    public: Tensor | None = None,
) -> nn.Module:
    """Build the model that ``spec`` names: one of the zoo, or the user's own ``path/file.py:factory``.

    A factory is called with ``shape`` (C, H, W) and ``num_classes``, if it has parameters of these names, and with the
    settings of the spec as texts; a subclass of `Model` is built from the spec like one of the zoo. ``public`` are
    pictures (N, C, H, W) in [0, 1] for models that use them. Torch's global generator is restored afterwards.
    """
    if normalisation is not None and len(normalisation.mean) not in (1, shape[0]):
        raise ConfigError(
            f"Normalisation must have one number for each of the {shape[0]} channels, got {len(normalisation.mean)}. "
            "Correct --normalise."
        )
    with global_stream(seed, "model"):
        if is_own(parse_spec(spec)[0], "models"):
            network = _create_own(spec, shape, num_classes, public)
        else:
            network = _create_component(spec, shape, num_classes, public)
        if any(isinstance(parameter, UninitializedParameter) for parameter in network.parameters()):
            network.eval()(torch.zeros(2, *shape))  # lazy layers learn their size from a first forward pass
    if normalisation is not None and not getattr(network, "takes_pixels", False):
        network.register_forward_pre_hook(_NormaliseInput(normalisation))
    return network


def has_room(spec: str, shape: tuple[int, int, int], num_classes: int, given: int) -> bool:
    """Return whether a model may be built for weights of ``given`` bytes, as found out without taking its memory.

    A small model always may, and so may one of the user's own. A larger one must have no more numbers than bytes are
    given: who names it without sending its weights could fill the memory.

    Example:
        >>> has_room("mlp", (1, 28, 28), 10, given=0), has_room("mlp", (1, 28, 28), 10**7, given=4 * 10**7)
        (True, False)
    """
    if is_own(parse_spec(spec)[0], "models"):
        return True
    return build(Model, spec).num_numbers(shape, num_classes) <= max(given, SMALL_MODEL)


def model_uses_aux(spec: str) -> bool:
    """Return whether the model that ``spec`` names makes something of public pictures."""
    reference, _ = parse_spec(spec)
    if is_own(reference, "models"):
        factory = load_own(reference)
        return inspect.isclass(factory) and issubclass(factory, Model) and factory.uses_aux
    return build(Model, spec).uses_aux


def normalisation_of(network: nn.Module) -> Normalisation | None:
    """Return the normalisation that a model built by `create_model` applies to its input, or None."""
    hooks = [hook for hook in network._forward_pre_hooks.values() if isinstance(hook, _NormaliseInput)]
    return hooks[0].normalisation if hooks else None


def move_input_hooks(network: nn.Module, whole: nn.Module) -> None:
    """Move the normalisation of a network's input, a hook, to ``whole``, which contains the network."""
    for hook in network._forward_pre_hooks.values():
        whole.register_forward_pre_hook(hook)
    network._forward_pre_hooks.clear()


@dataclass(frozen=True)
class _NormaliseInput:
    """Forward pre-hook that normalises the input. Parameter names stay those of the plain network, so any weights load.

    It changes the input and watches nothing: to watch layers, use `gradveil.networks.watch`.
    """

    normalisation: Normalisation

    def __call__(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.normalisation(inputs[0]), *inputs[1:])


def _create_component(
    spec: str, shape: tuple[int, int, int], num_classes: int, public: Tensor | None = None
) -> nn.Module:
    return build(Model, spec).create(shape, num_classes, public)


def _create_own(spec: str, shape: tuple[int, int, int], num_classes: int, public: Tensor | None) -> nn.Module:
    reference, settings = parse_spec(spec)
    factory = load_own(reference)
    if inspect.isclass(factory) and issubclass(factory, Model):
        return _create_component(spec, shape, num_classes, public)
    return call_factory(reference, {"shape": shape, "num_classes": num_classes}, settings)


def call_factory(reference: str, offered: Mapping[str, object], settings: Mapping[str, str]) -> nn.Module:
    """Call the user's own ``path/file.py:factory`` with the offered arguments that it takes, and return its network."""
    factory = load_own(reference)
    if not callable(factory):
        raise ConfigError(f"{reference!r} must be a function or class that returns a torch.nn.Module, got {factory!r}.")
    try:
        signature = inspect.signature(factory)
    except ValueError as error:
        raise ConfigError(f"{reference!r} must be a function or class written in Python, got {factory!r}.") from error
    arguments = {**{key: value for key, value in offered.items() if key in signature.parameters}, **settings}
    called = f"({', '.join(arguments) or 'nothing'})"
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{reference!r} must be callable with {called}, got: {error}. "
            "A factory may take shape, num_classes and settings of its own with defaults."
        ) from error
    try:
        network = factory(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{reference!r} failed when called with {called}: {type(error).__name__}: {error}. "
            "Settings arrive as texts, so a number must be converted, e.g. int(width)."
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{reference!r} must return a torch.nn.Module, got {type(network).__name__}.")
    return network
