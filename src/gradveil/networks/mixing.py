"""Whether a network mixes images: does one image's output or gradient depend on the other images of its batch?"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.networks.watch import LayerCall, watch
from gradveil.randomness import global_stream
from gradveil.secret_stream import SecretStream

_TOLERANCE = 1e-5
"""Relative difference up to which two results count as equal; the same arithmetic on one image differs by far less."""


class _Seen(NamedTuple):
    """A tensor of one image on its way through the network: what came into a layer, or out of it."""

    layer: str
    out: bool
    tensor: Tensor


def mixing_layer(network: nn.Module, images: Tensor) -> str | None:
    """Return which layer first lets an image depend on the others of its batch, in words, or None if none does.

    The network runs twice on the same first image, beside different others. Layers keep their modes, and random layers
    (Dropout) draw the same numbers twice. What the layers get and give for the first image is compared, and so is the
    gradient of its output. A network that mixes images only for special pixels or batch sizes is not found.

    Args:
        network: not changed.
        images: (N, C, H, W) with pixels in [0, 1]; the first image is looked at, and at most three others are used.

    Example:
        >>> pixels = torch.rand(3, 1, 2, 2)
        >>> mixing_layer(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), pixels) is None
        True
        >>> mixing_layer(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()), pixels)
        "'0' (BatchNorm2d)"
    """
    first = images[:1].detach()
    others = images[1:4].detach() if len(images) > 1 else first.flip(3)
    runs = [_run(network, torch.cat([first, some])) for some in (others, 1 - others)]
    for one, other in zip(*runs, strict=False):
        if one.layer != other.layer or not _alike(one.tensor, other.tensor):
            return _described(network, one)
    return None


def random_images(network: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return a few random images (4, C, H, W), of the network's type and on its device, always the same ones."""
    like = next(network.parameters(), torch.zeros(()))
    return SecretStream(0, "mixing").uniform((4, *shape)).to(like)


def frozen_norms(network: nn.Module, *, training: bool) -> nn.Module:
    """Return a copy in training or evaluation mode, with BatchNorm in evaluation mode."""
    network = copy.deepcopy(network).train(training)
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return network


def _run(network: nn.Module, images: Tensor) -> list[_Seen]:
    """Return what every layer gets and gives for the first image, in order, and the gradient of its output."""
    network, seen = copy.deepcopy(network), list[_Seen]()

    def keep(name: str, value: object, *, out: bool) -> None:
        if isinstance(value, Tensor) and value.dim() and len(value) and len(value) % len(images) == 0:
            seen.append(_Seen(name, out, value.detach()[: len(value) // len(images)].clone()))

    def before(call: LayerCall) -> None:
        for value in call.inputs:
            keep(call.name, value, out=False)

    def after(call: LayerCall) -> None:
        keep(call.name, call.output, out=True)

    with watch(network, before=before, after=after), torch.enable_grad(), global_stream(0, "mixing"):
        output = network(images)
    parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if isinstance(output, Tensor) and output.requires_grad and parameters:
        slopes = torch.autograd.grad(output[0].square().sum(), list(parameters.values()), materialize_grads=True)
        owners = [name.rpartition(".")[0] for name in parameters]
        seen += [_Seen(owner, True, slope) for owner, slope in zip(owners, slopes, strict=True)]
    return seen


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    largest = max(float(one.abs().max()), float(other.abs().max())) if one.numel() else 0.0
    return not bool(((one - other).abs() > _TOLERANCE * largest).any())


def _described(network: nn.Module, seen: _Seen) -> str:
    """Name the layer that mixes; if a layer's input is mixed already, that is the code that calls the layer."""
    name = seen.layer if seen.out else seen.layer.rpartition(".")[0]
    text = f"{name!r} ({type(network.get_submodule(name)).__name__})" if name else "the network's own forward"
    return text if seen.out else f"{text}, before layer {seen.layer!r},"
