"""Named random streams: every draw comes from a seed and the name of its purpose, never from global state."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch

SECRET = 2**63
"""Seeds of this size or more are secrets: all of their bits count."""
_WORDS, _OFFSET = 624, 24
"""Words in the Mersenne Twister's state, and the byte of a CPU generator's state at which they begin.

Each word has 32 bits and is stored as a 64-bit integer.
"""
_key: ContextVar[int] = ContextVar("key of the block", default=0)


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose; equal arguments give equal seeds, different ones unrelated seeds.

    PyTorch's CPU generator uses only the low 32 bits, which an attacker could try out. A stream that must stay secret
    therefore needs a seed of `SECRET` or more, see `stream`.

    Example:
        >>> derive_seed(0, "client", 3) == derive_seed(0, "client", 3)
        True
        >>> derive_seed(0, "client", 3) == derive_seed(0, "client", "3")
        False
    """
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a CPU generator for one purpose, e.g. ``stream(0, "client", 3, "round", 7)``.

    A seed of `SECRET` or more (best: 256 bits from the operating system) fills the whole state of the generator.
    """
    return _seeded(torch.Generator(), seed, *purpose)


@contextmanager
def global_stream(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed torch's global generator within the ``with`` block, and restore it afterwards.

    It is for code that takes no generator (initialisation of layers, dropout). Only the CPU generator is
    touched; `torch.manual_seed` also queues calls for every absent kind of accelerator.
    """
    before = torch.default_generator.get_state()
    _seeded(torch.default_generator, seed, *purpose)
    own = hashlib.sha256(repr(("key", seed, *purpose)).encode()).digest() if seed >= SECRET else b""
    outer = _key.set(int.from_bytes(own, "big"))
    try:
        yield
    finally:
        _key.reset(outer)
        torch.default_generator.set_state(before)


def block_key() -> int:
    """Return a key of 256 bits for the current block of `global_stream`; 0 outside, or if its seed is no secret.

    Draws of the global generator tell nothing about it.
    """
    return _key.get()


def _seeded(generator: torch.Generator, seed: int, *purpose: str | int) -> torch.Generator:
    generator.manual_seed(derive_seed(seed, *purpose))
    if seed >= SECRET:
        digest = hashlib.shake_256(repr((seed, *purpose)).encode()).digest(4 * _WORDS)
        words = np.frombuffer(digest, "<u4").astype(np.uint64)
        state = generator.get_state()
        state[_OFFSET : _OFFSET + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
    return generator
