"""Guessed images as picture files, large enough to look at."""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from gradveil.data.pixels import to_bytes

GAP = 2
"""White pixels between two images."""


def strip_png(images: Tensor, height: int = 128) -> bytes:
    """Return a PNG of images (B, C, H, W) in [0, 1] side by side, each pixel repeated until they are ``height`` tall.

    One channel is grey and three are colours; with any other number, each channel has a line of its own in grey. An
    image that holds NaN or infinity is no guess, and is shown as a chequered field.

    Example:
        >>> import torch
        >>> Image.open(io.BytesIO(strip_png(torch.rand(3, 1, 28, 28)))).size
        (424, 140)
    """
    return lines_png([images], height)


def lines_png(lines: Sequence[Tensor], height: int = 128) -> bytes:
    """Return a PNG of several strips of equal length below each other, such as the truth and the guesses."""
    drawn = []
    for images in lines:
        pixels = images.detach().cpu().double().numpy()
        parts = [pixels] if pixels.shape[1] in (1, 3) else [pixels[:, [channel]] for channel in range(pixels.shape[1])]
        drawn += [_joined([_tile(image, height) for image in part], axis=1) for part in parts]
    buffer = io.BytesIO()
    Image.fromarray(_joined(drawn, axis=0)).save(buffer, "png")
    return buffer.getvalue()


def _tile(image: np.ndarray, height: int) -> np.ndarray:
    """Return one image (C, H, W) as (H', W', 3) bytes."""
    factor = -(-height // image.shape[1])
    large = image.repeat(factor, 1).repeat(factor, 2).transpose(1, 2, 0)
    if not np.isfinite(image).all():
        squares = np.indices(large.shape[:2]) // 16
        large = np.where(squares.sum(0) % 2, 0.6, 0.8)[..., None]
    return np.broadcast_to(to_bytes(large).numpy(), (*large.shape[:2], 3))


def _joined(parts: list[np.ndarray], axis: int) -> np.ndarray:
    """Join arrays (H, W, 3) along an axis, with white gaps."""
    size = list(parts[0].shape)
    size[axis] = GAP
    gap = np.full(size, 255, np.uint8)
    return np.concatenate([piece for part in parts for piece in (gap, part)][1:], axis)
