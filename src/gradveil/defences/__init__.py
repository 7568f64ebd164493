"""Defences, one file each; base.py has the hooks."""

from gradveil.defences.base import HOOKS, Client, Defence, Server
from gradveil.defences.chain import Chain, build_defence

__all__ = ["HOOKS", "Chain", "Client", "Defence", "Server", "build_defence"]
