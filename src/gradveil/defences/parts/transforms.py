"""Image operations of AutoAugment on tensors, and the fifty operations with fixed strengths that ATS uses.

Every operation takes images (N, C, H, W) in [0, 1] and signs (N,) of -1 or 1, and returns images of the same shape in
[0, 1]. The operations are those of Pillow without rounding to bytes, except for operations that are defined on bytes.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Operation = Callable[[Tensor, float, Tensor], Tensor]
"""A function of images, a strength and signs that returns images."""


class Transform(NamedTuple):
    """One image operation with its strength.

    Attributes:
        name: name of the operation.
        level: strength from 0 (weakest) to 9 (strongest).
    """

    name: str
    level: int

    @property
    def strength(self) -> float:
        """Return the operation's parameter: the value at ``level`` of ten equally spaced values over its range."""
        low, high = _RANGES.get(self.name, (0.0, 0.0))
        return low + (high - low) * self.level / 9

    @property
    def is_signed(self) -> bool:
        """Return whether the operation goes in a random direction, e.g. left or right."""
        return self.name in _SIGNED

    def __call__(self, images: Tensor, signs: Tensor) -> Tensor:
        """Apply the operation to the images."""
        return _OPERATIONS[self.name](images, self.strength, signs.to(images).view(-1, 1, 1, 1)).clamp(0, 1)

    def left(self, known: Tensor, signs: Tensor) -> Tensor:
        """Return the mask (N, 1, H, W) of pixels that show the picture after the operation, given that before it."""
        return _whole(self(known.float(), signs)) if self.name in _MOVES else known

    def undone(self, images: Tensor, known: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
        """Undo the operation as far as possible; return the images and the mask of their known pixels.

        Tones that the operation destroyed are not restored. Pixels that it moved out of the picture are filled with the
        median of the known pixels.

        Args:
            images: (N, C, H, W) after the operation.
            known: (N, 1, H, W) mask of the pixels that show the picture.
            signs: (N,) signs with which the operation was called.
        """
        signs = signs.to(images).view(-1, 1, 1, 1)
        if self.name not in _MOVES:
            return _INVERSES.get(self.name, _kept)(images, self.strength, signs).clamp(0, 1), known
        back = _MOVES[self.name]
        known = _whole(back(known.to(images), self.strength, signs))
        return filled(back(images, self.strength, signs), known).clamp(0, 1), known


def filled(images: Tensor, known: Tensor) -> Tensor:
    """Set unknown pixels of images (N, C, H, W) to the per-channel median of the image's known pixels, or 0.5 if none.

    Example:
        >>> filled(torch.tensor([[[[0.2, 0.4, 0.0, 0.4]]]]), torch.tensor([[[[True, True, False, True]]]]))[0, 0, 0, 2]
        tensor(0.4000)
    """
    median = torch.where(known, images, torch.nan).flatten(2).nanmedian(2).values
    return torch.where(known, images, median.nan_to_num(0.5)[..., None, None])


def _whole(share: Tensor) -> Tensor:
    """Return which pixels of a moved mask were interpolated from known pixels only."""
    return share > 0.99


def _affine(images: Tensor, rows: Tensor, *, mode: str, fill: float) -> Tensor:
    """Read each output pixel (x, y) from the input at rows @ (x, y, 1), with rows (N, 2, 3); ``fill`` if outside."""
    count, _, height, width = images.shape
    ys, xs = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    here = torch.stack([xs, ys, torch.ones_like(xs)], -1).to(images)  # (H, W, 3)
    there = torch.einsum("nij,hwj->nhwi", rows.to(images), here)
    size = torch.tensor([width, height]).to(images)
    grid = 2 * there / size - 1
    moved = F.grid_sample(images - fill, grid, mode=mode, padding_mode="border", align_corners=False) + fill
    inside = ((there >= 0) & (there < size)).all(-1)[:, None]
    return torch.where(inside, moved, fill).view(count, *images.shape[1:])


def _rows(signs: Tensor, entries: dict[tuple[int, int], float]) -> Tensor:
    """Return identity maps (N, 2, 3) with the given entries, multiplied by each image's sign, added."""
    rows = torch.eye(2, 3).repeat(len(signs), 1, 1).to(signs)
    for (i, j), value in entries.items():
        rows[:, i, j] += value * signs.view(-1)
    return rows


def _shear_x(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _affine(images, _rows(signs, {(0, 1): strength}), mode="bicubic", fill=0.0)


def _shear_y(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _affine(images, _rows(signs, {(1, 0): strength}), mode="bicubic", fill=0.0)


def _translate_x(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _affine(images, _rows(signs, {(0, 2): strength * images.shape[3]}), mode="nearest", fill=0.0)


def _translate_y(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _affine(images, _rows(signs, {(1, 2): strength * images.shape[2]}), mode="nearest", fill=0.0)


def _rotate(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _rotated(images, math.radians(strength), fill=128 / 255)


def _rotated(images: Tensor, angle: float, *, fill: float) -> Tensor:
    """Rotate counter-clockwise around the centre by an angle in radians."""
    middle = torch.tensor([images.shape[3] / 2, images.shape[2] / 2])
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    rows = torch.cat([turn, (middle - turn @ middle)[:, None]], 1)
    return _affine(images, rows.repeat(len(images), 1, 1), mode="nearest", fill=fill)


def _blended(images: Tensor, other: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Move away from or towards another image, as Pillow's enhancers with a factor of 1 + or - strength do."""
    blended: Tensor = other + (1 + strength * signs) * (images - other)
    return blended


def _grey(images: Tensor) -> Tensor:
    """Return the brightness (N, 1, H, W), with Pillow's weights for three channels and the mean otherwise."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    weights = torch.tensor([19595, 38470, 7471]).to(images).view(1, 3, 1, 1) / 65536
    return (images * weights).sum(1, keepdim=True)


def _color(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _blended(images, _grey(images), strength, signs)


def _contrast(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _blended(images, _grey(images).mean((2, 3), keepdim=True), strength, signs)


def _brightness(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _blended(images, torch.zeros_like(images), strength, signs)


def _sharpness(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _blended(images, _smooth(images), strength, signs)


def _smooth(images: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH filter: a 3x3 mean with weight five in the centre; border pixels do not change."""
    kernel = torch.ones(3, 3).to(images)
    kernel[1, 1] = 5
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, 3, 3)
    if min(images.shape[2:]) < 3:
        return images
    inner = F.conv2d(images, kernel, groups=images.shape[1])
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = inner
    return smooth


def _posterize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    step = float(2 ** (8 - round(strength)))
    return torch.floor(torch.round(images * 255) / step) * step / 255


def _solarize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return torch.where(torch.round(images * 255) < strength, images, 1 - images)


def _autocontrast(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) / span.clamp_min(torch.finfo(images.dtype).tiny), images)


def _equalize(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Equalise each channel as Pillow does, by a lookup table from the histogram of bytes."""
    pixels = torch.round(images.clamp(0, 1) * 255).long().flatten(2)  # (N, C, pixels)
    counts = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    last = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - last).div(255, rounding_mode="floor")  # (N, C, 1)
    before = counts.cumsum(2) - counts
    table = (step.div(2, rounding_mode="floor") + before).div(step.clamp_min(1), rounding_mode="floor").clamp(0, 255)
    equal = (table.gather(2, pixels).to(images) / 255).view_as(images)
    return torch.where((step > 0)[..., None], equal, images)


def _invert(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return 1 - images


def _kept(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return images


def _back(entries: Callable[[Tensor, float], dict[tuple[int, int], float]]) -> Operation:
    """Return the inverse of an affine operation: the same map with the other sign, and 0 (unknown) outside."""

    def undo(images: Tensor, strength: float, signs: Tensor) -> Tensor:
        return _affine(images, _rows(-signs, entries(images, strength)), mode="bilinear", fill=0.0)

    return undo


def _rotate_back(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return _rotated(images, -math.radians(strength), fill=0.0)


def _dimmed(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    return images / (1 + strength * signs)


def _recoloured(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    grey = _grey(images)  # which `_color` leaves unchanged
    return grey + (images - grey) / (1 + strength * signs)


def _recontrasted(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    mean = _grey(images).mean((2, 3), keepdim=True)  # which `_contrast` leaves unchanged
    return mean + (images - mean) / (1 + strength * signs)


def _resharpened(images: Tensor, strength: float, signs: Tensor) -> Tensor:
    found = images
    for _ in range(10):  # fixed-point iteration, as the operation is near the identity
        found = found + (images - _sharpness(found, strength, signs))
    return found


_OPERATIONS: dict[str, Operation] = {
    "shear-x": _shear_x, "shear-y": _shear_y, "translate-x": _translate_x, "translate-y": _translate_y,
    "rotate": _rotate, "color": _color, "posterize": _posterize, "solarize": _solarize, "contrast": _contrast,
    "sharpness": _sharpness, "brightness": _brightness, "autocontrast": _autocontrast, "equalize": _equalize,
    "invert": _invert,
}  # fmt: skip
_INVERSES: dict[str, Operation] = {
    "color": _recoloured, "contrast": _recontrasted, "brightness": _dimmed, "sharpness": _resharpened,
    "invert": _invert,
}  # fmt: skip
"""Inverses of operations that change tones."""
_MOVES: dict[str, Operation] = {
    "shear-x": _back(lambda images, strength: {(0, 1): strength}),
    "shear-y": _back(lambda images, strength: {(1, 0): strength}),
    "translate-x": _back(lambda images, strength: {(0, 2): float(round(strength * images.shape[3]))}),
    "translate-y": _back(lambda images, strength: {(1, 2): float(round(strength * images.shape[2]))}),
    "rotate": _rotate_back,
}
"""Inverses of operations that move pixels, for images and masks."""
_SIGNED = ("shear-x", "shear-y", "translate-x", "translate-y", "color", "contrast", "sharpness", "brightness")
_RANGES = {
    "shear-x": (0, 0.3), "shear-y": (0, 0.3), "translate-x": (0, 150 / 331), "translate-y": (0, 150 / 331),
    "rotate": (0, 30), "color": (0, 0.5), "contrast": (0, 0.5), "sharpness": (0, 0.5), "brightness": (0, 0.5),
    "posterize": (8, 4), "solarize": (256, 0),
}  # fmt: skip

STEPS = tuple(
    Transform(name, level)
    for name, level in (
        ("invert", 7), ("contrast", 6), ("rotate", 2), ("translate-x", 9), ("sharpness", 1),
        ("sharpness", 3), ("shear-y", 2), ("translate-y", 2), ("autocontrast", 5), ("equalize", 2),
        ("shear-y", 5), ("posterize", 5), ("color", 3), ("brightness", 5), ("sharpness", 9),
        ("brightness", 9), ("equalize", 5), ("equalize", 1), ("contrast", 7), ("sharpness", 5),
        ("color", 5), ("translate-x", 5), ("equalize", 7), ("autocontrast", 8), ("translate-y", 3),
        ("sharpness", 6), ("brightness", 6), ("color", 8), ("solarize", 0), ("invert", 0),
        ("equalize", 0), ("autocontrast", 0), ("equalize", 8), ("equalize", 4), ("color", 5),
        ("equalize", 5), ("autocontrast", 4), ("solarize", 4), ("brightness", 3), ("color", 0),
        ("solarize", 1), ("autocontrast", 0), ("translate-y", 3), ("translate-y", 3), ("autocontrast", 1),
        ("solarize", 1), ("equalize", 5), ("invert", 0), ("translate-y", 3), ("autocontrast", 1),
    )
)  # fmt: skip
"""ATS's fifty operations by number; some occur more than once."""
