"""What an attack is: from what a server saw to images, or from a model to who was in its training. One method each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.adaptive import countermove, countermoves
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

    def measured_rounds(self, rounds: int) -> list[int]:
        """Return the rounds whose local models are attacked: every n-th, or the last if there are fewer.

        For ``every=5``, a training of 12 rounds is attacked in rounds 5 and 10, one of 3 rounds in round 3.
        """
        return list(range(self.every, rounds + 1, self.every)) or [rounds] * bool(rounds)

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

    def decoders(self, seen: Observation) -> "Sequence[Decoder]":
        """What is made of the guesses then: the stages that a known defence's countermove names.

        Without a choice it is the first countermove that has stages, and whose stages have all they need to know.
        """
        staged = self._stages(seen)
        fitting = [stages for stages in staged if not any(stage.lacks(seen) for stage in stages)]
        return next(iter(fitting or staged), [])

    def _stages(self, seen: Observation) -> "list[list[Decoder]]":
        """The stages of every countermove that has some, the one to fear most first."""
        known = {Knowledge.DEFENCE, Knowledge.NUM_EXAMPLES} | (set() if seen.single_step else {Knowledge.LOCAL_STEPS})
        choice = getattr(self, "adapt", "")
        if not known <= seen.threat.knows or choice == "none":
            return []
        chosen = countermove(seen, choice) if choice else None
        moves = [chosen] if chosen else list(countermoves(seen).values())
        options = [[build(Decoder, spec) for spec in move.decode] for move in moves]
        return [stages for stages in options if stages]

    @final
    def __call__(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Refuse an unfit threat model, rebuild what the network saw, and undo what a known defence made of images.

        Of several rounds of a client that no decoder put together, the guess with the least loss is kept.
        """
        missing = self._missing(seen)
        if missing:
            granted = ", ".join(seen.threat.names) or "nothing"
            raise ThreatModelError(
                f"Attack {self.name!r} needs {', '.join(missing)}, which this threat model does not grant "
                f"(it grants {granted}). Grant it with --knows, or drop the attack."
            )
        result = self._guarded(seen, rng)
        decoders = self.decoders(seen)
        for decoder in decoders:
            lacking = decoder.lacks(seen)
            if lacking:
                result = _noted(result, f"not decoded: {decoder.name} needs {', '.join(lacking)}")
            else:
                before = result.answers or ("",)
                result = decoder.decode(result, seen, rng)
                played = ", then ".join(filter(None, [before[0], decoder.spec]))
                result = replace(result, answers=(played,) * len(result.images))
        for decoder in next(iter(self._stages(seen)), []):
            if decoder.lacks(seen) and decoder not in decoders:
                result = _noted(result, f"not tried: {decoder.spec} needs {', '.join(decoder.lacks(seen))}")
        several = seen.rounds > 1 and len(result.images) == seen.num_targets
        return _least(result, seen.rounds) if several else result

    def _missing(self, seen: Observation) -> list[str]:
        return sorted(knowledge.value for knowledge in self.needs - seen.threat.knows)

    def _guarded(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Run, and take back guesses for updates that say nothing.

        A target whose update is zero, or holds NaN or infinity, gets NaN images and the reason in ``why``.
        """
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


def _noted(result: Reconstruction, note: str) -> Reconstruction:
    return replace(result, why=tuple("; ".join(filter(None, [why, note])) for why in result.why))


@dataclass(frozen=True)
class Decoder(Attack):
    """Base of the attacks on what a defence made of the images: a subclass has `decode`.

    First another attack guesses what the network saw; `decode` makes private images of that. With knowledge of a
    defence whose countermove names it, a decoder follows every attack by itself; as an attack of its own it takes the
    one before it from ``inner``.

    Attributes:
        inner: the attack whose guesses are decoded, its settings split by ``;``: ``gs:iterations=500;tv=1e-3``.
    """

    inner: str = "encodings"

    def __post_init__(self) -> None:
        first = self._first
        if isinstance(first, Decoder):
            raise ConfigError(f"inner must be an attack that guesses what the network saw, got {self.inner!r}.")
        object.__setattr__(self, "needs", type(self).needs | first.needs)

    def lacks(self, seen: Observation) -> list[str]:
        """What `decode` itself needs and is not granted; what ``inner`` needs is another stage's."""
        others = {knowledge.value for knowledge in self._first.needs - type(self).needs}
        return [name for name in self._missing(seen) if name not in others] or self.unfit(seen)

    @abstractmethod
    def unfit(self, seen: Observation) -> list[str]:
        """What else it needs to have anything to decode: a defence of its kind, several rounds, ..."""

    @property
    def _first(self) -> Attack:
        return build_attack(self.inner.replace(";", ","))

    def alter(self, network: nn.Module, seen: Scene, rng: torch.Generator) -> nn.Module:
        """As the attack before it does."""
        return self._first.alter(network, seen, rng)

    def prepared_on(self, shape: tuple[int, int, int], num_classes: int) -> frozenset[int]:
        """What the attack before it was prepared on."""
        return self._first.prepared_on(shape, num_classes)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """The guesses of what the network saw."""
        return self._first.run(seen, rng)

    def decoders(self, seen: Observation) -> "Sequence[Decoder]":
        """This one."""
        return [self]

    @abstractmethod
    def decode(self, found: Reconstruction, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Private images from guesses (T, B, C, H, W) of what the network saw.

        Returns as many targets, or one for each client where it puts the rounds of a client together. Images that are
        NaN tell nothing.
        """


def _least(result: Reconstruction, rounds: int) -> Reconstruction:
    """Of each client's rounds the one whose loss is least."""
    loss = result.loss.nan_to_num(torch.inf).view(-1, rounds)
    best = loss.argmin(1) + torch.arange(len(loss), device=loss.device) * rounds
    why = tuple(result.why[row] for row in best.tolist()) if result.why else ()
    iterates = result.iterates[:, best] if result.iterates.numel() else result.iterates
    answers = tuple(result.answers[row] for row in best.tolist()) if result.answers else ()
    return Reconstruction(
        result.images[best],
        result.labels[best],
        result.loss[best],
        result.converged[best],
        why,
        iterates,
        result.steps,
        answers,
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
