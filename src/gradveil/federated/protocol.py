"""How clients train between receiving the model and sending their update."""

from dataclasses import dataclass

from gradveil.defences.base import Releases
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains.

    Attributes:
        algorithm: ``fedavg`` trains for ``epochs``; ``fedsgd`` takes the gradient of a single batch.
        epochs: passes over the client's data in a round.
        batch_size: images a step; 0 is all of the client's.
        momentum: of SGD; starts anew each round.
        nesterov: Nesterov's form of the momentum.
        weight_decay: L2 penalty, added to the gradient after the defence.
        batch_norm: ``freeze`` trains with the received running statistics; else those of the batch are used.
    """

    algorithm: str = "fedavg"
    epochs: int = 1
    batch_size: int = 32
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    batch_norm: str = "average"

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ["fedavg", "fedsgd"])
        in_range("epochs", self.epochs, 1)
        in_range("batch_size", self.batch_size, 0)
        in_range("momentum", self.momentum, 0, 1, open_high=True)
        in_range("weight_decay", self.weight_decay, 0)
        one_of("batch_norm", self.batch_norm, ["average", "local", "freeze"])

    def step_weights(self, num_examples: int) -> list[float]:
        """How much each step's gradient counts in the whole change, for it goes on in the momentum.

        Example:
            >>> LocalSettings(epochs=3, batch_size=0, momentum=0.5).step_weights(4)
            [1.75, 1.5, 1.0]
        """
        steps = self.num_steps(num_examples)
        carried = [(1 - self.momentum**left) / (1 - self.momentum) for left in range(steps, 0, -1)]
        return [1 + self.momentum * weight for weight in carried] if self.nesterov else carried

    def num_steps(self, num_examples: int) -> int:
        """How many steps a round takes on so many images.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4).num_steps(10)
            6
        """
        if self.algorithm == "fedsgd":
            return 1
        return self.epochs * -(-num_examples // (self.batch_size or num_examples))

    def releases(self, num_examples: int, rounds: int = 1, entries: int = 0) -> Releases:
        """What a client with so many images gives away in so many rounds, for the accounting of privacy.

        ``entries`` are those of the model, where a defence's budget depends on them.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4).releases(10, rounds=3)
            Releases(num_examples=10, batch_size=4, steps=18, uses=6, rounds=3, entries=0)
        """
        batch = min(self.batch_size or num_examples, num_examples)
        passes = self.epochs if self.algorithm == "fedavg" else 1
        return Releases(num_examples, batch, self.num_steps(num_examples) * rounds, passes * rounds, rounds, entries)
