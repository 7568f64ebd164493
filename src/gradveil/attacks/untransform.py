"""Untransform: undo a known policy of transformations, against ATS."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import Decoder
from gradveil.defences import member
from gradveil.defences.ats import Ats, transformed
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.transforms import Step
from gradveil.validate import in_range


@dataclass(frozen=True)
class Untransform(Decoder):
    r"""Undo each way in which the policy may have transformed an image, and keep the one that explains the guess best.

    .. math:: \arg\min_{p,\,\sigma} \; \big\| t_{p,\sigma}\big(t_{p,\sigma}^{-1}(\tilde x)\big) - \tilde x \big\|_2^2
        + w\, d\big(t_{p,\sigma}^{-1}(\tilde x)\big)

    over policies p and signs :math:`\sigma`. Strips that an operation pushed out of the picture tell which way it went;
    where several ways explain the guess alike, d prefers pictures whose brightness and contrast are as those of public
    images.

    Needs: the defence, and what ``inner`` needs. With public data granted d is used.
    Fails: for what operations destroyed (pixels out of the picture, equalised histograms); random crops and mirror
    images before the policy stay.
    Reference: ours; that a transformed image is as good as the image is Balunovic et al. 2022,
    https://arxiv.org/abs/2111.04706, Section 5, who attack ATS in the first steps without undoing it.
    Differs from the paper: there is none.

    Attributes:
        inner: the attack whose guesses are decoded; by default encodings that are granted.
        prior: w, weight of the distance from public images' brightness and contrast.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.DEFENCE})

    prior: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("prior", self.prior, 0)

    def decode(self, found: Reconstruction, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Each guess by itself."""
        defence = member(seen.defence, Ats)
        if defence is None:
            return found
        guesses = found.images.flatten(0, 1)
        shown = guesses.nan_to_num(0.5)
        tones = _tones(seen.public_data.images).mean(0) if seen.knows(Knowledge.PUBLIC_DATA) else None
        best, least = shown, torch.full((len(shown),), torch.inf).to(shown)
        for steps in defence.policies:
            for signs in _signs(steps):
                image = _undone(shown, steps, signs)
                again = transformed(image, steps, signs.expand(len(shown), -1))
                error = (again - shown).square().flatten(1).mean(1)
                if tones is not None:
                    error = error + self.prior * (_tones(image) - tones).square().sum(1)
                better = error < least
                best, least = torch.where(better.view(-1, 1, 1, 1), image, best), torch.where(better, error, least)
        images = torch.where(guesses.isfinite(), best, torch.nan).view_as(found.images)
        return replace(found, images=images)


def _signs(steps: list[Step]) -> list[Tensor]:
    """Every combination (1, operations) of the signs that matter."""
    return [
        torch.tensor([each]) for each in itertools.product(*((1, -1) if step.is_signed else (1,) for step in steps))
    ]


def _undone(images: Tensor, steps: list[Step], signs: Tensor) -> Tensor:
    for number, step in reversed(list(enumerate(steps))):
        images = step.undone(images, signs[:, number].expand(len(images)))
    return images


def _tones(images: Tensor) -> Tensor:
    """(N, 2) brightness and contrast."""
    flat = images.flatten(1)
    return torch.stack([flat.mean(1), flat.std(1)], 1)
