"""What a server knows, what it saw, and what it makes of it: the values on both sides of the door in `observe`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradveil.defences.base import Defence
from gradveil.errors import ThreatModelError
from gradveil.federated.protocol import LocalSettings
from gradveil.types import Batch, Tensors

V = TypeVar("V")


class Knowledge(StrEnum):
    """What a server may know beside the model it broadcast and the update it received."""

    LABELS = "labels"
    """The labels of the private images."""
    NUM_EXAMPLES = "num-examples"
    """How many images an update was computed from."""
    LOCAL_STEPS = "local-steps"
    """Epochs, batch size, learning rate, momentum and decay of local training; not the order of the images."""
    DEFENCE = "defence"
    """Which defence the client uses, with its settings: an adaptive attacker."""
    PUBLIC_DATA = "public-data"
    """Images of the same kind from elsewhere."""
    CLASS_AVERAGES = "class-averages"
    """The mean image of each class."""
    BATCH_STATISTICS = "batch-statistics"
    """Mean and variance of the private batch at the input of each BatchNorm."""
    PRIVATE_STATE = "private-state"
    """The client's private tensors (keys, lock layers), for experiments on sharing them."""
    KEY = "key"
    """Of the private tensors the keys alone, as they were before the round."""
    LOCK = "lock"
    """Of the private tensors all but the keys, as they were before the round, and their change in it."""
    ENCODINGS = "encodings"
    """The images as the network saw them, after the defence had changed them; what a perfect inversion finds."""
    ALTERS_MODEL = "alters-model"
    """The server alters the model that it broadcasts: a malicious server, not only a curious one."""


@dataclass(frozen=True)
class ThreatModel:
    """What the server of an experiment knows. Every row states it.

    Example:
        >>> ThreatModel.of("labels", "num-examples").names
        ['labels', 'num-examples']
    """

    knows: frozenset[Knowledge] = frozenset()

    @staticmethod
    def of(*names: str) -> "ThreatModel":
        """The threat model that grants what is named."""
        known = {knowledge.value: knowledge for knowledge in Knowledge}
        for name in names:
            if name not in known:
                raise ThreatModelError(f"Unknown knowledge {name!r}. Known: {', '.join(known)}.")
        return ThreatModel(frozenset(known[name] for name in names))

    @property
    def names(self) -> list[str]:
        """What is granted, for rows and reports."""
        return sorted(knowledge.value for knowledge in self.knows)


@dataclass(frozen=True)
class Observation:
    """All that an attack gets: T updates from one broadcast model, and the facts that were granted.

    They are of T clients, or of fewer in several rounds: those of one client stand together, in the order of rounds.

    A fact that was not granted is not in here: asking for it raises `ThreatModelError`.

    Attributes:
        network: the network as it was broadcast, in evaluation mode; it normalises its input itself.
        updates: what each client sent, stacked: (T, shape of the tensor), the change of each parameter.
        buffers: likewise the change of shared buffers.
        shape: (C, H, W) of an image.
        num_classes: of the task.
        single_step: whether each update is one step on one batch (FedSGD), so that it is a gradient but for a factor.
        threat: what was granted.
        public: what the server broadcast beside the model.
        rounds: how many of the updates, one after the other, are of the same client.
    """

    network: nn.Module
    updates: Tensors
    buffers: Tensors
    shape: tuple[int, int, int]
    num_classes: int
    single_step: bool
    threat: ThreatModel
    public: Tensors = field(default_factory=dict)
    rounds: int = 1
    _facts: dict[Knowledge, object] = field(default_factory=dict, repr=False)
    _step_size: float | None = field(default=None, repr=False)
    _changes: list[dict[str, Tensor]] = field(default_factory=list, repr=False)
    _num_images: int | None = field(default=None, repr=False)

    @property
    def num_targets(self) -> int:
        """T: how many updates are looked at."""
        return len(next(iter(self.updates.values())))

    @property
    def labels(self) -> Tensor:
        """(T, B): each client's labels, sorted, since their order says nothing; (T, B, classes) of trained mixtures."""
        return self._fact(Knowledge.LABELS, Tensor)

    @property
    def num_examples(self) -> int:
        """B: images behind each update."""
        return self._fact(Knowledge.NUM_EXAMPLES, int)

    @property
    def num_images(self) -> int:
        """How many images each client holds: those of an update, unless several rounds show different ones."""
        known = self.num_examples  # which must be granted
        return known if self._num_images is None else self._num_images

    @property
    def encodings(self) -> Batch:
        """The batches as the network saw them, one after the other: images (T * B, C, H, W)."""
        return self._fact(Knowledge.ENCODINGS, Batch)

    @property
    def local_steps(self) -> LocalSettings:
        """How the clients train."""
        return self._fact(Knowledge.LOCAL_STEPS, LocalSettings)

    @property
    def defence(self) -> Defence:
        """The clients' defence."""
        return self._fact(Knowledge.DEFENCE, Defence)

    @property
    def public_data(self) -> Batch:
        """Images from elsewhere."""
        return self._fact(Knowledge.PUBLIC_DATA, Batch)

    @property
    def class_averages(self) -> Tensor:
        """(classes, C, H, W)."""
        return self._fact(Knowledge.CLASS_AVERAGES, Tensor)

    @property
    def batch_statistics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and variance (T, channels) of the private batch by the name of the BatchNorm layer."""
        return self._fact(Knowledge.BATCH_STATISTICS, dict)

    @property
    def private_state(self) -> list[dict[str, Tensor]]:
        """Each client's private tensors as they were before the round: all, or the keys or locks that were granted."""
        parts = [knowledge for knowledge in (Knowledge.KEY, Knowledge.LOCK) if self.knows(knowledge)]
        if self.knows(Knowledge.PRIVATE_STATE) or not parts:
            return self._fact(Knowledge.PRIVATE_STATE, list)
        clients = zip(*(self._fact(knowledge, list) for knowledge in parts), strict=True)
        return [{name: tensor for part in each for name, tensor in part.items()} for each in clients]

    @property
    def private_changes(self) -> list[dict[str, Tensor]]:
        """The change of each client's locks in the round, granted with them."""
        self._fact(Knowledge.LOCK, list)
        return self._changes

    @property
    def gradients(self) -> dict[str, Tensor]:
        """(T, ...) each client's gradient, from a single step: minus the change over the learning rate.

        FedSGD's rate is the server's own. For FedAvg use ``updates``.
        """
        if not self.single_step or self._step_size is None:
            raise ThreatModelError("Gradients need updates of a single step, got several local steps. Match updates.")
        return {name: tensor / -self._step_size for name, tensor in self.updates.items()}

    @property
    def mean_gradients(self) -> dict[str, Tensor]:
        """(T, ...) minus each client's change over the learning rate and what its steps count for.

        A single step's is its gradient. Several steps need to be known, and how many images there were.
        """
        length = sum(self.step_lengths)
        return {name: tensor / -length for name, tensor in self.updates.items()}

    @property
    def step_lengths(self) -> list[float]:
        """The learning rate times what each local step counts for; a single step's is the rate alone.

        Several steps need to be known, and how many images there were.
        """
        weights = [1.0] if self.single_step else self.local_steps.step_weights(self.num_examples)
        return [self.lr * weight for weight in weights]

    @property
    def lr(self) -> float:
        """The clients' learning rate: the server's own for FedSGD, else part of the local steps."""
        if not self.single_step:
            self._fact(Knowledge.LOCAL_STEPS, LocalSettings)
        if self._step_size is None:
            raise ThreatModelError("The learning rate is not known for these updates.")
        return self._step_size

    def knows(self, knowledge: Knowledge) -> bool:
        """Whether a fact was granted."""
        return knowledge in self.threat.knows

    def only(self, targets: Sequence[int]) -> "Observation":
        """The same of some targets, each by itself."""
        rows = torch.tensor(targets, device=next(iter(self.updates.values())).device)
        parts = {
            knowledge: _part(fact, rows, self.num_targets) if knowledge in _BY_TARGET else fact
            for knowledge, fact in self._facts.items()
        }
        return replace(
            self,
            updates={name: tensor[rows] for name, tensor in self.updates.items()},
            buffers={name: tensor[rows] for name, tensor in self.buffers.items()},
            rounds=1,
            _facts=parts,
            _changes=[self._changes[row] for row in targets] if self._changes else [],
        )

    def _fact(self, knowledge: Knowledge, kind: type[V]) -> V:
        if knowledge not in self.threat.knows:
            granted = ", ".join(self.threat.names) or "nothing"
            raise ThreatModelError(
                f"The attack asks for {knowledge.value}, which this threat model does not grant (it grants {granted}). "
                "Grant it with --knows, or drop the attack."
            )
        value = self._facts.get(knowledge)
        if not isinstance(value, kind):
            raise ThreatModelError(f"{knowledge.value} is granted, but there is none here to know.")
        return value


_BY_TARGET = {
    Knowledge.LABELS, Knowledge.ENCODINGS, Knowledge.BATCH_STATISTICS, Knowledge.PRIVATE_STATE, Knowledge.KEY,
    Knowledge.LOCK,
}  # fmt: skip
"""Facts of each target, beside those of all."""


def _part(fact: object, rows: Tensor, targets: int) -> object:
    """What a fact says of some targets."""
    if isinstance(fact, Tensor):
        return fact[rows.to(fact.device)]
    if isinstance(fact, list):
        return [fact[row] for row in rows.tolist()]
    if isinstance(fact, Batch):
        return fact[torch.arange(len(fact)).view(targets, -1)[rows.cpu()].flatten().to(fact.images.device)]
    if isinstance(fact, dict):
        return {name: tuple(tensor[rows] for tensor in pair) for name, pair in fact.items()}
    return fact


@dataclass(frozen=True)
class Reconstruction:
    """What an attack makes of an observation.

    Attributes:
        images: (T, B, C, H, W) in [0, 1]; NaN where there is no guess.
        labels: (T, B) guessed or known labels, -1 where there is none.
        loss: (T,) the attacker's own loss, by which it chose among its restarts and iterates.
        converged: (T,) bool: whether the attack met its own criterion.
        why: (T) what to say of a target where something was odd, else "".
        iterates: (K, T, B, C, H, W) pictures on the way, for the report; may be empty.
        steps: (K) after how many steps of the search each of them was taken.
        answers: (T) what was done about a known defence, by the names of countermoves and decoders, else "".
    """

    images: Tensor
    labels: Tensor
    loss: Tensor
    converged: Tensor
    why: tuple[str, ...] = ()
    iterates: Tensor = field(default_factory=lambda: torch.empty(0))
    steps: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
