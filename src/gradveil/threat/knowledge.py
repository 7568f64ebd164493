"""What a server may know beside the model it broadcast and the updates it received."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from numpy.typing import ArrayLike
from torch import Tensor

from gradveil.defences.base import Defence
from gradveil.errors import ThreatModelError, with_choices
from gradveil.federated.protocol import LocalSettings
from gradveil.types import Batch


class Knowledge(StrEnum):
    """A fact that a threat model can grant."""

    LABELS = "labels"
    """The labels of the private images."""
    NUM_EXAMPLES = "num-examples"
    """The number of images behind an update."""
    LOCAL_STEPS = "local-steps"
    """Epochs, batch size, learning rate, momentum and decay of local training; not the order of the images."""
    DEFENCE = "defence"
    """The client's defence with its settings: an adaptive attacker."""
    PUBLIC_DATA = "public-data"
    """Public images of the same kind."""
    CLASS_AVERAGES = "class-averages"
    """The mean image of each class."""
    BATCH_STATISTICS = "batch-statistics"
    """Mean and variance of the private batch at the input of each BatchNorm."""
    PRIVATE_STATE = "private-state"
    """The client's private tensors (keys, lock layers), for experiments on sharing them."""
    KEY = "key"
    """Only the keys among the private tensors, before the round."""
    LOCK = "lock"
    """All private tensors except the keys, before the round, and their change in it."""
    ENCODINGS = "encodings"
    """The images as the network saw them, after the defence changed them: what a perfect inversion finds."""
    MIXING = "mixing"
    """The share of each of a client's images in each mixture that its network saw, as GradAttack's decoder has them."""
    ALTERS_MODEL = "alters-model"
    """The server changes the model that it broadcasts: a malicious server, not only a curious one."""


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
        """Return the threat model that grants the named facts."""
        known = {knowledge.value: knowledge for knowledge in Knowledge}
        for name in names:
            if name not in known:
                raise ThreatModelError(with_choices(f"Unknown knowledge {name!r}.", name, known))
        return ThreatModel(frozenset(known[name] for name in names))

    @property
    def names(self) -> list[str]:
        """Return the names of the granted facts, sorted, for rows and reports."""
        return sorted(knowledge.value for knowledge in self.knows)


@dataclass(frozen=True)
class PublicKnowledge:
    """What an attacker may have without any client's help.

    Attributes:
        public_data: public images of the same kind.
        class_averages: the mean image of each class, (classes, C, H, W).
    """

    public_data: Batch | None = None
    class_averages: Tensor | None = None


@dataclass(frozen=True)
class Known(PublicKnowledge):
    """What an attacker knows about updates from elsewhere. Each fact that is not None counts as granted.

    Attributes:
        labels: the labels of the images, (B,) or (T, B).
        local_steps: how the clients trained.
        defence: the clients' defence.
        batch_statistics: mean and variance (T, channels) of the private batch at each BatchNorm layer, by its name.
    """

    labels: Tensor | ArrayLike | None = None
    local_steps: LocalSettings | None = None
    defence: Defence | None = None
    batch_statistics: Mapping[str, tuple[Tensor, Tensor]] | None = None
