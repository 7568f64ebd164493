"""The rounds that a client of somebody's own app has answered, noted in its private folder."""

from pathlib import Path

from gradveil.engines.site_codes import refused
from gradveil.storage import locked, write_atomic


def answer_once(path: Path, round_number: int) -> None:
    """Note a round in a file before it is answered. Raise if it, or a later one, was noted before.

    With several answers to the same round a server could average the noise away, so that messages which come at the
    same time wait for each other.
    """
    with locked(path):
        text = path.read_text() if path.exists() else "0"
        if not text.isdecimal() or int(text) >= round_number:
            raise refused(
                "round", f"A round is answered once, in increasing order, got {round_number} after {text[:20]!r}."
            )
        write_atomic(path, str(round_number).encode(), mode=0o600)
