"""Untransform: undo a known policy of transformations, against ATS."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.decoder import Decoder
from gradveil.defences import member, required
from gradveil.defences.ats import Ats, transformed
from gradveil.defences.mixup import Mixup
from gradveil.defences.parts.transforms import Transform, filled
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Untransform(Decoder):
    r"""Undo each way in which the policy may have transformed an image, and keep the one that explains the guess best.

    .. math:: \arg\min_{p,\,\sigma} \; \big\| t_{p,\sigma}\big(t_{p,\sigma}^{-1}(\tilde x)\big) - \tilde x \big\|_2^2
        + w\, d\big(t_{p,\sigma}^{-1}(\tilde x)\big)

    over policies p and signs :math:`\sigma`. Strips that an operation pushed out of the picture tell which way it went;
    where several ways explain the guess alike, d prefers pictures whose brightness and contrast are as those of public
    images. Pixels that were pushed out are filled with the median of those that were not.

    ATS draws anew in every batch, so other pixels survive in each round of a client. Of several rounds, guesses of the
    same image are found by assignment, and each pixel is the median of the rounds that know it.

    Needs: the defence, and what ``inner`` needs. With public data granted d is used.
    Fails: for what operations destroyed in every round (pixels out of the picture, equalised histograms); random crops
    and mirror images before the policy stay, and with them, with batches of other images in each round, or with images
    that are mixed anew, each guess is by itself.
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

    def unfit(self, seen: Observation) -> list[str]:
        """A defence that transforms images."""
        return ["ats"] if member(seen.defence, Ats) is None else []

    def decode(self, found: Reconstruction, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """As many guesses as were found; those of one image in several rounds become one picture."""
        defence = required(seen.defence, Ats)
        guesses = found.images.flatten(0, 1)
        usable = guesses.flatten(1).isfinite().all(1).view(-1, 1, 1, 1)
        images, known, error = self._undo(guesses.nan_to_num(0.5), defence, seen)
        if _repeats(found, defence, seen):
            looks = (-1, seen.rounds, seen.num_examples)
            clients = zip(
                *(part.view(*looks, *part.shape[1:]) for part in (images, known & usable, error)), strict=True
            )
            images = torch.cat([_agreed(*client) for client in clients])
        return replace(found, images=torch.where(usable, images, torch.nan).view_as(found.images))

    def _undo(self, shown: Tensor, defence: Ats, seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Each guess (N, C, H, W) by itself: images, which of their pixels are known (N, 1, H, W), and errors (N,)."""
        tones = _tones(seen.public_data.images).mean(0) if seen.knows(Knowledge.PUBLIC_DATA) else None
        best, least = shown, torch.full((len(shown),), torch.inf).to(shown)
        known = torch.ones_like(shown[:, :1], dtype=torch.bool)
        for steps in defence.policies:
            for signs in _signs(steps):
                image, there = _undone(shown, steps, signs.expand(len(shown), -1))
                again = transformed(image, steps, signs.expand(len(shown), -1))
                error = (again - shown).square().flatten(1).mean(1)
                if tones is not None:
                    error = error + self.prior * (_tones(image) - tones).square().sum(1)
                better = (error < least).view(-1, 1, 1, 1)
                best, known = torch.where(better, image, best), torch.where(better, there, known)
                least = torch.minimum(error, least)
        return best, known, least


def _repeats(found: Reconstruction, defence: Ats, seen: Observation) -> bool:
    """Whether each round of a client shows the same images, but for the policy."""
    return (
        seen.rounds > 1
        and len(found.images) == seen.num_targets
        and seen.knows(Knowledge.NUM_EXAMPLES)
        and found.images.shape[1] == seen.num_examples == seen.num_images
        and not (defence.crop or defence.mirror)
        and member(seen.defence, Mixup) is None
    )


def _agreed(images: Tensor, known: Tensor, error: Tensor) -> Tensor:
    """(rounds * B, C, H, W): for each guess of a client's rounds the median of what they know of its image.

    Args:
        images: (rounds, B, C, H, W), in any order within a round.
        known: (rounds, B, 1, H, W).
        error: (rounds, B), how badly each is explained; the round with the least is what others are matched to.
    """
    told = torch.where(known, images, torch.nan)
    model = told[error.masked_fill(~known.flatten(2).any(2), torch.inf).mean(1).argmin()]
    for _ in range(_TURNS):
        owners = torch.stack([_matched(model, look) for look in told])  # (rounds, B): which image each guess is
        places = owners.argsort(1)[..., None, None, None].expand_as(told)
        model = told.gather(1, places).nanmedian(0).values
    return filled(model, model[:, :1].isfinite())[owners].flatten(0, 1)


def _matched(ours: Tensor, theirs: Tensor) -> Tensor:
    """(B,) which of our images each of theirs is, by assignment: those that correlate over pixels which both know.

    A wrong guess of brightness or contrast does not change a correlation. What isn't known is NaN.
    """
    a, b = ours.flatten(1).nan_to_num(0.0), theirs.flatten(1).nan_to_num(0.0)
    m, n = ours.flatten(1).isfinite().to(a), theirs.flatten(1).isfinite().to(b)
    count = (n @ m.T).clamp_min(1)
    mean_a, mean_b = n @ a.T / count, b @ m.T / count
    var_a, var_b = n @ a.square().T / count - mean_a.square(), b.square() @ m.T / count - mean_b.square()
    alike = (b @ a.T / count - mean_a * mean_b) / (var_a * var_b).clamp_min(1e-12).sqrt()
    return torch.as_tensor(linear_sum_assignment(-alike.cpu().numpy())[1], device=ours.device)


_TURNS = 3
"""Of matching guesses to images, and of taking medians."""


def _signs(steps: list[Transform]) -> list[Tensor]:
    """Every combination (1, operations) of the signs that matter."""
    return [
        torch.tensor([each]) for each in itertools.product(*((1, -1) if step.is_signed else (1,) for step in steps))
    ]


def _undone(images: Tensor, steps: list[Transform], signs: Tensor) -> tuple[Tensor, Tensor]:
    """Images before all operations, and which of their pixels those after them tell; signs are (N, operations)."""
    known = torch.ones_like(images[:, :1], dtype=torch.bool)
    signs = signs.to(images)
    for step, sign in zip(steps, signs.T, strict=True):
        known = step.left(known, sign)
    for step, sign in reversed(list(zip(steps, signs.T, strict=True))):
        images, known = step.undone(images, known, sign)
    return filled(images, known), known


def _tones(images: Tensor) -> Tensor:
    """(N, 2) brightness and contrast."""
    flat = images.flatten(1)
    return torch.stack([flat.mean(1), flat.std(1)], 1)
