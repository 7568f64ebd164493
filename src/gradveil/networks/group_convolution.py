r"""Convolution with separate weights per group of examples, and its derivatives, by the library's own kernels.

It computes the same three maps as `gradveil.networks.convolution` (C, G and T of one trilinear form), but for groups of
consecutive examples that share a weight, one group after another. Patches are never copied, and no gradient of a single
example is ever built, so this is the faster way for groups of several examples and for wide layers. For single
examples and few channels, the calls cost more than the products do: `is_faster` decides.

Each map is an operation of its own, so that a traced graph has one node per layer and not one per group.
"""

import torch
from torch import Tensor

from gradveil.networks.convolution import Geometry

_MULTIPLICATIONS = 3_000_000
"""Multiplications per example from which the library's kernels are faster, by trials on a CPU."""
_POSITIONS = 1024
"""Positions of the output from which they are faster, because copying patches takes long."""


def is_faster(where: Geometry, weight: torch.Size, group: int) -> bool:
    """Return whether weight gradients of a layer are faster this way than by products of patches.

    The rule counts operations and does not measure, so that the same command always computes the same bits.
    """
    positions = where.outputs[0] * where.outputs[1]
    single = where.kernel == (1, 1)  # patches of a strided 1x1 kernel leave most of the image out
    return group > 1 or single or positions >= _POSITIONS or positions * weight.numel() >= _MULTIPLICATIONS


def group_weight_gradient(images: Tensor, delta: Tensor, where: Geometry, group: int) -> Tensor:
    """Compute G: weight gradients (groups, out, in, kh, kw), each the sum over ``group`` consecutive examples.

    Args:
        images: the layer's input (N, in, H, W).
        delta: gradient of the layer's output (N, out, H', W').
        where: sizes of the convolution.
        group: examples per group, a divisor of N.
    """
    result: Tensor = _WeightGradient.apply(images, delta, where, group)  # type: ignore[no-untyped-call]
    return result


def _transposed(delta: Tensor, weight: Tensor, where: Geometry) -> Tensor:
    result: Tensor = _Transpose.apply(delta, weight, where)  # type: ignore[no-untyped-call]
    return result


def _convolved(images: Tensor, weight: Tensor, where: Geometry) -> Tensor:
    result: Tensor = _Convolve.apply(images, weight, where)  # type: ignore[no-untyped-call]
    return result


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, delta, where, group):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        ctx.save_for_backward(images, delta)
        ctx.where, ctx.group = where, group
        return _OPS.group_gradient(images, delta, where.kernel, where.stride, where.padding, group)

    @staticmethod
    def backward(ctx, direction):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        images, delta = ctx.saved_tensors
        by_images = _transposed(delta, direction, ctx.where) if ctx.needs_input_grad[0] else None
        by_delta = _convolved(images, direction, ctx.where) if ctx.needs_input_grad[1] else None
        return by_images, by_delta, None, None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, weight, where):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        ctx.save_for_backward(images, weight)
        ctx.where = where
        return _OPS.group_convolve(images, weight, where.stride, where.padding)

    @staticmethod
    def backward(ctx, delta):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        images, weight = ctx.saved_tensors
        group = len(images) // len(weight)
        by_images = _transposed(delta, weight, ctx.where) if ctx.needs_input_grad[0] else None
        by_weight = group_weight_gradient(images, delta, ctx.where, group) if ctx.needs_input_grad[1] else None
        return by_images, by_weight, None


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, delta, weight, where):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        ctx.save_for_backward(delta, weight)
        ctx.where = where
        return _OPS.group_transpose(delta, weight, where.size, where.stride, where.padding)

    @staticmethod
    def backward(ctx, images):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        delta, weight = ctx.saved_tensors
        group = len(delta) // len(weight)
        by_delta = _convolved(images, weight, ctx.where) if ctx.needs_input_grad[0] else None
        by_weight = group_weight_gradient(images, delta, ctx.where, group) if ctx.needs_input_grad[1] else None
        return by_delta, by_weight, None


def _backward(
    delta: Tensor, images: Tensor, weight: Tensor, stride: list[int], padding: list[int], which: int
) -> Tensor:
    """Return the gradient by the images (``which`` is 0) or by the weight (1) of one convolution."""
    mask = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(
        delta, images, weight, None, stride, padding, [1, 1], False, [0, 0], 1, mask
    )
    gradient: Tensor = found[which]
    return gradient


def _gradient(
    images: Tensor, delta: Tensor, kernel: list[int], stride: list[int], padding: list[int], group: int
) -> Tensor:
    result = _like_gradient(images, delta, kernel, stride, padding, group)
    for own, some, theirs in zip(result, torch.split(images, group), torch.split(delta, group), strict=True):
        own.copy_(_backward(theirs, some, own, stride, padding, 1))
    return result


def _like_gradient(
    images: Tensor, delta: Tensor, kernel: list[int], stride: list[int], padding: list[int], group: int
) -> Tensor:
    return images.new_empty(len(images) // group, delta.shape[1], images.shape[1], *kernel)


def _convolve(images: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    parts = zip(torch.split(images, len(images) // len(weight)), weight, strict=True)
    return torch.cat([torch.conv2d(some, own, None, stride, padding) for some, own in parts])


def _like_convolve(images: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    where = Geometry(*((pair[0], pair[1]) for pair in (images.shape[2:], weight.shape[3:], stride, padding)))
    return images.new_empty(len(images), weight.shape[1], *where.outputs)


def _transpose(delta: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int]) -> Tensor:
    result = _like_transpose(delta, weight, size, stride, padding)
    group = len(delta) // len(weight)
    for out, some, own in zip(torch.split(result, group), torch.split(delta, group), weight, strict=True):
        out.copy_(_backward(some, out, own, stride, padding, 0))
    return result


def _like_transpose(delta: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return delta.new_empty(len(delta), weight.shape[2], *size)


_library = torch.library.Library("gradveil", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS = torch.ops.gradveil
for _schema, _real, _fake in (
    (
        "group_gradient(Tensor images, Tensor delta, int[] kernel, int[] stride, int[] padding, int group) -> Tensor",
        _gradient,
        _like_gradient,
    ),
    ("group_convolve(Tensor images, Tensor weight, int[] stride, int[] padding) -> Tensor", _convolve, _like_convolve),
    (
        "group_transpose(Tensor delta, Tensor weight, int[] size, int[] stride, int[] padding) -> Tensor",
        _transpose,
        _like_transpose,
    ),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_schema.split("(")[0], _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"gradveil::{_schema.split('(')[0]}", _fake, lib=_library)
