"""A digest inside a safetensors file, by which damage is found when the file is loaded.

A sealed file has two entries among its metadata: ``gradveil-format`` and ``blake2b``, the digest of everything else in
the file. The header is hashed as the exact bytes that gradveil writes, so that every single changed bit is found, also
one in a name, in a padding space, or in one of the two entries themselves: a file with one of them must have both. A
file with neither (of an earlier version, or of another program) has no digest to check. The digest finds accidents; it
does not stop a forger, who can compute a new one.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from gradveil.errors import DataError
from gradveil.limits import check_regular, parse_json

FORMAT, DIGEST = "gradveil-format", "blake2b"
VERSION = "1"
LONGEST_HEADER = 1 << 25
"""Bytes (32 MiB) of a header at most: more than 200,000 tensors need."""
_CHUNK = 1 << 20


def sealed(packed: bytes) -> bytes:
    """Return the content of a safetensors file with its digest among the metadata."""
    size = int.from_bytes(packed[:8], "little")
    header, body = json.loads(packed[8 : 8 + size]), packed[8 + size :]
    facts = {**header.get("__metadata__", {}), FORMAT: VERSION}
    digest = hashlib.blake2b(header_bytes({**header, "__metadata__": facts}), digest_size=32)
    digest.update(body)
    return header_bytes({**header, "__metadata__": {**facts, DIGEST: digest.hexdigest()}}) + body


def check_seal(path: Path) -> None:
    """Raise `DataError` if a safetensors file has a digest that does not fit its content.

    OSError and ValueError are raised if the file can't be read or has no header.
    """
    check_regular(path)
    with path.open("rb") as file:
        raw, header = _read_header(file)
        facts = header.get("__metadata__", {}) if isinstance(header, dict) else {}
        if not isinstance(facts, dict) or not {FORMAT, DIGEST} & facts.keys():
            return
        plain = {**header, "__metadata__": {key: value for key, value in facts.items() if key != DIGEST}}
        digest = hashlib.blake2b(header_bytes(plain), digest_size=32)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    whole = raw == header_bytes(header) and facts.get(FORMAT) == VERSION
    if not whole or facts.get(DIGEST) != digest.hexdigest():
        raise DataError(
            f"{path} must be a whole safetensors file, got: its content does not fit its digest, so some of it was "
            "changed since it was written. Restore it from a copy."
        )


def without_seal(facts: Mapping[str, str]) -> dict[str, str]:
    """Return metadata without the two entries of the seal."""
    return {key: value for key, value in facts.items() if key not in (FORMAT, DIGEST)}


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Return a header with its length in front, always the same bytes for the same content."""
    ordered = dict(header)
    if "__metadata__" in ordered:
        ordered["__metadata__"] = dict(sorted(ordered["__metadata__"].items()))
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: IO[bytes]) -> tuple[bytes, Any]:
    """Return the header with its length as bytes, and as JSON."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > LONGEST_HEADER:
        raise ValueError("it has no header, or one that is too long")
    text = file.read(size)
    return length + text, parse_json(text)
