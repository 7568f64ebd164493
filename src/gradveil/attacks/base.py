"""Attacks: rebuild images from what a server saw (`Attack`), or find training members (`MembershipAttack`)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.stages import Stage, Stages, decoded, runnable, stage_options, with_untried
from gradveil.defences.base import Defence
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.registry import Component, build
from gradveil.threat import Knowledge, Observation, Reconstruction, ThreatModel
from gradveil.types import Batch
from gradveil.validate import in_range


@dataclass(frozen=True)
class AnyAttack(Component, ABC):
    """Base of all attacks.

    Attributes:
        needs: knowledge without which the attack cannot run.
        ignores: knowledge that the attack does not use even if it is granted, because it is what the attack looks for.
        replays: whether the attack simulates the client's local training, so that it also needs to know the settings
            of several local steps.
        seeks: what the attack looks for: pictures (most find labels too), labels alone, or membership.
        most_images: images per update that the attack can search at most; 0 for any number.
        fewest_public: public images that the attack needs at least.
        wants: knowledge that makes the attack much stronger, which audits grant unless told what to grant.
        weighs_knowledge: whether the attack, knowing the defence, itself decides how to use that. If not, an audit
            also plays the plain attack, and keeps the better guess.
    """

    kind: ClassVar[str] = "attacks"
    needs: ClassVar[frozenset[Knowledge]] = frozenset()
    ignores: ClassVar[frozenset[Knowledge]] = frozenset()
    replays: ClassVar[bool] = False
    seeks: ClassVar[str] = "pictures"
    most_images: ClassVar[int] = 0
    fewest_public: ClassVar[int] = 0
    weighs_knowledge: ClassVar[bool] = False
    wants: ClassVar[frozenset[Knowledge]] = frozenset()

    def too_large(self, images: int, local_steps: int) -> str:
        """Return why the attack can't search updates with this number of images and local steps, or "" if it can."""
        if self.most_images and images > self.most_images:
            return f"can search at most {self.most_images:,} images per update, got {images:,}"
        return ""

    def out_of_reach(self, network: nn.Module, shape: tuple[int, int, int], images: int, local_steps: int) -> str:
        """Return why the attack can't work on such updates of this network, known before any work, or "" if it can."""
        return self.too_large(images, local_steps)

    def needs_for(self, *, single_step: bool) -> frozenset[Knowledge]:
        """Return the knowledge that the attack needs for updates of a single local step, or of several."""
        several = self.replays and not single_step
        return self.needs | {Knowledge.LOCAL_STEPS} if several else self.needs

    @property
    def adapts(self) -> bool:
        """Whether the attack can use a known defence; if so, an adaptive audit also runs it with that knowledge.

        By default, an attack adapts if it has a setting named ``adapt``. Any attack may state ``adapts = True``.
        """
        return hasattr(self, "adapt")

    def adapts_to(self, defence: Defence) -> bool:
        """Return whether knowing this defence can help: it names a countermove, and the attack can play it.

        Guesses of images that a defence changed are decoded after any attack.
        """
        return defence.overrides("adaptive") and (self.adapts or defence.hides_images)


class Scene(NamedTuple):
    """What a server knows about the task before anyone trains.

    Attributes:
        shape: (C, H, W) of an image.
        num_classes: the number of classes.
        public_data: images of the same kind from another source, or None if they are not granted.
    """

    shape: tuple[int, int, int]
    num_classes: int
    public_data: Batch | None = None


@dataclass(frozen=True)
class MembershipAttack(AnyAttack):
    """Base of attacks that distinguish a client's training images from others. A subclass implements `scores`.

    Attributes:
        label_only: whether the attack uses nothing but predicted labels.
        every: attack the local models of every n-th round.
        images: at most this many members are tested per model, and as many non-members.
    """

    seeks: ClassVar[str] = "membership"
    label_only: ClassVar[bool] = False

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
        """Return a score (N,) per image; a higher score means that the network was more likely trained on it.

        Args:
            network: a client's model as the server knows it, in evaluation mode.
            batch: members and non-members with their labels, in any order and unmarked.
            rng: source of all random draws.
        """

    def judge(self, network: nn.Module, batch: Batch, rng: torch.Generator, shadows: Iterable[nn.Module]) -> Tensor:
        """Return the scores (N,) of an attack that may also look at shadow models; by default it does not.

        ``shadows`` are models that were trained without the candidates, see `gradveil.attacks.shadow.ShadowAttack`.
        """
        return self.scores(network, batch, rng)


@dataclass(frozen=True)
class Attack(AnyAttack):
    """Base of attacks that rebuild images. A subclass implements `run`; callers call the object, which checks first.

    An attack never sees the private images. The attack of a malicious server also implements `alter`, and has
    `Knowledge.ALTERS_MODEL` among its ``needs``.
    """

    @final
    def __call__(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Check the threat model, rebuild what the network saw, and decode it if the defence changed the images.

        If several rounds of a client were seen and no decoder combined them, the guess with the least loss is kept.
        """
        if self.missing(seen):
            needs = self.needs_for(single_step=seen.single_step)
            raise ThreatModelError(needs_message(self.name, needs, seen.threat.knows))
        seen = replace(seen, threat=ThreatModel(seen.threat.knows - self.ignores))
        stages = self.decoders(seen)
        inverts = Knowledge.ENCODINGS not in self.needs
        result = decoded(self._guarded(seen, rng), stages, seen, rng, self._guarded if inverts else None)
        result = with_untried(result, self._stage_options(seen), stages, seen)
        several = seen.rounds > 1 and len(result.images) == seen.num_targets
        return _least(result, seen.rounds) if several else result

    @abstractmethod
    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Rebuild the images of all targets, choosing among guesses by the attack's own loss."""

    def alter(self, network: nn.Module, seen: Scene, rng: torch.Generator) -> nn.Module:
        """Return the network that a malicious server broadcasts; ``network`` itself may be changed."""
        return network

    def prepared_on(self, shape: tuple[int, int, int], num_classes: int) -> frozenset[int]:
        """Return the keys (`gradveil.data.auxiliary.image_keys`) of the images that the attack was prepared on.

        None of them may be a target: the attack would remember the image rather than find it. ``shape`` and
        ``num_classes`` describe the task.
        """
        return frozenset()

    def keeping(self, count: int) -> "Attack":
        """Return the attack with about ``count`` iterates kept for the report, if it can and has no number set."""
        return self

    def missing(self, seen: Observation) -> list[str]:
        """Return the names of what the attack needs and the threat model does not grant."""
        return sorted(knowledge.value for knowledge in self.needs_for(single_step=seen.single_step) - seen.threat.knows)

    def decoders(self, seen: Observation) -> Sequence[Stage]:
        """Return the stages that decode the guesses: those of a known defence's countermove, or none.

        Unless ``adapt`` names a countermove, this is the first whose stages have all the knowledge that they need.
        """
        return runnable(self._stage_options(seen), seen)

    def _stage_options(self, seen: Observation) -> list[Stages]:
        return stage_options(seen, getattr(self, "adapt", ""), _build_stage)

    def _guarded(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Run the attack, and discard guesses for updates that carry no information.

        A target whose update is zero, or holds NaN or infinity, gets NaN images and the reason in ``why``. If all
        targets are such, the attack does not run.
        """
        reasons = diagnose(seen)
        if all(reasons):
            return _no_guesses(seen, reasons)
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
            f"The attack must be one that rebuilds images here, got {attack.name!r}, which finds training members. "
            f"Choose another attack, or run gradveil audit --attacks {attack.name}."
        )
    return attack


def needs_message(name: str, needs: Collection[Knowledge], granted: Collection[Knowledge]) -> str:
    """Return the error message for an attack that needs more than is granted, ending in the options to type.

    Example:
        >>> knows = [Knowledge.LABELS, Knowledge.NUM_EXAMPLES]
        >>> needs_message("ggl", {Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA}, knows)
        "Attack 'ggl' needs public-data; add --knows labels,num-examples,public-data."
        >>> needs_message("unmix", [*knows, Knowledge.DEFENCE], knows)
        "Attack 'unmix' needs defence; add --adaptive."
    """
    missing = set(needs) - set(granted)
    named = sorted((set(needs) | set(granted)) - {Knowledge.DEFENCE})
    options = [f"--knows {','.join(named)}"] if missing - {Knowledge.DEFENCE} else []
    options += ["--adaptive"] if Knowledge.DEFENCE in missing else []
    return f"Attack {name!r} needs {', '.join(sorted(missing))}; add {' and '.join(options)}."


def diagnose(seen: Observation) -> list[str]:
    """Return for each target what makes its update useless, or "" if nothing does."""
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


def _no_guesses(seen: Observation, reasons: Sequence[str]) -> Reconstruction:
    """Return no guess for any target, with the reasons."""
    like, count = next(iter(seen.updates.values())), seen.num_targets
    images = seen.num_examples if seen.knows(Knowledge.NUM_EXAMPLES) else 1
    return Reconstruction(
        images=like.new_full((count, images, *seen.shape), torch.nan),
        labels=torch.full((count, images), -1, device=like.device),
        loss=like.new_full((count,), torch.nan),
        converged=torch.zeros(count, dtype=torch.bool, device=like.device),
        why=tuple(reasons),
    )


def _build_stage(spec: str) -> Stage:
    built = build_any_attack(spec)
    if not isinstance(built, Stage):
        raise ConfigError(f"A countermove must decode by a decoder, got the attack {spec!r}. Name unmix, for example.")
    return built


def _least(result: Reconstruction, rounds: int) -> Reconstruction:
    """Return the round with the least loss of each client."""
    loss = result.loss.nan_to_num(torch.inf).view(-1, rounds)
    best = loss.argmin(1) + torch.arange(len(loss), device=loss.device) * rounds
    why = tuple(result.why[row] for row in best.tolist()) if result.why else ()
    iterates = result.iterates[:, best] if result.iterates.numel() else result.iterates
    answers = tuple(result.answers[row] for row in best.tolist()) if result.answers else ()
    not_decoded = tuple(result.not_decoded[row] for row in best.tolist()) if result.not_decoded else ()
    flags = tuple(result.flags[row] for row in best.tolist()) if result.flags else ()
    return Reconstruction(
        result.images[best],
        result.labels[best],
        result.loss[best],
        result.converged[best],
        why,
        iterates,
        result.steps,
        answers,
        not_decoded,
        flags,
    )


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))
