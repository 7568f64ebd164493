"""Public pictures that every installation has: pieces of the two photographs that come with scikit-learn."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data.pixels import to_unit

SCALES = (1, 2, 4)
"""Photographs are cut at full size, and reduced by these factors."""


def photographs(shape: Sequence[int]) -> Tensor:
    """Return pieces (N, C, H, W) in [0, 1] of the two photographs that come with scikit-learn.

    They are cut without overlap at full, half and quarter size: 670 pieces of 32x32. Images of one channel are grey;
    those of more than three repeat the mean of the colours. A photograph that is too small is enlarged. All but
    enlarging is done in whole numbers, so that every machine gets the same pieces.
    """
    from sklearn.datasets import load_sample_images  # takes a second to import

    channels, height, width = shape
    pieces = []
    for photograph in load_sample_images().images:
        whole = torch.from_numpy(photograph.copy()).permute(2, 0, 1).long()
        if channels != 3:
            whole = (whole.sum(0, keepdim=True) // 3).expand(channels, -1, -1)
        for scale in SCALES:
            reduced = _reduced(whole, scale)
            if reduced.shape[1] >= height and reduced.shape[2] >= width:
                pieces.append(_cut(reduced, height, width))
            elif scale == 1:
                larger = F.interpolate(whole[None].double(), size=(height, width), mode="nearest")
                pieces.append(larger.long())
    return to_unit(torch.cat(pieces).byte())


def _reduced(picture: Tensor, scale: int) -> Tensor:
    """Return a picture (C, H, W) of whole numbers, with the means of ``scale`` x ``scale`` pixels, rounded down."""
    return picture.unfold(1, scale, scale).unfold(2, scale, scale).sum((3, 4)) // scale**2


def _cut(picture: Tensor, height: int, width: int) -> Tensor:
    """Return a picture (C, H, W) as pieces (N, C, height, width) that do not overlap."""
    windows = picture.unfold(1, height, height).unfold(2, width, width)  # (C, rows, columns, height, width)
    return windows.permute(1, 2, 0, 3, 4).reshape(-1, len(picture), height, width)
