"""What an attack is: from what a server saw to images, or from a model to who was in its training. One method each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from gradveil.errors import ConfigError, ThreatModelError
from gradveil.registry import Component, build
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.types import Batch
from gradveil.validate import in_range


@dataclass(frozen=True)
class AnyAttack(Component, ABC):
    """Base of all attacks, whatever they are after.

    Attributes:
        needs: knowledge without which the attack does not run at all.
    """

    kind: ClassVar[str] = "attacks"
    needs: ClassVar[frozenset[Knowledge]] = frozenset()


class Scene(NamedTuple):
    """What a server knows of the task before anyone trains.

    Attributes:
        shape: (C, H, W) of an image.
        num_classes: of the task.
        public_data: images of the same kind from elsewhere, where they are granted.
    """

    shape: tuple[int, int, int]
    num_classes: int
    public_data: Batch | None = None


@dataclass(frozen=True)
class MembershipAttack(AnyAttack):
    """Base of the attacks that tell a client's training images from others: a subclass has `scores`.

    Attributes:
        every: rounds between two local models that are attacked.
        images: members that are tried on each of them at most, and as many others.
    """

    every: int = 5
    images: int = 500

    def __post_init__(self) -> None:
        in_range("every", self.every, 1)
        in_range("images", self.images, 1)

    @abstractmethod
    def scores(self, network: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        """(N,) how much each image looks like one that the network was trained on; higher is more like it.

        Args:
            network: a client's model as the server knows it, in evaluation mode.
            batch: images with their labels, those of the client and others, in any order and without a mark.
            rng: for all random draws.
        """


@dataclass(frozen=True)
class Attack(AnyAttack):
    """Base of the attacks that rebuild images: a subclass has `run`; calling the object guards it. Never meets them.

    The attack of a malicious server also has `alter`, and `Knowledge.ALTERS_MODEL` among its ``needs``.
    """

    def alter(self, network: nn.Module, seen: Scene, rng: torch.Generator) -> nn.Module:
        """The network that a malicious server broadcasts in place of the honest one, which it may change."""
        return network

    def prepared_on(self, shape: tuple[int, int, int], num_classes: int) -> frozenset[int]:
        """Keys (`gradveil.data.auxiliary.image_keys`) of the images that the attack was prepared on before.

        None of them may be a target, or it would be remembered rather than found. ``shape`` and ``num_classes`` are of
        the task.
        """
        return frozenset()

    @abstractmethod
    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Rebuild the images of all targets. Chooses among its own guesses by its own loss."""

    @final
    def __call__(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Refuse an unfit threat model, run, and take back guesses for updates that say nothing.

        A target whose update is zero, or holds NaN or infinity, gets NaN images and the reason in ``why``.
        """
        missing = sorted(knowledge.value for knowledge in self.needs - seen.threat.knows)
        if missing:
            granted = ", ".join(seen.threat.names) or "nothing"
            raise ThreatModelError(
                f"Attack {self.name!r} needs {', '.join(missing)}, which this threat model does not grant "
                f"(it grants {granted}). Grant it under [threat] knows, or drop the attack."
            )
        reasons = diagnose(seen)
        device = next(iter(seen.updates.values())).device
        usable = torch.tensor([not reason for reason in reasons], device=device)
        cleaned = {name: torch.where(_rows(usable, t), t, torch.zeros_like(t)) for name, t in seen.updates.items()}
        result = self.run(replace(seen, updates=cleaned), rng)
        why = tuple(a or b for a, b in zip(reasons, result.why or ("",) * len(reasons), strict=True))
        return replace(
            result,
            images=torch.where(_rows(usable, result.images), result.images, torch.nan).detach(),
            loss=torch.where(usable, result.loss, torch.nan).detach(),
            labels=torch.where(_rows(usable, result.labels), result.labels, -1),
            converged=result.converged & usable,
            iterates=torch.where(_rows(usable, result.images), result.iterates, torch.nan).detach()
            if result.iterates.numel()
            else result.iterates,
            why=why,
        )


def build_any_attack(spec: str) -> AnyAttack:
    """Build an attack of either kind from its text."""
    return build(AnyAttack, spec)


def build_attack(spec: str) -> Attack:
    """Build an attack that rebuilds images from its text.

    Example:
        >>> build_attack("gs:iterations=500").spec
        'gs:iterations=500'
    """
    attack = build_any_attack(spec)
    if not isinstance(attack, Attack):
        raise ConfigError(
            f"The attack must be one that rebuilds images here, got {attack.name!r}, which tells members from others. "
            f"Choose another, or run gradveil audit --attacks {attack.name}."
        )
    return attack


def diagnose(seen: Observation) -> list[str]:
    """For each target what makes its update useless, or ""."""
    flat = [tensor.reshape(len(tensor), -1) for tensor in seen.updates.values()]
    finite = torch.stack([tensor.isfinite().all(1) for tensor in flat]).all(0)
    nonzero = torch.stack([tensor.ne(0).any(1) for tensor in flat]).any(0)
    return [
        "update holds NaN or infinity: nothing to match"
        if not is_finite
        else "gradient is zero: nothing to match"
        if not is_nonzero
        else ""
        for is_finite, is_nonzero in zip(finite.tolist(), nonzero.tolist(), strict=True)
    ]


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))
