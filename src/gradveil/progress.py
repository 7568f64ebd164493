"""Progress of long work: workers call `tell`, callers use `listening`, and neither needs to know the other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[float], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with the share of the work that is done, from 0 to 1, within the ``with`` block.

    Example:
        >>> heard = []
        >>> with listening(heard.append):
        ...     tell(0.5)
        >>> tell(1.0)
        >>> heard
        [0.5]
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def part(number: int, parts: int) -> Iterator[None]:
    """Count progress within the ``with`` block as that of part ``number`` (from 0) of ``parts`` equal parts.

    Example:
        >>> with listening(print), part(1, 4):
        ...     tell(0.5)
        0.375
    """
    listener = _listener.get()
    if listener is None:
        yield
        return
    with listening(lambda share: listener((number + share) / parts)):
        yield


def tell(share: float) -> None:
    """Report the share of the work that is done; does nothing if nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(share)
