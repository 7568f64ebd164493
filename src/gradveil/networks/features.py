"""What chosen layers of a network make of images; the layers behind the last of them don't run."""

import re
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.networks.watch import LayerCall, watch


class Features:
    """The outputs of some layers, for images in [0, 1]; differentiable in the images.

    Args:
        network: in evaluation mode afterwards, and its weights take no gradient.
        names: of the layers; each is used once in a forward pass.
        shape: (C, H, W) of an image.
    """

    def __init__(self, network: nn.Module, names: Sequence[str], shape: tuple[int, int, int]) -> None:
        self.network = network.eval().requires_grad_(False)
        called = _called(network, shape)
        known = [name for name, layer in network.named_modules() if name]
        for name in names:
            if name not in known:
                raise UnknownNameError("layer of the feature extractor", name, known)
            if called.count(name) != 1:
                uses = called.count(name)
                raise ConfigError(
                    f"Layer {name!r} must be used once in a forward pass, got {uses} uses. Choose another."
                )
        self.names = sorted(names, key=called.index)
        self._copies = False

    def __call__(self, images: Tensor) -> list[Tensor]:
        """One tensor (N, ...) a layer, in the order in which they are called."""
        found: list[Tensor] = []

        def keep(call: LayerCall) -> None:
            found.append(call.output.clone() if self._copies else call.output)
            if call.name == self.names[-1]:
                raise _Enough

        with suppress(_Enough), watch(self.network, self.names, after=keep):
            self.network(images)
        if any(output._version for output in found):  # a layer behind changed it in place
            self._copies = True
            return self(images)
        return found

    def distance(self, images: Tensor, wanted: Sequence[Tensor], *, mean: bool = False) -> Tensor:
        """(N,) squared Euclidean distances of the images' features from those wanted.

        With ``mean`` each layer's square is divided by the number of its features.
        """
        pairs = zip(self(images), wanted, strict=True)
        squares = [(ours - theirs).square().flatten(1) for ours, theirs in pairs]
        return torch.stack([square.mean(1) if mean else square.sum(1) for square in squares]).sum(0)

    def slope(self, images: Tensor, wanted: Sequence[Tensor], *, mean: bool = False) -> Tensor:
        """The gradient of `distance` by the images (N, C, H, W), without working out the distance."""
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            found = self(leaf)
        pulls = [
            (ours.detach() - theirs).mul_(2 / ours[0].numel() if mean else 2)
            for ours, theirs in zip(found, wanted, strict=True)
        ]
        return torch.autograd.grad(found, leaf, pulls)[0]


def chosen_layers(network: nn.Module, shape: tuple[int, int, int], choice: str) -> list[str]:
    """The names of the layers that a text chooses.

    ``first-5`` are the first five convolutions in the order in which they are called, or as many as there are;
    ``last-5`` the last five and all linear layers; ``all`` all convolutions; else names joined by ``/``.
    """
    kinds = dict(network.named_modules())
    called = list(dict.fromkeys(_called(network, shape)))
    convolutions = [name for name in called if isinstance(kinds[name], _ConvNd)]
    linear = [name for name in called if isinstance(kinds[name], nn.Linear)]
    ends = re.fullmatch(r"(first|last)-([1-9]\d*)", choice)
    if choice == "all":
        found = convolutions
    elif ends:
        count = int(ends[2])
        found = convolutions[:count] if ends[1] == "first" else [*convolutions[-count:], *linear]
    else:
        found = choice.split("/")
    if not found:
        raise ConfigError(f"layers={choice} must choose some layer of the feature extractor, got none. Name layers.")
    return found


class _Enough(Exception):  # noqa: N818 - no error
    """Raised to end a forward pass."""


def _called(network: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """Names of the layers in the order in which a forward pass ends with them, each as often as it is used."""
    names: list[str] = []
    inner = [name for name, _ in network.named_modules() if name]
    like = next(network.parameters(), torch.zeros(()))
    modes = {layer: layer.training for layer in network.modules()}
    try:
        with watch(network, inner, after=lambda call: names.append(call.name)), torch.no_grad():
            network.eval()(torch.zeros(1, *shape).to(like))
    finally:
        for layer, training in modes.items():
            layer.training = training
    return names
