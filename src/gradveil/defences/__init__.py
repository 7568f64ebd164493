"""Defences, one file each; base.py has the hooks."""

from gradveil.defences.base import HOOKS, Client, Defence, Perturbation, Server
from gradveil.defences.chain import Chain, build_defence, member, planned_defence, required
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.accounting import Budget, Releases

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
    "planned_defence",
    "required",
]
