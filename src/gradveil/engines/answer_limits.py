"""What a server over Flower accepts of any client, and how long it waits for whom: its own keys of the run config."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gradveil.registry import convert
from gradveil.validate import in_range


@dataclass(frozen=True)
class AnswerLimits:
    """What the server accepts of any client, and how long it waits for whom.

    Attributes:
        max_images: largest number of images that a client may state; its update is weighted by it.
        max_norm: largest Euclidean norm of an update; 0 means any.
        min_clients: a round goes on if this many clients have answered; 0 means what ``bad_answers`` says.
        round_seconds: time for the answers to one question, after which a client is left out of the round; 0 is no
            limit.
        wait_seconds: time until a node must be there, or be back, if the run can't go on without it.
    """

    max_images: int = 1_000_000
    max_norm: float = 0.0
    min_clients: int = 0
    round_seconds: float = 0.0
    wait_seconds: float = 600.0

    def __post_init__(self) -> None:
        in_range("max_images", self.max_images, 1)
        in_range("max_norm", self.max_norm, 0)
        in_range("min_clients", self.min_clients, 0)
        in_range("round_seconds", self.round_seconds, 0)
        in_range("wait_seconds", self.wait_seconds, 0)


def read_limits(run_config: Mapping[str, object]) -> AnswerLimits:
    """Return the server's limits from the run config; 0 or an empty text is the default.

    Example:
        >>> read_limits({"max-images": 0, "min-clients": 2}).min_clients
        2
    """
    keys = {field.name.replace("_", "-"): field.name for field in fields(AnswerLimits)}
    given = {keys[key]: value for key, value in run_config.items() if key in keys and value not in ("", 0)}
    return AnswerLimits(**convert(AnswerLimits, given, owner="a server's limits"))


LIMIT_KEYS = tuple(field.name.replace("_", "-") for field in fields(AnswerLimits))
"""The keys of a run config that are read here."""
