"""Attacks, one file each; base.py has the one method, parts/ what they are made of."""

from gradveil.attacks.base import Attack

__all__ = ["Attack"]
