"""Named random streams: every draw comes from a seed and the name of its purpose, never from global state."""

import hashlib

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose; equal arguments give equal seeds, others are unrelated.

    Example:
        >>> derive_seed(0, "client", 3) == derive_seed(0, "client", 3)
        True
        >>> derive_seed(0, "client", 3) == derive_seed(0, "client", "3")
        False
    """
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. ``stream(0, "client", 3, "round", 7)``."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))
