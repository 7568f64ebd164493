"""Read picture files into arrays with Pillow: for folders of pictures, Tiny-ImageNet and CelebA."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from gradveil.errors import DataError
from gradveil.limits import check_unpacked
from gradveil.validate import is_file

PICTURE_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MOST_PIXELS = 50_000_000
"""Pixels of one picture at most; the size in its header is checked before the picture is unpacked."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""The formats of these endings; Pillow's other readers are never tried."""
_GREY_MODES = {"1", "L", "LA", "La"}
_DEEP_MODES = {"F", "I", "I;16", "I;16B", "I;16L", "I;16N"}


def list_pictures(folder: Path) -> list[Path]:
    """Return the picture files directly in a folder, sorted by name; hidden and other files are skipped."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in PICTURE_ENDINGS and path.name[0] != "."]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.name)


def read_pictures(
    paths: Sequence[Path], *, size: int | None = None, crop: int | None = None, colour: bool = False
) -> np.ndarray:
    """Read pictures into one array (N, C, H, W) uint8, in the order of ``paths``.

    Args:
        paths: the picture files, at least one.
        size: resize each to ``size`` x ``size`` (a picture that is not square is distorted); None keeps the sizes,
            which must then be equal.
        crop: first cut out the central square with this side (or less, in a smaller picture).
        colour: always return three channels; otherwise one channel if all pictures are grey, three if any has colour.

    Raises:
        DataError: for a picture that can't be read, and for mixed sizes without ``size``.
    """
    if not paths:
        raise DataError("There must be at least one picture, got none.")
    images: Iterable[np.ndarray] = _decoded(paths, size, crop)
    if not colour:
        images = list(images)
        colour = any(image.shape[0] == 3 for image in images)
    stacked: np.ndarray | None = None
    for index, image in enumerate(images):
        if stacked is None:
            stacked = np.empty((len(paths), 3 if colour else 1, *image.shape[1:]), np.uint8)
        if image.shape[1:] != stacked.shape[2:]:
            raise DataError(
                f"All pictures must have the same size, but {paths[0]} has {_size(stacked[0])} and {paths[index]} has "
                f"{_size(image)}. Pass size=, e.g. FOLDER/:size=64, to resize them all."
            )
        stacked[index] = image  # a grey picture fills all three channels
    return stacked  # type: ignore[return-value]  # there is at least one picture


def _decoded(paths: Sequence[Path], size: int | None, crop: int | None) -> Iterator[np.ndarray]:
    """Yield pictures as long as all of them together stay within what their files may ask for."""
    packed, unpacked = sum(path.stat().st_size for path in paths if is_file(path)), 0
    for path in paths:
        image = _decode(path, size, crop)
        unpacked += image.nbytes
        check_unpacked(path.parent, unpacked, packed, "Pass size=, e.g. FOLDER/:size=64, or remove empty pictures.")
        yield image


def _decode(path: Path, size: int | None, crop: int | None) -> np.ndarray:
    """Read one picture as (1, H, W) if it is grey, else (3, H, W)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata do no harm to the pixels
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if not is_file(path):
                raise OSError("it is no regular file")
            with Image.open(path, formats=_FORMATS) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise ValueError(f"it states {opened.width} x {opened.height} pixels, of at most {MOST_PIXELS:,}")
                opened.load()
                mode = opened.mode
                picture = opened.convert("L" if mode in _GREY_MODES else "RGB") if mode not in _DEEP_MODES else opened
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(
            f"{path} must be a picture that can be read, but {type(error).__name__}: {error}. Replace or remove it."
        ) from error
    if mode in _DEEP_MODES:
        raise DataError(
            f"{path} must have 8 bits per channel, got Pillow mode {mode!r}, for which white is not defined. "
            "Convert it to 8 bits, or save float images in [0, 1] as .npz."
        )
    if crop is not None:
        side = min(crop, *picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        picture = picture.crop((left, top, left + side, top + side))
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    if mode == "P" and (pixels == pixels[..., :1]).all():
        pixels = pixels[..., 0]  # a palette of greys only, as GIF files of grey pictures have
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _size(image: np.ndarray) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"
