"""Mark the images whose owners ask for special care, by a short text such as ``0.25`` or ``3:0/5/7``."""

import re
from collections.abc import Sequence

import numpy as np

from gradveil.errors import ConfigError
from gradveil.validate import in_range

_FORMS = "a fraction (0.25), positions (0/5/7), or positions of clients (3:0/5;4:1)"


def mark_sensitive(spec: str | None, parts: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Return which images of each client are sensitive.

    Args:
        spec: None (or ``none``) marks nothing; ``0.25`` that fraction of each client's images, chosen at random and
            rounded (halves up); ``0/5/7`` these positions in every client's data; ``3:0/5/7``, several joined by
            ``;``, these positions of these clients only. A number alone is a fraction if it has a decimal point;
            ``0`` and ``1`` alone are refused, since they could be either.
        parts: each client's indices, as a partition gives them.
        rng: draws the fraction.

    Returns:
        A bool mask per client, as long as its part.

    Raises:
        ConfigError: the text has none of these forms, or names an image or client that does not exist.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> [mask.tolist() for mask in mark_sensitive("1:0/2", [np.arange(2), np.arange(3)], rng)]
        [[False, False], [True, False, True]]
    """
    masks = [np.zeros(len(part), dtype=bool) for part in parts]
    if spec is None or spec.strip() == "none":
        return masks
    text = spec.replace(" ", "")
    if text in {"0", "1"}:
        raise ConfigError(
            f"sensitive must be {_FORMS}, got {spec!r}, which could be a fraction or a position. "
            f"Write {text}.0 for the fraction or {text}/{text} for the position."
        )
    if re.fullmatch(r"\d+(/\d+)*", text):
        for client in range(len(masks)):
            _mark(masks, client, text)
    elif ":" in text:
        for piece in text.split(";"):
            match = re.fullmatch(r"(\d+):(\d+(?:/\d+)*)", piece)
            if match is None:
                raise ConfigError(f"sensitive must be {_FORMS}, got {piece!r} in {spec!r}.")
            if int(match[1]) >= len(masks):
                raise ConfigError(
                    f"sensitive must name clients 0..{len(masks) - 1}, got client {match[1]} in {spec!r}."
                )
            _mark(masks, int(match[1]), match[2])
    else:
        fraction = _fraction(spec)
        for mask in masks:
            mask[rng.choice(len(mask), int(fraction * len(mask) + 0.5), replace=False)] = True
    return masks


def _mark(masks: list[np.ndarray], client: int, positions: str) -> None:
    for position in map(int, positions.split("/")):
        if position >= len(masks[client]):
            raise ConfigError(
                f"sensitive must name positions that clients have, got {position}, but client {client} has "
                f"{len(masks[client]):,} images (positions from 0)."
            )
        masks[client][position] = True


def _fraction(spec: str) -> float:
    try:
        value = float(spec)
    except ValueError as error:
        raise ConfigError(f"sensitive must be {_FORMS}, got {spec!r}.") from error
    in_range("sensitive", value, 0, 1)
    return value
