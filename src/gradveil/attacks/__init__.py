"""Attacks, one file each; base.py has the one method, parts/ what they are made of."""

from gradveil.attacks.base import Attack, build_attack

__all__ = ["Attack", "build_attack"]
