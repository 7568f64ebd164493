"""Gradients of a layer's own parameters per group of examples, from its input and the gradient of its output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.networks.convolution import Geometry, convolve, weight_gradient
from gradveil.networks.group_convolution import group_weight_gradient, is_faster
from gradveil.networks.grouped import BatchNormOfGroups


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters that belong to the layer itself, not to its children."""
    return {key: p for key, p in layer.named_parameters(recurse=False) if p.requires_grad}


def layer_gradient(layer: nn.Module, inputs: Tensor, gradient: Tensor, group: int = 1) -> dict[str, Tensor]:
    """Return gradients (N / group, ...) of a layer's own parameters, from its input and its output's gradient.

    Each is the sum over ``group`` consecutive examples; 1 gives per-example gradients.
    """
    own = own_parameters(layer)
    kind = type(layer)  # not isinstance: a subclass may compute something else
    if kind is nn.Linear:
        found = _linear(inputs, gradient, group)
    elif isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
        found = _conv2d(layer, inputs, gradient, group)
    elif isinstance(layer, _BatchNorm) and kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        found = _channelwise(_batch_normalised(layer, inputs), gradient, group)
    elif isinstance(layer, BatchNormOfGroups):
        found = _channelwise(layer.normalised(inputs), gradient, group)
    elif isinstance(layer, nn.GroupNorm) and kind is nn.GroupNorm:
        found = _channelwise(F.group_norm(inputs, layer.num_groups, eps=layer.eps), gradient, group)
    elif isinstance(layer, nn.LayerNorm) and kind is nn.LayerNorm:
        found = _layer_norm(layer, inputs, gradient, group)
    else:
        found = {}
    if not own.keys() <= found.keys():
        found = _any_layer(layer, own, inputs, gradient, group)
    return {key: found[key] for key in own}


def grouped(tensor: Tensor, group: int) -> Tensor:
    """Return (N, ...) as (N / group, group, ...)."""
    return tensor.reshape(-1, group, *tensor.shape[1:])


def _linear(inputs: Tensor, gradient: Tensor, group: int) -> dict[str, Tensor]:
    groups = len(gradient) // group
    rows = gradient.reshape(groups, -1, gradient.shape[-1])  # (groups, group * positions, out)
    columns = inputs.reshape(groups, -1, inputs.shape[-1])  # (groups, group * positions, in)
    return {"weight": rows.mT @ columns, "bias": rows.sum(1)}


def _conv2d(layer: nn.Conv2d, inputs: Tensor, gradient: Tensor, group: int) -> dict[str, Tensor]:
    where = _geometry(layer, inputs)
    bias = grouped(gradient, group).sum((1, 3, 4))
    if where is None:
        return {"weight": _unfolded(layer, inputs, gradient, group), "bias": bias}
    if is_faster(where, layer.weight.shape, group):
        return {"weight": group_weight_gradient(inputs, gradient, where, group), "bias": bias}
    return {"weight": weight_gradient(inputs, gradient, where), "bias": bias}


def _unfolded(layer: nn.Conv2d, inputs: Tensor, gradient: Tensor, group: int) -> Tensor:
    """Return the weight's gradients for a convolution with groups of channels, dilation or another padding."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)  # (N, in*k*k, L)
    count, _, positions = patches.shape
    patches = patches.reshape(count, layer.groups, -1, positions)  # (N, groups, in/groups*k*k, L)
    rows = gradient.reshape(count, layer.groups, -1, positions)  # (N, groups, out/groups, L)
    return grouped((rows @ patches.mT).reshape(count, *layer.weight.shape), group).sum(1)


def _batch_normalised(layer: _BatchNorm, inputs: Tensor) -> Tensor:
    return F.batch_norm(inputs, layer.running_mean, layer.running_var, training=False, eps=layer.eps)


def _channelwise(normalised: Tensor, gradient: Tensor, group: int) -> dict[str, Tensor]:
    product, plain = grouped(gradient * normalised, group), grouped(gradient, group)  # (groups, group, C, ...)
    rest = (1, *range(3, plain.dim()))
    return {"weight": product.sum(rest), "bias": plain.sum(rest)}


def _layer_norm(layer: nn.LayerNorm, inputs: Tensor, gradient: Tensor, group: int) -> dict[str, Tensor]:
    product = grouped(gradient * F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps), group)
    rest = tuple(range(1, product.dim() - len(layer.normalized_shape)))
    return {"weight": product.sum(rest), "bias": grouped(gradient, group).sum(rest)}


def _any_layer(
    layer: nn.Module, own: dict[str, nn.Parameter], inputs: Tensor, gradient: Tensor, group: int
) -> dict[str, Tensor]:
    """Use vmap over the layer's own backward; right for any layer that treats examples independently."""

    def one(examples: Tensor, output_gradients: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            output: Tensor = torch.func.functional_call(layer, parameters, (examples,))
            return output

        backward = torch.func.vjp(forward, dict(own))[1]
        found: dict[str, Tensor] = backward(output_gradients)[0]
        return found

    result: dict[str, Tensor] = torch.func.vmap(one)(grouped(inputs, group), grouped(gradient, group))
    return result


@contextmanager
def small_convolutions(network: nn.Module) -> Iterator[None]:
    """Compute convolutions with few channels by matrix products within the ``with`` block.

    It is for gradients with respect to the input, as in a search for images: the weights count as constants. oneDNN
    takes up to three times as long for these convolutions, most of it for the gradient by the input.
    """

    def by_products(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
        def forward(images: Tensor) -> Tensor:
            where = _geometry(layer, images)
            if where is None:
                return nn.Conv2d.forward(layer, images)
            output = convolve(images, layer.weight.detach(), where)
            return output if layer.bias is None else output + layer.bias.detach()[:, None, None]

        return forward

    small = [
        layer
        for layer in network.modules()
        if type(layer) is nn.Conv2d and _is_small(layer) and "forward" not in vars(layer)
    ]
    for layer in small:
        vars(layer)["forward"] = by_products(layer)
    try:
        yield
    finally:
        for layer in small:
            del vars(layer)["forward"]


def few_channels(network: nn.Module) -> bool:
    """Return whether all convolutions of a network have few channels, for which oneDNN's backward pass is slow."""
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    return bool(convolutions) and all(map(_is_small, convolutions))


def _is_small(layer: nn.Conv2d) -> bool:
    return layer.in_channels * layer.out_channels < _SMALL


_SMALL = 256
"""Input times output channels below which matrix products are faster, by benchmarks on a CPU."""


def _geometry(layer: nn.Conv2d, images: Tensor) -> Geometry | None:
    """Return a convolution's geometry, or None if `gradveil.networks.convolution` does not support it."""
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    if not plain or isinstance(layer.padding, str):
        return None
    pairs = [(pair[0], pair[1]) for pair in (images.shape[2:], layer.kernel_size, layer.stride, layer.padding)]
    return Geometry(*pairs)
