"""The outputs of chosen layers of a network for images; layers after the last chosen one don't run."""

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
        network: is set to evaluation mode, and its weights take no gradient.
        names: the layers; each is used once in a forward pass.
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
                    f"Layer {name!r} must be used once in a forward pass, got {uses} uses. Choose another layer."
                )
        self.names = sorted(names, key=called.index)
        self._copies = False

    def __call__(self, images: Tensor) -> list[Tensor]:
        """Return one tensor (N, ...) per layer, in the order in which the layers are called."""
        found: list[Tensor] = []

        def keep(call: LayerCall) -> None:
            found.append(call.output.clone() if self._copies else call.output)
            if call.name == self.names[-1]:
                raise _Enough

        with suppress(_Enough), watch(self.network, self.names, after=keep):
            self.network(images)
        if any(output._version for output in found):  # a later layer changed it in place
            self._copies = True
            return self(images)
        return found

    def distance(self, images: Tensor, wanted: Sequence[Tensor], *, mean: bool = False) -> Tensor:
        """Return the squared Euclidean distance of each image's features from the wanted ones, (N,).

        With ``mean`` each layer's squared distance is divided by the number of its features.
        """
        pairs = zip(self(images), wanted, strict=True)
        squares = [(ours - theirs).square().flatten(1) for ours, theirs in pairs]
        return torch.stack([square.mean(1) if mean else square.sum(1) for square in squares]).sum(0)

    def slope(self, images: Tensor, wanted: Sequence[Tensor], *, mean: bool = False) -> Tensor:
        """Return the gradient of `distance` with respect to the images (N, C, H, W), without computing the distance."""
        with torch.enable_grad():
            leaf = images.detach().requires_grad_()
            found = self(leaf)
        pulls = [
            (ours.detach() - theirs).mul_(2 / ours[0].numel() if mean else 2)
            for ours, theirs in zip(found, wanted, strict=True)
        ]
        return torch.autograd.grad(found, leaf, pulls)[0]


def chosen_layers(network: nn.Module, shape: tuple[int, int, int], choice: str) -> list[str]:
    """Return the names of the layers that ``choice`` stands for.

    ``first-5`` means the first five convolutions in the order in which they are called, or all if there are fewer;
    ``last-5`` the last five and all linear layers; ``all`` all convolutions; anything else is names joined by ``/``.
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
        raise ConfigError(
            f"layers={choice} must choose at least one layer of the feature extractor, got none. "
            "Name layers, e.g. layers=conv1/conv2."
        )
    return found


class _Enough(Exception):  # noqa: N818 - no error
    """Raised to end a forward pass."""


def _called(network: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """Return the names of the layers in the order in which their calls end, each as often as it is used."""
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
