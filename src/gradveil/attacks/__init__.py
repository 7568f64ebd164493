"""Attacks, one file per attack; base.py defines their kinds, and parts/ has what several of them share."""

from gradveil.attacks.base import AnyAttack, Attack, MembershipAttack, Scene, build_any_attack, build_attack
from gradveil.attacks.decoder import Decoder

__all__ = ["AnyAttack", "Attack", "Decoder", "MembershipAttack", "Scene", "build_any_attack", "build_attack"]
