r"""Convolution with separate weights per example, and its derivatives, by matrix products.

The three maps come from one trilinear form :math:`\langle \delta, C(x, V)\rangle = \langle V, G(x, \delta)\rangle =
\langle x, T(\delta, V)\rangle`: `convolve` (C), `weight_gradient` (G) and `transpose` (T, the gradient by the input).
The derivatives of each are the other two, so all can be differentiated any number of times.

Grouped convolutions and unfold with fold take several times as long on a CPU. Instead, patches are copied from a
channels-last image, where they are long runs of memory. T is itself a convolution with stride 1 of the output gradient,
with one small kernel for each remainder of the position modulo the stride.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution; each pair is (vertical, horizontal). Zero padding is the same on both sides."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def outputs(self) -> tuple[int, int]:
        """Height and width of the output."""
        down, across = (
            (size + 2 * padding - kernel) // stride + 1
            for size, kernel, stride, padding in zip(self.size, self.kernel, self.stride, self.padding, strict=True)
        )
        return down, across


def convolve(images: Tensor, weight: Tensor, where: Geometry) -> Tensor:
    """Compute C: (N, out, H', W') from images (N, in, H, W) and weights (N, out, in, kh, kw) or (out, in, kh, kw)."""
    result: Tensor = _Convolve.apply(images, weight, where)  # type: ignore[no-untyped-call]
    return result


def weight_gradient(images: Tensor, delta: Tensor, where: Geometry) -> Tensor:
    """Compute G: per-example weight gradients (N, out, in, kh, kw) from input and output gradient (N, out, H', W')."""
    result: Tensor = _WeightGradient.apply(images, delta, where)  # type: ignore[no-untyped-call]
    return result


def transpose(delta: Tensor, weight: Tensor, where: Geometry) -> Tensor:
    """Compute T: the gradient by the images (N, in, H, W), from output gradient and weights as in `convolve`."""
    result: Tensor = _Transpose.apply(delta, weight, where)  # type: ignore[no-untyped-call]
    return result


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, weight, where):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        ctx.save_for_backward(images, weight)
        ctx.where = where
        patches = _patches(_channels_last(images, where.padding, where.padding), where.kernel, where.stride)
        return (_rows(weight) @ patches.mT).view(len(images), -1, *where.outputs)

    @staticmethod
    def backward(ctx, delta):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        images, weight = ctx.saved_tensors
        by_images = transpose(delta, weight, ctx.where) if ctx.needs_input_grad[0] else None
        by_weight = weight_gradient(images, delta, ctx.where) if ctx.needs_input_grad[1] else None
        return by_images, _like(by_weight, weight), None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, delta, where):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        ctx.save_for_backward(images, delta)
        ctx.where = where
        patches = _patches(_channels_last(images, where.padding, where.padding), where.kernel, where.stride)
        product = delta.flatten(2) @ patches  # (N, out, kh * kw * in)
        return product.view(*product.shape[:2], *where.kernel, images.shape[1]).permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx, direction):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        images, delta = ctx.saved_tensors
        by_images = transpose(delta, direction, ctx.where) if ctx.needs_input_grad[0] else None
        by_delta = convolve(images, direction, ctx.where) if ctx.needs_input_grad[1] else None
        return by_images, by_delta, None


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, delta, weight, where):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        ctx.save_for_backward(delta, weight)
        ctx.where = where
        return _transpose(delta, weight, where)

    @staticmethod
    def backward(ctx, images):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        delta, weight = ctx.saved_tensors
        by_delta = convolve(images, weight, ctx.where) if ctx.needs_input_grad[0] else None
        by_weight = weight_gradient(images, delta, ctx.where) if ctx.needs_input_grad[1] else None
        return by_delta, _like(by_weight, weight), None


def _like(gradient: Tensor | None, weight: Tensor) -> Tensor | None:
    """Sum the per-example gradients if all examples share the weight."""
    return gradient.sum(0) if gradient is not None and weight.dim() == 4 else gradient


def _rows(weight: Tensor) -> Tensor:
    """Return weights (..., out, in, kh, kw) as (..., out, kh * kw * in), the order of the patches."""
    return weight.movedim(-3, -1).flatten(-3)


def _channels_last(images: Tensor, before: tuple[int, int], after: tuple[int, int]) -> Tensor:
    """Return (N, C, H, W) padded with zeros as contiguous (N, H + ..., W + ..., C)."""
    sides = (0, 0, before[1], after[1], before[0], after[0])
    return F.pad(images.permute(0, 2, 3, 1), sides).contiguous()


def _patches(images: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Return all windows of contiguous (N, H, W, C) as (N, positions, kh * kw * C)."""
    if len(images) > _FEW and get_proxy_mode() is not None:
        whole: Tensor = torch.ops.gradveil.copy_patches(images, list(kernel), list(stride))
        return whole
    return _copied(images, kernel, stride)


def _copied(images: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    windows = images.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])  # (N, H', W', C, kh, kw)
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(len(images), -1, kernel[0] * kernel[1] * images.shape[3])


_FEW = 4
"""Up to this many examples a compiler speeds up the single copies by saving calls; for more, it copies slowly."""


def _transpose(delta: Tensor, weight: Tensor, where: Geometry) -> Tensor:
    """Compute T as a convolution with stride 1; see `_apart`."""
    (down, across), (channels_out, channels_in) = where.stride, weight.shape[-4:-2]
    plan = _apart(where, channels_out, channels_in)
    windows = _patches(_channels_last(delta, plan.before, plan.after), plan.taps, (1, 1))
    flat = weight.reshape(-1, channels_out * channels_in * where.kernel[0] * where.kernel[1])
    kernels: Tensor = torch.ops.gradveil.take_taps(flat, plan.index.to(weight.device), plan.inside.to(weight))
    kernels = kernels.view(-1, down * across * channels_in, plan.taps[0] * plan.taps[1] * channels_out)
    result = kernels @ windows.mT  # (N, down * across * in, cells)
    high, wide = plan.cells
    result = result.view(-1, down, across, channels_in, high, wide).permute(0, 3, 4, 1, 5, 2)
    return result.reshape(len(result), channels_in, high * down, wide * across)[..., : where.size[0], : where.size[1]]


@dataclass(frozen=True)
class _Apart:
    """How T becomes a convolution of stride 1.

    Attributes:
        cells: range of q, vertical and horizontal.
        taps: number of values of m, vertical and horizontal.
        before: rows of zeros above delta, and columns to its left.
        after: rows of zeros below delta, and columns to its right.
        index: for each entry of the kernels (remainders, in, taps, out) the entry of the flat weight.
        inside: 1 if the kernel has this tap, else 0.
    """

    cells: tuple[int, int]
    taps: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    index: Tensor
    inside: Tensor


@lru_cache(maxsize=256)
def _apart(where: Geometry, channels_out: int, channels_in: int) -> _Apart:
    r"""Find which tap of the kernel joins which output to which position.

    Position u of the image is :math:`s q + r`. Tap i of the kernel joins it to output o if
    :math:`u = s o + i - p`, so with :math:`m = q - o` the tap is :math:`i = s m + r + p`. For fixed r this is a
    convolution of delta over m with stride 1; all r share one range of m, and taps outside the kernel are zero.
    (NumPy is used so that a trace treats the result as a constant.)
    """
    cells, taps, before, after, tap, inside = [], [], [], [], [], []
    for axis in (0, 1):
        size, kernel, stride, padding = (pair[axis] for pair in (where.size, where.kernel, where.stride, where.padding))
        low, high = -((stride - 1 + padding) // stride), (kernel - 1 - padding) // stride  # range of m
        cells.append(-(-size // stride))
        taps.append(high - low + 1)
        before.append(high)
        after.append(cells[-1] - 1 - low + 1 - where.outputs[axis])
        found = stride * np.arange(high, low - 1, -1) + np.arange(stride)[:, None] + padding  # (r, m)
        tap.append(found.clip(0, kernel - 1))
        inside.append((found >= 0) & (found < kernel))
    (down, across), (vertical, horizontal) = where.stride, where.kernel
    rows, columns = tap[0].reshape(down, 1, 1, taps[0], 1, 1), tap[1].reshape(1, across, 1, 1, taps[1], 1)
    ins, outs = np.arange(channels_in).reshape(1, 1, -1, 1, 1, 1), np.arange(channels_out)
    index = ((outs * channels_in + ins) * vertical + rows) * horizontal + columns
    valid = inside[0].reshape(down, 1, 1, taps[0], 1, 1) & inside[1].reshape(1, across, 1, 1, taps[1], 1)
    return _Apart(
        (cells[0], cells[1]),
        (taps[0], taps[1]),
        (before[0], before[1]),
        (after[0], after[1]),
        torch.from_numpy(index.flatten()),
        torch.from_numpy(np.broadcast_to(valid, index.shape).flatten().astype(np.float32)),
    )


def _copy_patches(images: Tensor, kernel: list[int], stride: list[int]) -> Tensor:
    patches = _copied(images, kernel, stride)
    return patches if patches.untyped_storage().data_ptr() != images.untyped_storage().data_ptr() else patches.clone()


def _like_patches(images: Tensor, kernel: list[int], stride: list[int]) -> Tensor:
    down, across = ((images.shape[1 + i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    return images.new_empty(len(images), down * across, kernel[0] * kernel[1] * images.shape[3])


def _take_taps(weights: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    return torch.index_select(weights, 1, index).mul_(inside)


def _like_taps(weights: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    return weights.new_empty(len(weights), len(index))


_library = torch.library.Library("gradveil", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Copies as operations of their own, which TorchInductor leaves unchanged: its own code for them is far slower."""
for _schema, _real, _fake in (
    ("copy_patches(Tensor images, int[] kernel, int[] stride) -> Tensor", _copy_patches, _like_patches),
    ("take_taps(Tensor weights, Tensor index, Tensor inside) -> Tensor", _take_taps, _like_taps),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_schema.split("(")[0], _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"gradveil::{_schema.split('(')[0]}", _fake, lib=_library)
