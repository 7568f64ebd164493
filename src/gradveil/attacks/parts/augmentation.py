"""Slightly moved copies of public images, for attackers who have few of them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TURN, ZOOM, SLANT, SHIFT = math.radians(15), 0.15, 0.2, 0.12
"""The most that a copy is turned, zoomed, slanted and shifted (as a share of half the picture's side)."""


def moved(images: Tensor, rng: torch.Generator) -> Tensor:
    """Return each image (N, C, H, W) turned, zoomed, slanted and shifted a little, at random.

    Pixels that come from outside repeat the nearest edge, so that no black border appears.
    """
    turn, zoom, slant, right, down = (
        (torch.rand(len(images), generator=rng) * 2 - 1) * most for most in (TURN, ZOOM, SLANT, SHIFT, SHIFT)
    )
    size = 1 + zoom
    rows = [size * turn.cos(), slant - size * turn.sin(), right, size * turn.sin(), size * turn.cos(), down]
    grid = F.affine_grid(torch.stack(rows, 1).view(-1, 2, 3).to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False).clamp(0, 1)
