"""Errors about a client's answer: they name the client, and nothing that it sent goes unexplained."""

from collections.abc import Iterator
from contextlib import contextmanager

from gradveil.errors import GradveilError, MessageError


@contextmanager
def of_client(client: int) -> Iterator[None]:
    """Let an error about a message name the client."""
    try:
        yield
    except MessageError as error:
        raise MessageError(f"The answer of client {client} was not used. {error}") from error


@contextmanager
def no_foreign_error() -> Iterator[None]:
    """Turn an error that no check foresaw into one about the message."""
    try:
        yield
    except GradveilError:
        raise
    except Exception as error:  # whatever Python meets in values that somebody made up
        raise MessageError(f"A message must be one that can be read, got {type(error).__name__} on reading.") from error
