"""Defences, one file each; base.py has the hooks."""

from gradveil.defences.base import HOOKS, Arrived, Budget, Client, Countermove, Defence, Perturbation, Releases, Server
from gradveil.defences.chain import Chain, build_defence, member, required

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
