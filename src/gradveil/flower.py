"""Protect, train and tap in your own Flower app; see docs/flower.md. Needs ``pip install 'gradveil[flower]'``.

Each name is imported at its first use: every message of Flower starts a process, which then loads only what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradveil.engines.flower_protect import ProtectMod, hide_errors, private_folder, protect
    from gradveil.engines.flower_train import ProtectedRound, own_network, shared_arrays, train
    from gradveil.runs.flower_tap import FlowerTap as Tap

_PLACES = {
    "ProtectMod": "engines.flower_protect",
    "ProtectedRound": "engines.flower_train",
    "Tap": "runs.flower_tap",
    "hide_errors": "engines.flower_protect",
    "own_network": "engines.flower_train",
    "private_folder": "engines.flower_protect",
    "protect": "engines.flower_protect",
    "shared_arrays": "engines.flower_train",
    "train": "engines.flower_train",
}
"""The module below gradveil that each public name lives in."""

__all__ = [
    "ProtectMod",
    "ProtectedRound",
    "Tap",
    "hide_errors",
    "own_network",
    "private_folder",
    "protect",
    "shared_arrays",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'gradveil.flower' has no attribute {name!r}")
    found = getattr(import_module(f"gradveil.{_PLACES[name]}"), "FlowerTap" if name == "Tap" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
