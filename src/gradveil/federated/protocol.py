"""How clients train between receiving the model and sending their update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradveil.config import TrainSettings
from gradveil.defences.parts.accounting import Releases
from gradveil.errors import ConfigError
from gradveil.validate import in_range, one_of

OPTIMISERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains in one round.

    Attributes:
        algorithm: ``fedavg`` trains for ``epochs``; ``fedsgd`` takes the gradient of a single batch.
        epochs: passes over the client's data in a round.
        batch_size: images per step; 0 takes all of the client's images.
        momentum: of SGD; its velocity starts at 0 in each round.
        nesterov: whether to use Nesterov momentum.
        weight_decay: L2 penalty, added to the gradient after the defence; adamw shrinks the weights instead.
        batch_norm: ``freeze`` trains with the received running statistics; ``average`` and ``local`` use the batch's.
        optimiser: ``sgd``, ``adam`` or ``adamw``, as in torch; its state starts anew in each round.
        betas: decay of Adam's two averages.
        eps: what Adam adds to the root of its second average.
        accumulate: batches whose gradients are averaged for one step.
        clip_norm: largest norm of a step's gradient, which is scaled down to it; 0 does not clip.
        label_smoothing: share of each label that is spread evenly over all classes.
        reduction: ``mean`` or ``sum`` of the losses of a step's images.
        dropout: whether Dropout layers are ``on`` or ``off`` while the client trains.
    """

    algorithm: str = "fedavg"
    epochs: int = 1
    batch_size: int = 32
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    batch_norm: str = "average"
    optimiser: str = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    accumulate: int = 1
    clip_norm: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    dropout: str = "on"

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ["fedavg", "fedsgd"])
        in_range("epochs", self.epochs, 1)
        in_range("batch_size", self.batch_size, 0)
        in_range("momentum", self.momentum, 0, 1, open_high=True)
        in_range("weight_decay", self.weight_decay, 0)
        one_of("batch_norm", self.batch_norm, ["average", "local", "freeze"])
        self._check_steps()

    def _check_steps(self) -> None:
        """Raise ConfigError if the settings of a single step are wrong or contradict each other."""
        one_of("optimiser", self.optimiser, OPTIMISERS)
        if self.is_adam and (self.momentum or self.nesterov):
            raise ConfigError(
                f"momentum is a setting of sgd, got {self.momentum:g} with optimiser {self.optimiser!r}. "
                "Leave it out; the momentum of Adam is the first of betas."
            )
        if len(self.betas) != 2:
            raise ConfigError(f"betas must be two numbers, got {list(self.betas)}. Write betas = [0.9, 0.999].")
        for beta in self.betas:
            in_range("betas", beta, 0, 1, open_high=True)
        in_range("eps", self.eps, 0, open_low=True)
        in_range("accumulate", self.accumulate, 1)
        if self.algorithm == "fedsgd" and self.accumulate > 1:
            raise ConfigError(f"accumulate must be 1 for fedsgd, got {self.accumulate}. Use algorithm fedavg.")
        in_range("clip_norm", self.clip_norm, 0)
        in_range("label_smoothing", self.label_smoothing, 0, 1, open_high=True)
        one_of("reduction", self.reduction, ["mean", "sum"])
        one_of("dropout", self.dropout, ["on", "off"])

    @property
    def is_adam(self) -> bool:
        """Whether steps are those of Adam or AdamW."""
        return self.optimiser != "sgd"

    @property
    def is_plain(self) -> bool:
        """Whether a step is plain SGD on the mean cross-entropy: its length times the gradient, and no more."""
        changes = (self.momentum, self.weight_decay, self.clip_norm, self.label_smoothing, self.is_adam)
        return not any(changes) and self.reduction == "mean"

    def images_per_step(self, num_examples: int) -> list[int]:
        """Return the number of images of each step of one pass over the data.

        Example:
            >>> LocalSettings(batch_size=4, accumulate=2).images_per_step(10)
            [8, 2]
        """
        size = min(self.batch_size * self.accumulate, num_examples) or num_examples
        if self.algorithm == "fedsgd":
            return [size]
        return [min(size, num_examples - start) for start in range(0, num_examples, size)]

    def step_scales(self, num_examples: int) -> list[float]:
        """Return what each step's mean gradient is multiplied by: the number of its images for summed losses, else 1.

        Adam's steps do not depend on it.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4, reduction="sum").step_scales(6)
            [4.0, 2.0, 4.0, 2.0]
        """
        if self.reduction == "mean" or self.is_adam:
            return [1.0] * self.num_steps(num_examples)
        once = [float(count) for count in self.images_per_step(num_examples)]
        return once if self.algorithm == "fedsgd" else once * self.epochs

    def step_weights(self, num_examples: int) -> list[float]:
        """Return the weight of each step's mean gradient in the update, momentum and summed losses included.

        For Adam it is 1: each step has about the length of the learning rate, whatever the gradient.

        Example:
            >>> LocalSettings(epochs=3, batch_size=0, momentum=0.5).step_weights(4)
            [1.75, 1.5, 1.0]
        """
        steps = self.num_steps(num_examples)
        carried = [(1 - self.momentum**left) / (1 - self.momentum) for left in range(steps, 0, -1)]
        weights = [1 + self.momentum * weight for weight in carried] if self.nesterov else carried
        return [weight * scale for weight, scale in zip(weights, self.step_scales(num_examples), strict=True)]

    def num_steps(self, num_examples: int) -> int:
        """Return the number of local steps per round for a client with ``num_examples`` images.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4).num_steps(10)
            6
        """
        if self.algorithm == "fedsgd":
            return 1
        return self.epochs * -(-num_examples // (self.batch_size * self.accumulate or num_examples))

    def images_per_update(self, num_examples: int) -> int:
        """Return the number of different images behind one update of a client with ``num_examples`` images.

        Example:
            >>> LocalSettings("fedsgd", batch_size=4).images_per_update(10), LocalSettings().images_per_update(10)
            (4, 10)
        """
        if self.algorithm == "fedsgd":
            return min(self.batch_size or num_examples, num_examples)
        return num_examples

    def of_sum(self, clients: int) -> "LocalSettings":
        """Return how one client with all images of several clients would train, to come close to their mean update.

        Exact for a single step without BatchNorm. Several steps then take batches of all clients at once, while real
        clients drift apart.

        Example:
            >>> how = LocalSettings(epochs=2, batch_size=4)
            >>> how.num_steps(10), how.of_sum(3).num_steps(30)
            (6, 6)
        """
        return replace(self, batch_size=0 if self.algorithm == "fedsgd" else self.batch_size * clients)

    def releases(self, num_examples: int, rounds: int = 1, entries: int = 0) -> Releases:
        """Return what a client with ``num_examples`` images releases in ``rounds`` rounds, for privacy accounting.

        ``entries`` is the number of entries of the model; some defences' budgets depend on it.

        Example:
            >>> LocalSettings(epochs=2, batch_size=4).releases(10, rounds=3)
            Releases(num_examples=10, batch_size=4, steps=18, uses=6, rounds=3, entries=0)
        """
        batch = min(self.batch_size * self.accumulate or num_examples, num_examples)
        passes = self.epochs if self.algorithm == "fedavg" else 1
        return Releases(num_examples, batch, self.num_steps(num_examples) * rounds, passes * rounds, rounds, entries)


ONE_GRADIENT = LocalSettings(algorithm="fedsgd", batch_size=0, batch_norm="freeze")
"""One gradient of all of a client's images with BatchNorm frozen; Dropout stays on, as in any training."""


AGGREGATIONS = ("none", "secure")
"""What a server sees: each client's update, or only the weighted mean of a round's updates."""


@dataclass(frozen=True)
class Protocol:
    """How the clients of a federation make their updates, and what of them a server sees.

    Attributes:
        local: how a client trains in one round; by default it sends one gradient of all its images.
        lr: the clients' learning rate.
        first_round: number of the first round, from 1, for defences that change over time.
        rounds: number of rounds, from the first on. For `observe`, which broadcasts the same weights in each of them,
            while clients draw new random numbers and keep their state: many encodings of the same images.
        images: images per client; 0 means as many as it was dealt.
        aggregation: ``none``, if the server sees each client's update; ``secure``, if it sees only the weighted mean of
            a round's updates. Guards send theirs in the open, so they are not part of the mean.
        taps: rounds of a training in which the server's view is kept.
    """

    local: LocalSettings = ONE_GRADIENT
    lr: float = 1.0
    first_round: int = 1
    rounds: int = 1
    images: int = 0
    aggregation: str = "none"
    taps: tuple[int, ...] = ()

    @staticmethod
    def of(settings: TrainSettings) -> "Protocol":
        """Return the protocol of a training; FedSGD's single step has no momentum.

        The rate is that of the first round, see `gradveil.federated.server.learning_rate`.

        Example:
            >>> Protocol.of(TrainSettings(rounds=3, algorithm="fedsgd", momentum=0.9)).local.momentum
            0.0
        """
        averaging = settings.algorithm == "fedavg"
        local = LocalSettings(
            algorithm=settings.algorithm,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            momentum=settings.momentum if averaging else 0.0,
            nesterov=settings.nesterov and averaging,
            weight_decay=settings.weight_decay,
            batch_norm=settings.batch_norm,
        )
        return Protocol(
            local,
            settings.lr,
            rounds=max(settings.rounds, 1),
            aggregation=settings.aggregation,
            taps=settings.save_rounds,
        )

    def __post_init__(self) -> None:
        in_range("lr", self.lr, 0, open_low=True)
        in_range("first_round", self.first_round, 1)
        in_range("rounds", self.rounds, 1)
        in_range("images", self.images, 0)
        one_of("aggregation", self.aggregation, AGGREGATIONS)
        check_taps(self.taps, self.first_round + self.rounds - 1)


def check_taps(taps: Sequence[int], rounds: int) -> None:
    """Raise ConfigError if a tapped round does not exist or is named twice."""
    for tap in taps:
        if not 1 <= tap <= rounds:
            raise ConfigError(
                f"tap must name rounds of the training (1 to {rounds:,}), got {tap}. Lower --tap, or raise --rounds."
            )
    if len(set(taps)) < len(taps):
        raise ConfigError(f"tap must name each round once, got {'/'.join(map(str, taps))}. Drop the repeated rounds.")


def default_taps(rounds: int) -> tuple[int, ...]:
    """Return the first, the middle and the last round.

    Example:
        >>> default_taps(20), default_taps(2), default_taps(1)
        ((1, 10, 20), (1, 2), (1,))
    """
    return tuple(sorted({1, max(1, rounds // 2), rounds}))
