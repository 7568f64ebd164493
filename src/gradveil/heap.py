"""How the C library hands out memory: freed memory is kept, since the next step of a search needs as much again."""

import ctypes

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
"""Parameters of glibc's mallopt."""


def keep_freed_memory() -> bool:
    """Make glibc allocate tensors from its heap and keep freed memory; return whether that was possible.

    Otherwise each large tensor is mapped anew, and the kernel fills it with zeros first: for wide networks that is a
    third of a step. It is for processes that belong to gradveil, such as its workers and its command line.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False  # another C library
    return all([mallopt(_MMAP_THRESHOLD, 1 << 30), mallopt(_TRIM_THRESHOLD, (1 << 31) - 1), mallopt(_TOP_PAD, 1 << 28)])
