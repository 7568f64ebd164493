"""The short codes with which a site says why it sent nothing; the server has a sentence for each.

The text of an error can name files, patients or pixels, so only its code leaves the site; the text goes to the site's
own log. What a client sends as a code is looked up here and never repeated.
"""

from collections.abc import Mapping

from gradveil.errors import (
    ConfigError,
    DataError,
    DefenceError,
    DivergedError,
    GradveilError,
    MessageError,
    RefusedError,
    RunFolderError,
    TripwireError,
    WorkerError,
)

CODES: Mapping[str, tuple[type[GradveilError], str]] = {
    "aggregation": (ConfigError, "It agreed to secure aggregation only."),
    "aux": (ConfigError, "Its defence or model needs public images; the run's are not among the files that it allows."),
    "batch": (ConfigError, "The run's batch size is outside of its limits."),
    "budget": (RefusedError, "Its budget for scores of training images is spent."),
    "config": (ConfigError, "The run's settings can't be used there."),
    "data": (DataError, "Its data can't be read."),
    "defence": (ConfigError, "The run's defence must be the one that the site agreed to, letter by letter."),
    "diverged": (DivergedError, "Its training diverged. Lower the run's lr."),
    "epochs": (ConfigError, "The run has more local epochs than it allows."),
    "epsilon": (RefusedError, "The run would cost more privacy than its limit over all runs, or has no guarantee."),
    "file": (ConfigError, "The run names a file that it did not agree to."),
    "images": (RunFolderError, "Its images are not those that its training began with."),
    "internal": (WorkerError, "It failed unexpectedly."),
    "message": (MessageError, "It could not read the server's message."),
    "model": (ConfigError, "The run's model must be the one that the site agreed to, letter by letter."),
    "number": (ConfigError, "Its partition-id must be the number of one of the run's clients."),
    "opened": (RefusedError, "It has opened the sum of this round before, and opens no other one."),
    "peers": (RefusedError, "Keys in the secure sum are not signed by the sites that it knows."),
    "policy": (ConfigError, "Its own policy is incomplete or invalid."),
    "private-model": (RefusedError, "It scores a model with private parts on test images only."),
    "protection": (DefenceError, "Its defence could not protect the update."),
    "rate": (ConfigError, "The learning rate is above its limit, or not the one of the run's settings."),
    "round": (RefusedError, "It answers each round once, in increasing order, and got a repeated or impossible one."),
    "rounds": (ConfigError, "The run has more rounds than it allows, or its rounds of all runs are used up."),
    "shape": (ConfigError, "A site's images must have the run's shape and classes."),
    "shared-model": (RefusedError, "It scores test images only for its own model, one with private parts."),
    "state": (RunFolderError, "Its private state, keys for example, is lost or damaged."),
    "step": (ConfigError, "The run's momentum is above its limit, or lr times weight-decay is above 1."),
    "sum": (RefusedError, "It refused a step of the secure sum: its clients, threshold or order are not acceptable."),
    "sums": (ConfigError, "The run's defence shares its noise among clients, which needs secure aggregation."),
    "training-images": (RefusedError, "It gives no scores of its training images."),
    "tripwire": (TripwireError, "It found a trap in the model that it received."),
    "trunk": (ConfigError, "The frozen part of its model is not the server's: other public pictures or weights."),
    "unmarked": (ConfigError, "The defence protects marked images only, and the site has marked none."),
    "weights": (RefusedError, "It scores only the weights of rounds that it answered."),
}
"""The error that the server raises for each code, and its sentence about the site."""

_BY_CLASS: tuple[tuple[type[GradveilError], str], ...] = (
    (MessageError, "message"),
    (TripwireError, "tripwire"),
    (DivergedError, "diverged"),
    (DefenceError, "protection"),
    (RunFolderError, "state"),
    (DataError, "data"),
    (ConfigError, "config"),
)


def refused(code: str, text: str) -> RefusedError:
    """Return the error of a site that does not agree; the text is for its own log."""
    if code not in CODES:
        raise KeyError(code)
    error = RefusedError(text)
    error.code = code
    return error


def code_of(error: BaseException) -> str:
    """Return the code that leaves the site for an error.

    Example:
        >>> code_of(DefenceError("The update of /srv/patients.npz can't be protected.")), code_of(KeyError("pixel"))
        ('protection', 'internal')
    """
    if isinstance(error, RefusedError):
        return error.code
    return next((code for kind, code in _BY_CLASS if isinstance(error, kind)), "internal")


def named(client: str, code: object) -> GradveilError:
    """Return the server's error for a code that a client sent; an unknown code is not repeated.

    Example:
        >>> named("Client 3", "state")
        RunFolderError("Client 3 sent nothing. Its private state, keys for example, is lost or damaged. Its log has more (code 'state').")
    """  # noqa: E501 - an error is one line
    kind, sentence = CODES.get(code, (None, "")) if isinstance(code, str) else (None, "")
    if kind is None:
        return WorkerError(f"{client} sent nothing. It answered with an unknown code. Look at its log.")
    return kind(f"{client} sent nothing. {sentence} Its log has more (code {code!r}).")
