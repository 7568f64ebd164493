"""Attacks, one file each; base.py has what each kind is, parts/ what they are made of."""

from gradveil.attacks.base import AnyAttack, Attack, Decoder, MembershipAttack, Scene, build_any_attack, build_attack

__all__ = ["AnyAttack", "Attack", "Decoder", "MembershipAttack", "Scene", "build_any_attack", "build_attack"]
