"""The one scaling of pixels: between stored images (bytes, or floats in [0, 1]) and images in [0, 1].

Stored images are uint8 from 0 to 255 or floats in [0, 1], as in `gradveil.data.Split`. Everything that computes with
images gets them from here, so that no set is divided by 255 twice.
"""

import numpy as np
import torch
from torch import Tensor

from gradveil.types import Batch


def to_unit(images: np.ndarray | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return images as floats in [0, 1]: bytes are divided by 255 in ``dtype``, floats stay as they are.

    Example:
        >>> to_unit(np.array([0, 51, 255], np.uint8))
        tensor([0.0000, 0.2000, 1.0000])
        >>> to_unit(np.array([0.0, 0.2], np.float32))
        tensor([0.0000, 0.2000])
    """
    images = _tensor(images)
    return images.to(dtype).div_(255) if images.dtype == torch.uint8 else images


def to_bytes(images: np.ndarray | Tensor) -> Tensor:
    """Return images as uint8 from 0 to 255, the inverse of `to_unit`; bytes stay as they are.

    Values are clamped to [0, 1] and rounded; NaN becomes mid-grey.

    Example:
        >>> to_bytes(torch.tensor([0.0, 0.2, 1.5, float("nan")]))
        tensor([  0,  51, 255, 128], dtype=torch.uint8)
    """
    images = _tensor(images)
    return images if images.dtype == torch.uint8 else (images.nan_to_num(0.5).clamp(0, 1) * 255).round().byte()


def to_batch(images: np.ndarray | Tensor, labels: np.ndarray | Tensor, sensitive: np.ndarray | None = None) -> Batch:
    """Return stored images (N, C, H, W) and their labels (N,) as a batch in [0, 1].

    Args:
        images: uint8, or floats in [0, 1].
        labels: class indices.
        sensitive: (N,) bool, the marked images; None marks none.
    """
    marks = torch.zeros(len(images), dtype=torch.bool) if sensitive is None else _tensor(sensitive)
    return Batch(to_unit(images), _tensor(labels), marks)


def _tensor(array: np.ndarray | Tensor) -> Tensor:
    """Return an array as a tensor, copied if torch could not write to it."""
    if isinstance(array, Tensor):
        return array
    whole = np.ascontiguousarray(array)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy())
