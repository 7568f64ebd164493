"""What an attack gets, `Observation`, and what it returns, `Reconstruction`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gradveil.defences.base import Defence
from gradveil.errors import ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.threat.knowledge import Knowledge, ThreatModel
from gradveil.threat.shown import guesses_html
from gradveil.types import Batch, Tensors

V = TypeVar("V")


class Lock(NamedTuple):
    """One client's private tensors without its keys: their values before a round, and their change in it."""

    before: dict[str, Tensor]
    change: dict[str, Tensor]


@dataclass(frozen=True)
class Script:
    """What a server knows of a round that it organised, so that it can play it again with its own images.

    Nothing in it is private; see `gradveil.threat.rehearsal.rehearse`.

    Attributes:
        network: the network with the broadcast weights, before the defence changed it.
        protocol: how the clients train, and what of their updates the server sees.
        num_clients: clients of the federation.
        aux: public images that every device has, or None.
    """

    network: nn.Module
    protocol: Protocol
    num_clients: int = 0
    aux: Batch | None = None


@dataclass(frozen=True)
class Observation:
    """All that an attack gets: T updates from one broadcast model, and the facts that the threat model grants.

    The updates are from T clients, or from T / ``rounds`` clients in several rounds; then the updates of one client
    stand together, in the order of rounds. A fact that was not granted is not stored here: reading it raises
    `ThreatModelError`.

    Attributes:
        network: the network as broadcast, in evaluation mode; it normalises its input itself.
        updates: the change of each parameter in every client's update, (T, shape of the parameter).
        buffers: the change of each shared buffer, (T, shape of the buffer).
        shape: (C, H, W) of an image.
        num_classes: of the task.
        single_step: whether each update is one step on one batch (FedSGD), so a gradient times a factor.
        threat: what was granted.
        public: tensors that the server broadcast beside the model.
        rounds: number of updates per client.
        later: what the same clients sent of the same images in later rounds, each with the network as broadcast then.
        from_the_first: whether this and ``later`` are all rounds of the training from the first on, without a gap.
        clients: number of clients behind each update: several if it is the mean of a round.
        script: what it takes to play the round again with public images, or None if that is not known.
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
    later: tuple["Observation", ...] = ()
    from_the_first: bool = False
    clients: int = 1
    script: Script | None = field(default=None, repr=False)
    _facts: dict[Knowledge, object] = field(default_factory=dict, repr=False)
    _step_size: float | None = field(default=None, repr=False)
    _batch_norm: str | None = field(default=None, repr=False)
    _num_images: int | None = field(default=None, repr=False)
    _dropout: str = field(default="on", repr=False)

    @property
    def num_targets(self) -> int:
        """Return T, the number of updates."""
        return len(next(iter(self.updates.values())))

    @property
    def labels(self) -> Tensor:
        """Return (T, B) labels per update, sorted, as their order is unknown; (T, B, classes) if images were mixed."""
        return self._fact(Knowledge.LABELS, Tensor)

    @property
    def num_examples(self) -> int:
        """Return B, the number of images behind each update."""
        return self._fact(Knowledge.NUM_EXAMPLES, int)

    @property
    def num_images(self) -> int:
        """Return the number of images per client: B, unless its rounds show different images."""
        known = self.num_examples  # must be granted
        return known if self._num_images is None else self._num_images

    @property
    def encodings(self) -> Batch:
        """Return the batches as the network saw them, joined: images (T * B, C, H, W)."""
        return self._fact(Knowledge.ENCODINGS, Batch)

    @property
    def mixing(self) -> Tensor:
        """Return the share of each of a client's N images in each mixture, (T, B, N)."""
        return self._fact(Knowledge.MIXING, Tensor)

    @property
    def local_steps(self) -> LocalSettings:
        """Return how the clients train."""
        return self._fact(Knowledge.LOCAL_STEPS, LocalSettings)

    @property
    def defence(self) -> Defence:
        """Return the clients' defence."""
        return self._fact(Knowledge.DEFENCE, Defence)

    @property
    def public_data(self) -> Batch:
        """Return public images of the same kind."""
        return self._fact(Knowledge.PUBLIC_DATA, Batch)

    @property
    def class_averages(self) -> Tensor:
        """Return the mean image of each class, (classes, C, H, W)."""
        return self._fact(Knowledge.CLASS_AVERAGES, Tensor)

    @property
    def batch_statistics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and variance (T, channels) of the private batch at each BatchNorm layer, by its name."""
        return self._fact(Knowledge.BATCH_STATISTICS, dict)

    @property
    def private_state(self) -> list[dict[str, Tensor]]:
        """Return each client's private tensors before the round: all of them, or only granted keys or locks."""
        parts: list[list[dict[str, Tensor]]] = []
        if self.knows(Knowledge.KEY):
            parts.append(self._fact(Knowledge.KEY, list))
        if self.knows(Knowledge.LOCK):
            parts.append([lock.before for lock in self._fact(Knowledge.LOCK, list)])
        if self.knows(Knowledge.PRIVATE_STATE) or not parts:
            return self._fact(Knowledge.PRIVATE_STATE, list)
        return [{name: tensor for part in each for name, tensor in part.items()} for each in zip(*parts, strict=True)]

    @property
    def private_changes(self) -> list[dict[str, Tensor]]:
        """Return the change of each client's locks in the round, which is granted with them."""
        return [lock.change for lock in self._fact(Knowledge.LOCK, list)]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients behind single-step updates, (T, ...) by name: minus the change over the learning rate.

        The server chose FedSGD's learning rate, so it knows it. For several local steps use ``updates``.
        """
        if not self.single_step or self._step_size is None:
            raise ThreatModelError("Gradients need updates of a single step, got several local steps. Use `updates`.")
        length = self.step_lengths[0]
        return {name: tensor / -length for name, tensor in self.updates.items()}

    @property
    def mean_gradients(self) -> dict[str, Tensor]:
        """Return minus each client's change over the sum of its `step_lengths`, (T, ...) by name.

        For a single step this is the gradient. Several steps require local-steps and num-examples.
        """
        length = sum(self.step_lengths)
        return {name: tensor / -length for name, tensor in self.updates.items()}

    @property
    def step_lengths(self) -> list[float]:
        """Return the learning rate times each local step's weight in the update; for a single step, mostly the rate.

        Several steps require local-steps and num-examples.
        """
        summed = self.knows(Knowledge.LOCAL_STEPS) and self.local_steps.reduction == "sum"
        weights = [1.0] if self.single_step and not summed else self.local_steps.step_weights(self.num_examples)
        return [self.lr * weight for weight in weights]

    @property
    def lr(self) -> float:
        """Return the clients' learning rate: the server knows FedSGD's, else it is part of local-steps."""
        if not self.single_step:
            self._fact(Knowledge.LOCAL_STEPS, LocalSettings)
        if self._step_size is None:
            raise ThreatModelError("The learning rate is not known for these updates.")
        return self._step_size

    @property
    def batch_norm(self) -> str:
        """Return how the clients used BatchNorm: average, local or freeze, as in `LocalSettings`.

        The server dictates it with FedSGD's learning rate, so it knows it; for several steps it is part of local-steps.
        If updates from elsewhere do not state it, running statistics that changed in all of them reveal it.
        """
        if self.knows(Knowledge.LOCAL_STEPS) or not self.single_step:
            return self.local_steps.batch_norm
        if self._batch_norm is not None:
            return self._batch_norm
        changed = [change.flatten(1).any(1) for change in self.buffers.values()]
        return "average" if changed and bool(torch.stack(changed).any(0).all()) else "freeze"

    @property
    def dropout(self) -> str:
        """Return whether Dropout was on or off while the clients trained.

        The server dictates it. Updates from elsewhere that do not state how clients trained count as made without it.
        """
        return self.local_steps.dropout if self.knows(Knowledge.LOCAL_STEPS) else self._dropout

    def knows(self, knowledge: Knowledge) -> bool:
        """Return whether a fact was granted."""
        return knowledge in self.threat.knows

    def without(self, *facts: Knowledge) -> "Observation":
        """Return the observation of an attacker who was not granted some facts."""
        return replace(
            self,
            threat=ThreatModel(self.threat.knows - set(facts)),
            later=tuple(one.without(*facts) for one in self.later),
            _facts={knowledge: fact for knowledge, fact in self._facts.items() if knowledge not in facts},
        )

    def with_public(self, images: Batch) -> "Observation":
        """Return the observation of an attacker who has other public images; they must have been granted."""
        _ = self.public_data
        return replace(self, _facts={**self._facts, Knowledge.PUBLIC_DATA: images})

    def only(self, targets: Sequence[int]) -> "Observation":
        """Return the observation of some of the T updates, each as an update of its own client."""
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
            later=tuple(one.only(targets) for one in self.later),
            _facts=parts,
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
            raise ThreatModelError(f"The threat model grants {knowledge.value}, but none was passed to observe().")
        return value


_BY_TARGET = {
    Knowledge.LABELS, Knowledge.ENCODINGS, Knowledge.MIXING, Knowledge.BATCH_STATISTICS, Knowledge.PRIVATE_STATE,
    Knowledge.KEY, Knowledge.LOCK,
}  # fmt: skip
"""Facts with one entry per update; the others are common to all updates."""


def _part(fact: object, rows: Tensor, targets: int) -> object:
    """Return the entries of a fact that belong to some of the updates."""
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
    """The guesses of an attack.

    Attributes:
        images: (T, B, C, H, W) in [0, 1]; NaN if there is no guess.
        labels: (T, B) guessed or known labels; -1 if there is none.
        loss: (T,) the attacker's own loss, by which it chose among its restarts and iterates.
        converged: (T,) bool: whether the attack met its own criterion.
        why: (T) a remark on each target, or "".
        iterates: (K, T, B, C, H, W) intermediate guesses, for the report; may be empty.
        steps: (K) the step of the search at which each intermediate guess was taken.
        answers: (T) the countermoves and decoders used against a known defence, by name, or "".
        not_decoded: (T) the decoder that did not run and what it lacked, or "".
        flags: (T) reasons of the attack itself not to trust a target's figures, or ().
    """

    images: Tensor
    labels: Tensor
    loss: Tensor
    converged: Tensor
    why: tuple[str, ...] = ()
    iterates: Tensor = field(default_factory=lambda: torch.empty(0))
    steps: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    not_decoded: tuple[str, ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()

    def _repr_html_(self) -> str:
        """Return the guesses as a notebook shows them."""
        return guesses_html(self.images, self.loss, self.converged)
