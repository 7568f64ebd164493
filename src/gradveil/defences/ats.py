"""ATS: train on images transformed by a policy that makes their gradients hard to invert."""

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
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from gradveil.validate import in_range


@dataclass(frozen=True)
class Ats(Defence):
    r"""Transform each image of a batch by a policy, which is a short sequence of image operations.

    .. math:: \tilde x = t_{p_m}(\dots t_{p_1}(x))

    A policy is written as the numbers of its operations, in order: ``21-13-3``. If several policies are joined by
    ``+``, each image gets one of them at random. The numbers are indices into
    `gradveil.defences.parts.transforms.STEPS`. `gradveil.defences.parts.policies` searches for good policies.

    Threat model: an honest-but-curious server that inverts the updates of later rounds.
    Does not protect: the first rounds, in which the network leaks every image, transformed or not. Nor does it protect
        the content of an image later on: an attacker who knows the policy inverts the transformed image and undoes the
        operations (the decoder ``untransform``).
    Guarantee: none.
    Reference: Gao et al. 2021, https://arxiv.org/abs/2011.12505, and the authors' code, which applies every operation
        with certainty and ignores the probabilities of AutoAugment. Balunovic et al. 2022,
        https://arxiv.org/abs/2111.04706, attack the policies ``21-13-3``, ``7-4-15`` and both together.
    Differs from the paper: pixels are not rounded to bytes between operations.

    Attributes:
        policy: numbers of the operations, joined by ``-``; several policies are joined by ``+``.
        crop: width in pixels of a black border that is added before a random crop to the original size, before the
            policy; 0 is no crop. The authors use 4.
        mirror: whether each image is mirrored with probability 1/2 before the policy, as the authors do.
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
        """Return the operations of each policy."""
        return [policy_of(text) for text in self.policy.split("+")]

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Transform each image by one of the policies, drawn anew for every batch."""
        images, rng, policies = batch.images, client.rng, self.policies
        self.require_pixels(images)
        if self.crop:
            images = _cropped(images, self.crop, rng)
        if self.mirror:
            flips = rng.bernoulli(0.5, (len(images), 1, 1, 1)).to(images.device)
            images = torch.where(flips, images.flip(3), images)
        chosen = rng.integers(0, len(policies), (len(images),))
        out = images.clone()
        for number, steps in enumerate(policies):
            rows = (chosen == number).nonzero()[:, 0].to(images.device)
            if len(rows):
                out[rows] = transformed(images[rows], steps, random_signs(len(rows), len(steps), rng))
        return replace(batch, images=out)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``untransform``, which undoes the policy on the inverted image, and ``early``, which does not.

        The round matters more than this choice: the first rounds leak most.
        """
        return {"untransform": Countermove(decode=("untransform",)), "early": Countermove()}


def policy_of(text: str) -> list[Transform]:
    """Parse a policy such as ``21-13-3`` into its operations.

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
    """Apply all operations to images (N, C, H, W), with the signs (N, operations) of each."""
    for number, step in enumerate(steps):
        images = step(images, signs[:, number])
    return images


def random_signs(count: int, operations: int, rng: SecretStream) -> Tensor:
    """Draw a (count, operations) tensor of -1 and 1."""
    return 2 * rng.integers(0, 2, (count, operations)) - 1


def _cropped(images: Tensor, by: int, rng: SecretStream) -> Tensor:
    padded = F.pad(images, (by, by, by, by))
    height, width = images.shape[2:]
    corners = rng.integers(0, 2 * by + 1, (len(images), 2)).tolist()
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, corners, strict=True)])
