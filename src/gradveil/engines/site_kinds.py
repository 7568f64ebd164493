"""The kinds of messages that a site answers; nothing here imports torch."""

from collections.abc import Callable
from functools import partial

try:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise ImportError("gradveil over Flower needs Flower. Run `pip install 'gradveil[flower]'`.") from error

KINDS = ("query", "query.keys", "query.shares", "query.unmask", "train", "evaluate")
"""Who the site is; the steps of a secure sum but one, which is to train; to train; to score."""


def app_of(answer: Callable[[str, Message, Context], Message]) -> ClientApp:
    """Return a ClientApp that answers all kinds of messages by one function, which gets the kind first."""
    app = ClientApp()
    for kind in KINDS:
        verb, _, step = kind.partition(".")
        register = {"query": app.query, "train": app.train, "evaluate": app.evaluate}[verb]
        (register(step) if step else register())(partial(answer, kind))
    return app
