"""Checks of settings. Each raises an error with the rule and the value if a setting breaks its rule."""

import math
from collections.abc import Iterable
from pathlib import Path

from gradveil.errors import ConfigError, UnknownNameError


def in_range(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless ``value`` is a finite number between ``low`` and ``high``.

    Example:
        >>> in_range("fraction", 0.5, 0, 1)
        >>> in_range("fraction", float("nan"), 0, 1)
        Traceback (most recent call last):
        gradveil.errors.ConfigError: fraction must be in [0, 1], got nan.
        >>> in_range("lr", 0, 0, open_low=True)
        Traceback (most recent call last):
        gradveil.errors.ConfigError: lr must be more than 0, got 0.
    """
    whole = isinstance(value, int) and not isinstance(
        value, bool
    )  # compared without conversion: it may exceed all floats
    number = whole or (isinstance(value, float) and math.isfinite(value))
    above = number and (value > low if open_low else value >= low)
    below = number and (value < high if open_high else value <= high)
    if above and below:
        return
    if math.isinf(high):
        rule = "a finite number" if math.isinf(low) else f"{'more than' if open_low else 'at least'} {low:g}"
    elif math.isinf(low):
        rule = f"{'less than' if open_high else 'at most'} {high:g}"
    else:
        rule = f"in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    error = ConfigError(f"{name} must be {rule}, got {value}.")
    error.setting = name
    raise error


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise unless ``value`` is one of ``choices``.

    Example:
        >>> one_of("init", "unifrom", ["default", "uniform"])
        Traceback (most recent call last):
        gradveil.errors.UnknownNameError: Unknown init 'unifrom'. Did you mean 'uniform'? Known: default, uniform.
    """
    known = list(choices)
    if value not in known:
        raise UnknownNameError(name, value, known)


def is_file(path: Path) -> bool:
    """Return whether a path is a file that exists; a name that is too long for the system is not."""
    try:
        return path.is_file()
    except OSError:
        return False
