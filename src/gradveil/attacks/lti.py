"""Learning to invert (LTI): learn from played public images what update belongs to what image."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.inversion_examples import FEWEST, fingerprint, forget_parts, played_examples
from gradveil.attacks.parts.inverters import LEARNERS, Inverter, learn, load_inverter, save_inverter
from gradveil.attacks.parts.labels import known_or_recovered
from gradveil.attacks.parts.sketches import sketched
from gradveil.defences.base import HOOKS, Defence
from gradveil.errors import DataError, DefenceError
from gradveil.progress import part
from gradveil.scratch import scratch_file
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.threat.rehearsal import unplayable
from gradveil.types import Tensors
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Lti(Attack):
    r"""Play clients with public images, and learn the way back from an update to its images.

    .. math:: f^* = \arg\min_f E_{x \sim public} \| f(s(D(\nabla L(x)))) - x \|^2, \qquad \hat x = f^*(s(u))

    D is the defence, played as it is, with new private draws for each client; nothing about it needs to be understood.
    So every defence, also one that a user writes, meets an attacker who knows it. s is a random sparse projection that
    makes updates of any size equally long.

    Needs: the number of examples and public images of the same kind; for several local steps how clients train. Known
    labels are used. Knowing the defence it plays the defence, otherwise (or if a defence can't be played without a
    client's private state) clients without one.
    Fails: if public images are few or of another kind; in strong noise, where searches that know the network's
    equations make better use of the same images (ggl).
    Reference: Wu et al. 2023, https://arxiv.org/abs/2210.10880, Algorithm 1, and the authors' code (three hidden layers
    of 3,000 with ReLU, Adam, batches of 256, 200 epochs; batches of images are matched before they are compared).
    Differs from the paper: ``learner=kernel``, the default, is Gaussian kernel regression in closed form: on two cores
    it takes seconds in place of an hour and has less error with few public images. ``network`` is the published one,
    smaller by default. Public images are also shown slightly moved. Settings and weights are chosen on public images
    that were held out.

    Attributes:
        samples: clients that are played with public images.
        width: places that an update is projected to, if it has more entries.
        learner: kernel, or network (published).
        hidden: width of the network's hidden layers; published: 3,000.
        steps: training steps of the network.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA})
    replays: ClassVar[bool] = True
    most_images: ClassVar[int] = 64
    fewest_public: ClassVar[int] = FEWEST
    weighs_knowledge: ClassVar[bool] = True

    samples: int = 2000
    width: int = 4096
    learner: str = "kernel"
    hidden: int = 1000
    steps: int = 1000

    def __post_init__(self) -> None:
        in_range("samples", self.samples, 20, 1_000_000)
        in_range("width", self.width, 16, 1_000_000)
        in_range("hidden", self.hidden, 1, 100_000)
        in_range("steps", self.steps, 1)
        one_of("learner", self.learner, LEARNERS)

    def adapts_to(self, defence: Defence) -> bool:
        """Return True for every defence that does anything: it is played, whether or not it names countermoves."""
        return any(defence.overrides(hook) for hook in HOOKS)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Learn the inverter, and apply it to all targets."""
        count, size = seen.num_targets, seen.num_examples
        reason = unplayable(seen)
        labels = known_or_recovered(seen)
        large = self.too_large(size, local_steps=1)
        if large:  # a defence may send more images than the protocol says, as veil does
            return nothing(seen, labels, f"learned inversion {large}")
        if reason:
            return nothing(seen, labels, f"clients with public images can't be played: {reason}")
        try:
            inverter = self.inverter(seen, rng)
        except DefenceError as error:  # it needs a client's private state, which the server can't have
            if not seen.knows(Knowledge.DEFENCE):
                return nothing(seen, labels, f"clients with public images can't be played: {error}")
            plain = self.run(seen.without(Knowledge.DEFENCE), rng)
            why = f"clients were played without the defence, which can't be played: {error}"
            return replace(plain, why=tuple(f"{why}; {told}" for told in plain.why))
        images = self.guess(inverter, seen, seen.mean_gradients, labels)
        rebuilt = -10 * torch.tensor(inverter.error).clamp_min(1e-12).log10()
        told = f"learned from {self.samples:,} played updates; {rebuilt:.1f} dB on public images that were held out"
        loss = images.new_full((count,), inverter.error)
        return Reconstruction(
            images.view(count, size, *seen.shape),
            labels if labels.dim() == 2 else labels.argmax(2),
            loss,
            loss <= 0.5 * inverter.blind,
            why=(told,) * count,
        )

    def inverter(self, seen: Observation, rng: torch.Generator) -> Inverter:
        """Return the inverter for these updates: learned now, or before if a scratch folder holds it."""
        seed = int(torch.randint(2**62, (), generator=rng))
        key = fingerprint(seen, self, seen.knows(Knowledge.LABELS), seed)
        path = scratch_file(f"inverter-{key}.safetensors")
        if path is not None and path.exists():
            with suppress(DataError):
                return load_inverter(path)
        with part(0, 2):
            examples = played_examples(seen, self.samples, self.width, seed)
        classes = seen.num_classes if seen.knows(Knowledge.LABELS) else 0
        with part(1, 2):
            found = learn(examples, classes, self.learner, self.hidden, self.steps, seed)
        if path is not None:
            save_inverter(path, found)
            forget_parts(seen, self.samples, self.width, seed)
        return found

    def guess(self, inverter: Inverter, seen: Observation, gradients: Tensors, labels: Tensor) -> Tensor:
        """Return the guesses (rows, B * pixels) in [0, 1] for mean gradients (rows, ...) and labels (rows, B)."""
        return inverter(sketched(gradients, self.width, seed=0), labels if seen.knows(Knowledge.LABELS) else None)


def nothing(seen: Observation, labels: Tensor, why: str) -> Reconstruction:
    """Return no guess for any target, with the reason."""
    count = seen.num_targets
    like = next(iter(seen.updates.values()))
    images = like.new_full((count, seen.num_examples, *seen.shape), torch.nan)
    none = torch.zeros(count, dtype=torch.bool, device=like.device)
    return Reconstruction(images, labels, like.new_full((count,), torch.nan), none, why=(why,) * count)
