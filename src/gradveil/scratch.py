"""A scratch folder for long preparations of an attack, so that a killed run need not repeat them.

The caller of an attack offers a folder with `scratch_in`; attacks ask for a file in it with `scratch_file`. Neither
needs to know the other. What is kept there is made from public data alone, and can be deleted at any time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_folder: ContextVar[Path | None] = ContextVar("scratch", default=None)


@contextmanager
def scratch_in(folder: Path | None) -> Iterator[None]:
    """Offer a folder within the ``with`` block; None offers none.

    Example:
        >>> with scratch_in(Path("runs/x/scratch")):
        ...     print(scratch_file("inverter.safetensors").as_posix())
        runs/x/scratch/inverter.safetensors
        >>> scratch_file("inverter.safetensors") is None
        True
    """
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def scratch_file(name: str) -> Path | None:
    """Return the path of a file in the folder that was offered, or None if there is none; it may not exist yet."""
    folder = _folder.get()
    return None if folder is None else folder / name
