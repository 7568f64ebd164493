"""Random changes of bytes, for `fuzzing` and `flower_fuzz`; nothing here imports torch."""

import random
import struct

PIECES = [
    b"null", b"[]", b"{}", b"1e999", b"-1", b"NaN", b'"', b"\n", b"\0", b"9" * 400, b"[" * 200, b"{", b"}", b"\xff" * 8,
    b"\x00" * 8, b"true", b"../../x", b"'", b"=", b":", b",", b"+", b"\x1f\x8b", b"PK\x03\x04", b"0x", b"1_0",
    b"a." * 2000 + b"a = 1", b"\n[" + b"a." * 2000 + b"a]\n", b"= {" + b"'a' . " * 2000 + b"a = 1}\n", b'"""', b"'''",
    *(struct.pack(f"{order}I", value) for order in "<>" for value in (0xFFFFFFFF, 0x7FFFFFFF, 0x10000000, 1)),
    *(struct.pack(f"{order}Q", value) for order in "<>" for value in (1 << 33, (1 << 64) - 1, 1 << 62)),
]  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return a content with one to eight random changes, most often one."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        place = min(rng.randrange(len(changed) + 1), rng.choice([1 << 9, 1 << 30]))  # headers get half of all changes
        way = rng.randrange(7)
        if way == 0 and changed:
            changed[place % len(changed)] ^= 1 << rng.randrange(8)
        elif way == 1 and changed:
            changed[place % len(changed)] = rng.randrange(256)
        elif way == 2:
            del changed[place : place + rng.randint(1, 50)]
        elif way == 3:
            changed[place:place] = rng.choice(PIECES)
        elif way == 4:
            piece = rng.choice(PIECES)
            changed[place : place + len(piece)] = piece
        elif way == 5:
            changed[place:place] = changed[place : place + rng.randint(1, 80)]
        elif rng.random() < 0.3:
            del changed[place:]
    return bytes(changed)
