"""Named random streams: every draw comes from a seed and the name of its purpose, never from global state."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def global_stream(seed: int, *purpose: str | int) -> Iterator[None]:
    """For code that can't be given a generator (layers' initialisation, dropout): torch's own one, put back afterwards.

    Touches the CPU generator alone; `torch.manual_seed` also queues calls for every absent kind of accelerator.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(derive_seed(seed, *purpose))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
