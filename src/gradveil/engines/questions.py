"""One question of the server to some clients over Flower: who is awaited, for how long, and what came of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gradveil.engines.introductions import Failure

from flwr.app import ArrayRecord, ConfigRecord, RecordDict  # isort: skip - messages says if it is missing

Content = Mapping[str, ArrayRecord | ConfigRecord]


@dataclass(frozen=True)
class Patience:
    """How long the server waits.

    Attributes:
        answer: seconds for the answers to one question; None waits as long as the nodes are there.
        back: seconds until a node must be there, or be back, if the run can't go on without it.
        rival: seconds until a node that says nothing has lost its number to a newer one.
        first_poll: seconds between two looks for answers at first.
        poll: seconds between two looks for answers in the end.
        speak: seconds between two lines that say who is awaited.
    """

    answer: float | None = None
    back: float = 600.0
    rival: float = 60.0
    first_poll: float = 0.1
    poll: float = 1.0
    speak: float = 10.0

    def pause(self, passed: float) -> float:
        """Return the seconds until the next look: a tenth of the time that has passed, within limits.

        Short rounds lose little by it, and long ones do not ask all the time.

        Example:
            >>> [Patience().pause(passed) for passed in (0, 5, 60)]
            [0.1, 0.5, 1.0]
        """
        return min(max(self.first_poll, passed / 10), self.poll)


@dataclass
class Question:
    """One question to some clients, and what came of it; ``lost`` clients may yet come back as another node."""

    kind: str
    contents: Mapping[int, Content]
    answers: dict[int, RecordDict | Failure] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def awaited(self) -> list[int]:
        """Return the clients whose answer is neither there nor given up."""
        return [client for client in self.contents if client not in self.answers]

    def give_up(self, patience: Patience, passed: float, needed: Collection[int], fewest: int) -> None:
        """Note the failures of clients for which it is pointless, or too late, to wait."""
        limit = patience.answer
        failed = {client for client, answer in self.answers.items() if isinstance(answer, Failure)}
        possible = len(self.contents.keys() - self.lost.keys() - failed)
        for client in self.awaited():
            if limit is not None and passed >= limit:
                self.answers[client] = Failure(self.lost.get(client) or f"nothing came within {limit:g} seconds.")
            elif client in self.lost and (passed >= patience.back or (client not in needed and possible >= fewest)):
                self.answers[client] = Failure(self.lost[client])
