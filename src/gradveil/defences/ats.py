"""ATS: clients train on images transformed by a policy that makes their gradients hard to invert."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.defences.base import Client, Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.transforms import STEPS, Transform
from gradveil.errors import ConfigError
from gradveil.types import Batch
from gradveil.validate import in_range


@dataclass(frozen=True)
class Ats(Defence):
    r"""Transform each image of a batch by a policy: up to a few operations, one after the other.

    .. math:: \tilde x = t_{p_m}(\dots t_{p_1}(x))

    A policy is written as the numbers of its operations, ``21-13-3``; of several, joined by ``+``, each image gets one
    at random. The numbers index `gradveil.defences.parts.transforms.STEPS`; `gradveil.defences.parts.policies` searches
    for good policies.

    Threat model: a curious server that inverts the updates of a network in later rounds.
    Does not protect: in the first rounds, when the network leaks any image, transformed or not; and a transformed image
        is still the image: an attacker who knows the policy undoes it (the decoder ``untransform``).
    Guarantee: none.
    Reference: Gao et al. 2021, https://arxiv.org/abs/2011.12505, and the authors' code, whose operations are applied
        always, whatever chance AutoAugment gave them. The policies ``21-13-3``, ``7-4-15`` and both together are those
        attacked by Balunovic et al. 2022, https://arxiv.org/abs/2111.04706.
    Differs from the paper: pixels are not rounded to bytes between operations.

    Attributes:
        policy: numbers of operations joined by ``-``; several policies joined by ``+``.
        crop: pixels by which images are padded with black and cropped at random again before the policy; the authors
            have 4.
        mirror: whether images are mirrored with a chance of one half before the policy; so have the authors.
    """

    hides_images: ClassVar[bool] = True

    policy: str = "21-13-3+7-4-15"
    crop: int = 0
    mirror: bool = False

    def __post_init__(self) -> None:
        in_range("crop", self.crop, 0)
        self.policies  # noqa: B018 - checks the text

    @property
    def policies(self) -> list[list[Transform]]:
        """The operations of each policy."""
        return [policy_of(text) for text in self.policy.split("+")]

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Each image under one of the policies, drawn anew in every batch."""
        images, rng, policies = batch.images, client.rng, self.policies
        self.require_pixels(images)
        if self.crop:
            images = _cropped(images, self.crop, rng)
        if self.mirror:
            flips = torch.rand(len(images), 1, 1, 1, generator=rng).to(images) < 0.5
            images = torch.where(flips, images.flip(3), images)
        chosen = torch.randint(len(policies), (len(images),), generator=rng)
        out = images.clone()
        for number, steps in enumerate(policies):
            rows = (chosen == number).nonzero()[:, 0].to(images.device)
            if len(rows):
                out[rows] = transformed(images[rows], steps, random_signs(len(rows), len(steps), rng))
        return replace(batch, images=out)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Invert the gradient as ever, then undo the policy; or (``early``) take the transformed image for the image.

        The round decides more than either: attack the first ones.
        """
        return {"untransform": Countermove(decode=("untransform",)), "early": Countermove()}


def policy_of(text: str) -> list[Transform]:
    """The operations of a policy's text.

    Example:
        >>> [step.name for step in policy_of("21-13-3")]
        ['translate-x', 'brightness', 'translate-x']
    """
    try:
        numbers = [int(number) for number in text.split("-")]
    except ValueError:
        numbers = [-1]
    if not all(0 <= number < len(STEPS) for number in numbers):
        raise ConfigError(
            f"policy must be numbers from 0 to {len(STEPS) - 1} joined by '-', got {text!r}. Try 21-13-3 or 7-4-15."
        )
    return [STEPS[number] for number in numbers]


def transformed(images: Tensor, steps: list[Transform], signs: Tensor) -> Tensor:
    """Images (N, C, H, W) after all operations, with signs (N, operations)."""
    for number, step in enumerate(steps):
        images = step(images, signs[:, number])
    return images


def random_signs(count: int, operations: int, rng: torch.Generator) -> Tensor:
    """(count, operations) of -1 and 1."""
    return 2 * torch.randint(2, (count, operations), generator=rng) - 1


def _cropped(images: Tensor, by: int, rng: torch.Generator) -> Tensor:
    padded = F.pad(images, (by, by, by, by))
    height, width = images.shape[2:]
    corners = torch.randint(2 * by + 1, (len(images), 2), generator=rng).tolist()
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, corners, strict=True)])
