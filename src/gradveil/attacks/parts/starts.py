"""Where a search begins: noise, a pattern, or a likely picture."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data.pictures import PICTURE_ENDINGS, read_pictures
from gradveil.data.pixels import to_unit
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation

STARTS = ("normal", "uniform", "patterned", "grey", "class-average", "public", "lti")
NEEDS = {
    "class-average": frozenset({Knowledge.CLASS_AVERAGES}),
    "public": frozenset({Knowledge.PUBLIC_DATA}),
    "lti": frozenset({Knowledge.PUBLIC_DATA}),
}
"""Knowledge that a start needs."""
_PATTERN = 4


def check_start(start: str) -> None:
    """Raise UnknownNameError unless ``start`` is a known start or the path of a picture."""
    if start not in STARTS and not start.lower().endswith(PICTURE_ENDINGS):
        raise UnknownNameError("start", start, [*STARTS, "a picture's path"])


def begin(
    start: str, seen: Observation, labels: Tensor | None, rows: int, batch_size: int, space: Space, rng: torch.Generator
) -> Tensor:
    """Return the first guesses (rows, batch_size * C * H * W) in normalised space.

    ``normal``: N(0, 1) (DLG, GS). ``uniform``: pixels from U(0, 1). ``patterned``: a random 4 x 4 tile repeated
    (breaching's modern settings). ``grey``: mid-grey. ``class-average``: the mean image of each label's class, which
    must be granted (DCS2's adaptive attack). ``public``: images of the public data, which must be granted. A path: the
    picture in this file, resized. ``lti`` is not made here: see `gradveil.attacks.lti`.

    Args:
        start: one of the names above, or a path.
        seen: has class averages and public data.
        labels: (rows, batch_size), for class averages.
        rows: the number of searches.
        batch_size: images per search.
        space: the space of the guesses.
        rng: a CPU generator.
    """
    check_start(start)
    channels, height, width = space.shape
    many = (rows, batch_size, channels, height, width)
    if start == "normal":
        return torch.randn(rows, batch_size * space.size, generator=rng)
    if start == "patterned":
        tile = torch.randn(rows, batch_size, channels, _PATTERN, _PATTERN, generator=rng)
        down, across = -(-height // _PATTERN), -(-width // _PATTERN)
        return tile.repeat(1, 1, 1, down, across)[..., :height, :width].reshape(rows, -1)
    if start == "uniform":
        pixels = torch.rand(many, generator=rng)
    elif start == "grey":
        pixels = torch.full(many, 0.5)
    elif start == "class-average":
        if labels is None:
            raise ConfigError(
                "start=class-average needs an attack that fixes labels first, got one that searches them. "
                "Use idlg or gs, or another start."
            )
        known = labels.to(seen.class_averages.device)
        pixels = seen.class_averages[known if known.dim() == 2 else known.argmax(2)]
    elif start == "public":
        images = seen.public_data.images
        pixels = images[torch.randint(len(images), (rows, batch_size), generator=rng)]
    else:
        picture = to_unit(read_pictures([Path(start)], colour=channels == 3))
        picture = picture if channels == 3 else picture.mean(1, keepdim=True)
        pixels = F.interpolate(picture, (height, width), mode="bilinear", antialias=True)[:, None].expand(many)
    if pixels.shape != many:
        raise ConfigError(f"start={start} must give images of shape {many[2:]}, got {tuple(pixels.shape[2:])}.")
    return space.from_pixels(pixels).reshape(rows, -1)
