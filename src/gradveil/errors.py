"""Everything gradveil raises on purpose.

::

    GradveilError
    ├── ConfigError            a setting is wrong; nothing was started
    │   ├── UnknownNameError   no component or setting has this name (with a did-you-mean)
    │   └── ThreatModelError   an attack needs more than the threat model grants
    ├── DataError              a data file is corrupt, or has the wrong content
    │   └── MissingDataError   a data file is missing and could not be downloaded
    ├── RefusedError           a site does not agree to what a server asks
    ├── RunFolderError         the output folder holds another run, or can't be written
    └── TrainingError          a run failed after it had started
        ├── DefenceError       a defence could not protect an update, so it was not sent
        ├── DivergedError      the training produced NaN or infinity
        ├── MessageError       a message from another machine breaks its form, so it was not used
        ├── TripwireError      a client found a trap in the model, and sent nothing
        ├── UnexplainedError   a recorded training loop did something that no specification can say
        └── WorkerError        a worker process, or a site's node, was lost

Each message tells what was wrong, the rule and the value, and ends with the way out.
The command line turns `TrainingError` into exit code 1 and all others into exit code 2.
"""

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches


def with_choices(wrong: str, name: str, known: Iterable[str], lead: str = "Known") -> str:
    """Return a message about an unknown name, with the closest known name and all of them.

    Example:
        >>> with_choices("Model 'mlp' has no setting 'hiden'.", "hiden", ["hidden", "bias"])
        "Model 'mlp' has no setting 'hiden'. Did you mean 'hidden'? Known: bias, hidden."
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{wrong}{hint} {lead}: {', '.join(names) or 'none'}."


def printable(text: str) -> str:
    r"""Return a text that a terminal only shows: control characters, which could hide other text, are escaped.

    Line breaks and tabs stay; so do all letters, but characters that change the direction of writing do not.

    Example:
        >>> printable("red \x1b[31malert\x07")
        'red \\x1b[31malert\\x07'
    """
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    harmless = character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return character if harmless else character.encode("unicode_escape").decode()


class GradveilError(Exception):
    """Base of all errors that gradveil raises on purpose."""


class ConfigError(GradveilError):
    """A setting breaks its rule.

    Attributes:
        setting: the name of a setting that is out of its range, "" for other errors.
    """

    setting: str = ""


class UnknownNameError(ConfigError):
    """No component, setting or choice has this name.

    Example:
        >>> raise UnknownNameError("model", "lenet6", ["lenet5", "mlp"])
        Traceback (most recent call last):
        gradveil.errors.UnknownNameError: Unknown model 'lenet6'. Did you mean 'lenet5'? Known: lenet5, mlp.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, wrong: str = "", lead: str = "Known") -> None:
        """Make the message from the parts, with the close match and the known names.

        Args:
            kind: what was to be named.
            name: the unknown name.
            known: the names to choose from.
            wrong: the first sentence, if it is not "Unknown KIND NAME.".
            lead: what to write before the known names.
        """
        super().__init__(with_choices(wrong or f"Unknown {kind} {name!r}.", name, known, lead))


class ThreatModelError(ConfigError):
    """An attack asks for knowledge that the threat model does not grant."""


class DataError(GradveilError):
    """A data file is corrupt or does not hold what it should."""


class MissingDataError(DataError):
    """A data file is missing; the message says which, its checksum and where to put it."""


class RefusedError(GradveilError):
    """A site does not agree to what a server asks; nothing was sent.

    Attributes:
        code: the short word that is sent in place of the message, which may name files of the site.
    """

    code: str = "config"


class RunFolderError(GradveilError):
    """The output folder can't be used for this run."""


class TrainingError(GradveilError):
    """A run failed after it had started; its last checkpoint is intact."""


class DefenceError(TrainingError):
    """A defence could not protect an update; the update was not sent."""


class DivergedError(TrainingError):
    """The training produced NaN or infinity."""


class MessageError(TrainingError):
    """A message from another machine does not have the form that was agreed on; it was not used."""


class TripwireError(TrainingError):
    """A client found a trap in the model that it received; nothing was sent."""


class UnexplainedError(TrainingError):
    """A recorded training loop did something that no specification can say."""


class WorkerError(TrainingError):
    """A worker process, or a site's node, was lost."""


def named_error(kind: str, message: str) -> GradveilError | None:
    """Return an error of the class ``kind``, as another process raised it, or None if gradveil has no such class.

    Example:
        >>> named_error("DataError", "No images.")
        DataError('No images.')
    """
    found = globals().get(kind)
    if not (isinstance(found, type) and issubclass(found, GradveilError)):
        return None
    return ConfigError(message) if issubclass(found, UnknownNameError) else found(message)
