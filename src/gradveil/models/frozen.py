"""Frozen: any network, trained on public data, as a fixed trunk under a fresh linear head."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.data.pixels import to_bytes, to_unit
from gradveil.errors import ConfigError
from gradveil.models.base import Model, create_model
from gradveil.models.photographs import photographs
from gradveil.models.public_scaling import PublicScaling, some_of
from gradveil.models.trunk import CHUNK, FeatureNetwork, Trunk, fingerprint_of, require_fingerprint
from gradveil.models.weights import load_weights
from gradveil.registry import parse_spec
from gradveil.storage import load_tensors
from gradveil.validate import in_range


@dataclass(frozen=True)
class Frozen(Model):
    """Freeze a network that was trained on public data, and train a linear head on what its last Linear sees.

    Everything but the head is frozen: never trained, never broadcast, never sent. The network's own last Linear, which
    belongs to the classes of the public task, is not used; it may have any number of classes. Features are centred,
    scaled and whitened by their statistics on public pictures, so that a head learns in few steps; then each image's
    are scaled to norm 1, with a constant for the bias. Public pictures are those of ``--aux``, or two photographs that
    come with scikit-learn, normalised by their own mean and deviation. Without ``weights`` the trunk is random, from a
    fixed seed, and the same for everybody: a baseline. ``activation`` is that of the network. The weights must come
    from public data: whatever they know of private images, no defence of the head can hide.

    Reference: Tramer and Boneh 2021, https://arxiv.org/abs/2011.11660, Section 5 (private heads on public features).
    Differs from the paper: any network of the zoo or the user's own, and no statistics of private features.

    Attributes:
        network: a model of the zoo or ``path/file.py:factory``; its own settings follow with ; in place of commas, as
            in ``network=resnet20:width=8``.
        weights: safetensors file with the network's weights; empty is a random trunk.
        classes: classes of the public task, the outputs of the last Linear in the file; 0 reads them from the file.
        whiten: variance that whitening adds to each direction of the features, in units of their mean variance; large
            values leave them as they are.
        sha256: fingerprint that the frozen part must have, or its beginning; empty takes any.
    """

    network: str = "resnet20"
    weights: str = ""
    classes: int = 0
    whiten: float = 0.01
    sha256: str = ""

    smallest: ClassVar[int] = 8
    uses_aux: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("whiten", self.whiten, 0, open_low=True)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build the network, load its weights, freeze it, and put a head of zeros on it."""
        return self.build_from(shape, num_classes, None)

    def build_from(self, shape: tuple[int, int, int], num_classes: int, public: Tensor | None) -> nn.Module:
        """Do the same, with features scaled by public pictures, or by the photographs if there are none."""
        spec = self._inner
        file = Path(self.weights).expanduser() if self.weights else None
        network = create_model(spec, shape, self.classes or _classes(spec, shape, file), 0)
        if file is not None:
            load_weights(network, file)
        pictures = photographs(shape) if public is None or not len(public) else to_unit(public)
        trunk = NetworkTrunk(network, spec, pictures, self.whiten)
        require_fingerprint(trunk, self.sha256)
        return FeatureNetwork(trunk, trunk.width, num_classes, takes_pixels=False)

    @property
    def _inner(self) -> str:
        """The spec of the network whose trunk is frozen."""
        spec = self.network.replace(";", ",")
        if self.activation != "relu":
            spec += ("," if ":" in spec else ":") + f"activation={self.activation}"
        return spec

    def num_numbers(self, shape: tuple[int, int, int], num_classes: int) -> int:
        """Return the number of entries of the network and of a head as wide as its last Linear."""
        with torch.device("meta"):  # shapes only
            network = create_model(self._inner, shape, self.classes or 10, 0)
        width = network.get_parameter(f"{last_linear(network)}.weight").shape[1]
        return sum(parameter.numel() for parameter in network.parameters()) + (width + 1) * num_classes


def random_trunk(spec: str) -> str:
    """Return a warning if a model's text freezes a network without weights, or "".

    Example:
        >>> random_trunk("frozen:weights=public.safetensors"), random_trunk("lenet5")
        ('', '')
    """
    name, settings = parse_spec(spec)
    if name != "frozen" or settings.get("weights"):
        return ""
    return (
        f"Model {spec!r} freezes a network of random weights, which has learned nothing: a baseline. Name weights from "
        "public data (frozen:weights=public.safetensors), or use patches."
    )


class NetworkTrunk(Trunk):
    """A network without its last Linear.

    Attributes:
        width: the number of features.
    """

    def __init__(self, network: nn.Module, spec: str, pictures: Tensor, whiten: float) -> None:
        linear = last_linear(network)
        width = int(network.get_parameter(f"{linear}.weight").shape[1])
        state = OrderedDict(sorted((k, t) for k, t in network.state_dict().items() if not k.startswith(f"{linear}.")))
        parts = (part for pair in state.items() for part in pair)
        super().__init__(fingerprint_of("frozen 2", spec, whiten, to_bytes(pictures), *parts))
        owner, _, name = linear.rpartition(".")
        setattr(network.get_submodule(owner), name, nn.Identity())
        self.network, self.width = _with_buffers(network.eval()), width
        some = some_of(pictures)
        spread, middle = torch.std_mean(some, (0, 2, 3), keepdim=True)
        inputs = torch.split((some - middle) / spread.clamp_min(1e-6), CHUNK)
        try:
            with torch.no_grad():
                seen = torch.cat([self._plain(chunk) for chunk in inputs])
        except RuntimeError as error:
            raise _unfit(f"one that fails without {linear!r}: {error}") from error
        if seen.shape[1:] != (width,):
            raise _unfit(f"features of shape {tuple(seen.shape[1:])} without {linear!r}, which has {width} inputs")
        self.scaling = PublicScaling(seen, whiten)

    def features(self, images: Tensor) -> Tensor:
        """Return what the last Linear would get, (N, width), scaled by public pictures."""
        found: Tensor = self.scaling(self._plain(images))
        return found

    def _plain(self, images: Tensor) -> Tensor:
        found: Tensor = self.network(images)
        return found.flatten(1)


def _with_buffers(network: nn.Module) -> nn.Module:
    """Turn all parameters of a network into buffers of the same names, in place: nothing is left to train."""
    for layer in network.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            delattr(layer, name)
            layer.register_buffer(name, parameter.detach())
    return network


def last_linear(network: nn.Module) -> str:
    """Return the name of a network's last Linear layer. Raise ConfigError if there is none."""
    found: list[str] = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear) and name]
    if not found:
        raise _unfit("a network without a Linear layer")
    return found[-1]


def _unfit(got: str) -> ConfigError:
    return ConfigError(
        f"A network to freeze must end with a Linear layer, in whose place a head is trained, got {got}. "
        "Choose another network=."
    )


def _classes(spec: str, shape: tuple[int, int, int], file: Path | None) -> int:
    """Return the number of outputs of the last Linear in a file of weights, or 10 without a file."""
    if file is None:
        return 10
    name = last_linear(create_model(spec, shape, 10, 0))
    weight = load_tensors(file).get(f"{name}.weight") if file.exists() else None
    return 10 if weight is None or weight.dim() != 2 else len(weight)  # `load_weights` says what is wrong
