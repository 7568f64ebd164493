"""How a message travels between Flower's process and a site's warm worker: pieces of bytes over a unix socket.

The socket lies in the site's private folder, mode 0600. Nothing here imports torch, as Flower starts a process for each
message.
"""

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_LENGTH = struct.Struct(">Q")
LONGEST_PATH = 100
"""Longest path of a unix socket, in bytes; systems allow a few more."""


def socket_path(private_folder: str, number: int) -> Path:
    """Return where the worker of a client listens."""
    return Path(private_folder).absolute() / f"worker-{number}.sock"


def usable(path: Path) -> bool:
    """Return whether this system has unix sockets and the path is short enough for one."""
    return hasattr(socket, "AF_UNIX") and len(os.fsencode(path)) <= LONGEST_PATH


def send(connection: socket.socket, pieces: Sequence[bytes]) -> None:
    """Send pieces of bytes, each after its length."""
    connection.sendall(b"".join(part for piece in pieces for part in (_LENGTH.pack(len(piece)), piece)))


def receive(connection: socket.socket, count: int) -> list[bytes]:
    """Return the next ``count`` pieces. Raise ConnectionError if the other side ends before.

    Example:
        >>> one, other = socket.socketpair()
        >>> with one, other:
        ...     send(one, [b"a", b"", b"bc"])
        ...     receive(other, 3)
        [b'a', b'', b'bc']
    """
    return [_exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]) for _ in range(count)]


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = list[bytes](), size
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise ConnectionError("The other side ended in the middle of a message.")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
