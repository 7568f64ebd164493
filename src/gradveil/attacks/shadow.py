"""Attacks on membership that compare a client's model with shadow models, which were trained without the candidates."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.base import MembershipAttack
from gradveil.defences.base import HOOKS, Defence
from gradveil.errors import ConfigError
from gradveil.threat import Knowledge
from gradveil.types import Batch
from gradveil.validate import in_range, one_of

PLAYS = ("round", "training")
"""What a shadow model is: one client's round from the broadcast model, or a whole training."""
CHUNK = 500
"""Images per forward pass."""


@dataclass(frozen=True)
class ShadowAttack(MembershipAttack):
    """Base of attacks that compare a client's model with shadow models. A subclass has a signal and a comparison.

    The server plays clients that have its own public images, under the same protocol, and under the defence if it knows
    it. None of these shadow models has seen a candidate, so they show how a model treats the candidate if it is no
    member: what is hard for all of them is no evidence.

    Attributes:
        every: attack the local models of every n-th round.
        images: at most this many members are tested per model, and as many non-members.
        shadows: shadow models per attacked model.
        play: what a shadow model is: round (a client's round from the same broadcast model) or training (the whole
            federated training up to that round, from the same initial weights).
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS, Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA})
    replays: ClassVar[bool] = True
    weighs_knowledge: ClassVar[bool] = True

    shadows: int = 8
    play: str = "round"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("shadows", self.shadows, 1, 10_000)
        one_of("play", self.play, PLAYS)

    def adapts_to(self, defence: Defence) -> bool:
        """Return True for every defence that does anything: shadow models are played under it."""
        return any(defence.overrides(hook) for hook in HOOKS)

    def scores(self, network: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        """Return the signal of the model alone (N,): what is left of the attack without shadow models."""
        return self.signal(logits_of(network, batch), batch.labels)

    def judge(self, network: nn.Module, batch: Batch, rng: torch.Generator, shadows: Iterable[nn.Module]) -> Tensor:
        """Return the scores (N,) of the candidates, compared with what shadow models say about them."""
        others = [self.signal(logits_of(shadow, batch), batch.labels) for shadow in shadows]
        if not others:
            raise ConfigError(f"Attack {self.name!r} needs at least one shadow model, got none.")
        return self.compare(self.scores(network, batch, rng), torch.stack(others))

    @abstractmethod
    def signal(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how well a model (N, classes) knows each image's label (N,); higher is better."""

    @abstractmethod
    def compare(self, own: Tensor, others: Tensor) -> Tensor:
        """Return the scores (N,) from the signals of the attacked model (N,) and of the shadow models (K, N)."""


def logits_of(network: nn.Module, batch: Batch) -> Tensor:
    """Return the logits (N, classes) of a network in double precision."""
    with torch.no_grad():
        return torch.cat([network(piece) for piece in torch.split(batch.images, CHUNK)]).double()


def log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logarithm of each label's probability (N,).

    Example:
        >>> log_probability(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
        tensor([0.5000])
    """
    return logits.log_softmax(1).gather(1, labels[:, None])[:, 0]


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Return the log odds of each label (N,): :math:`\log p_y - \log(1 - p_y)`, also where :math:`p_y` rounds to 1.

    Example:
        >>> log_odds(torch.tensor([[90.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor([90.,  0.])
    """
    own = labels[:, None]
    rest = logits.scatter(1, own, -torch.inf).logsumexp(1)
    return logits.gather(1, own)[:, 0] - rest
