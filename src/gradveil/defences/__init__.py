"""Defences, one file each; base.py has the hooks."""

from gradveil.defences.base import HOOKS, Budget, Client, Defence, Perturbation, Releases, Server
from gradveil.defences.chain import Chain, build_defence, member, required
from gradveil.defences.countermove import Arrived, Countermove

__all__ = [
    "HOOKS",
    "Arrived",
    "Budget",
    "Chain",
    "Client",
    "Countermove",
    "Defence",
    "Perturbation",
    "Releases",
    "Server",
    "build_defence",
    "member",
    "required",
]
