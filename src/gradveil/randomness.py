"""Named random streams: every draw comes from a seed and the name of its purpose, never from global state."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

SECRET = 2**63
"""Seeds from here on are secrets: all of their bits count."""
_WORDS, _OFFSET = 624, 24
"""The Mersenne Twister's state, and where it begins in that of a CPU generator, as 64-bit integers of 32 bits each."""


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose; equal arguments give equal seeds, others are unrelated.

    Of these PyTorch's CPU generator uses the low 32 alone: whoever is not to know a stream must not be able to try them
    all, and so is given one of a seed from `SECRET` on, by `stream`.

    Example:
        >>> derive_seed(0, "client", 3) == derive_seed(0, "client", 3)
        True
        >>> derive_seed(0, "client", 3) == derive_seed(0, "client", "3")
        False
    """
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. ``stream(0, "client", 3, "round", 7)``.

    A seed from `SECRET` on, best 256 bits of the system's, fills the whole state of the generator.
    """
    return _seeded(torch.Generator(), seed, *purpose)


@contextmanager
def global_stream(seed: int, *purpose: str | int) -> Iterator[None]:
    """For code that can't be given a generator (layers' initialisation, dropout): torch's own one, put back afterwards.

    Touches the CPU generator alone; `torch.manual_seed` also queues calls for every absent kind of accelerator.
    """
    before = torch.default_generator.get_state()
    _seeded(torch.default_generator, seed, *purpose)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _seeded(generator: torch.Generator, seed: int, *purpose: str | int) -> torch.Generator:
    generator.manual_seed(derive_seed(seed, *purpose))
    if seed >= SECRET:
        digest = hashlib.shake_256(repr((seed, *purpose)).encode()).digest(4 * _WORDS)
        words = np.frombuffer(digest, "<u4").astype(np.uint64)
        state = generator.get_state()
        state[_OFFSET : _OFFSET + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
    return generator
