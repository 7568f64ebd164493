"""Untransform: undo a known policy of transformations, against ATS."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.attacks.parts.imitation import Filter, Imitation, learned_filter
from gradveil.attacks.rehearsing import RehearsingDecoder
from gradveil.defences import member, required
from gradveil.defences.ats import Ats, transformed
from gradveil.defences.mixup import Mixup
from gradveil.defences.parts.transforms import Transform, filled
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Untransform(RehearsingDecoder):
    r"""Undo each transformation that the policy may have made, and keep the one that explains the guess best.

    .. math:: \arg\min_{p,\,\sigma} \; \big\| t_{p,\sigma}\big(t_{p,\sigma}^{-1}(\tilde x)\big) - \tilde x \big\|_2^2
        + w\, d\big(t_{p,\sigma}^{-1}(\tilde x)\big)

    over policies p and signs :math:`\sigma`. The empty strips that an operation leaves at the border reveal its
    direction. If several ways explain the guess equally well, d prefers pictures with the brightness and contrast of
    public images. Pixels that were moved out of the picture are filled with the median of the others.

    ATS draws a policy per batch, so different pixels survive in each round of a client. If there are several rounds,
    guesses of the same image are matched by assignment, and each pixel is the median of the rounds that know it.

    With ``rehearsals``, ``inner`` first inverts updates of clients that the attacker plays with public images. Other
    public images are transformed by the policy, shown with errors of this kind and decoded, and a filter from decoded
    images to true ones is learned. It is used if it helps for public images that it was not learned from.

    Needs: the defence, and what ``inner`` needs. The term d is used if public data are granted.
    Fails: for what operations destroyed in every round (pixels out of the picture, equalised histograms). Random crops
    and flips before the policy are not undone. With them, with different images in each round's batch, or with images
    that are mixed in each round, each guess is decoded separately.
    Reference: ours. Balunovic et al. 2022, https://arxiv.org/abs/2111.04706, Section 5, show that a transformed image
    reveals as much as the image; they attack ATS in the first steps without undoing it.
    Differs from the paper: not applicable.

    Attributes:
        inner: the attack whose guesses are decoded; by default the granted encodings.
        prior: w, weight of the distance from the brightness and contrast of public images.
        rehearsals: updates of played clients from which the errors of ``inner`` are learned; 0 learns nothing.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.DEFENCE})

    prior: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("prior", self.prior, 0)

    def unfit(self, seen: Observation) -> list[str]:
        """Return ats if the defence does not transform images."""
        return ["ats"] if member(seen.defence, Ats) is None else []

    def decode(
        self, found: Reconstruction, seen: Observation, rng: torch.Generator, imitate: Imitation | None = None
    ) -> Reconstruction:
        """Decode each guess; guesses of one image in several rounds are combined."""
        defence = required(seen.defence, Ats)
        guesses = found.images.flatten(0, 1)
        usable = guesses.flatten(1).isfinite().all(1).view(-1, 1, 1, 1)
        images, known, error = self._undo(guesses.nan_to_num(0.5), defence, seen)
        if imitate is not None:
            images = self._correction(imitate, defence, seen, rng)(images)
        if _repeats(found, defence, seen):
            looks = (-1, seen.rounds, seen.num_examples)
            clients = zip(
                *(part.view(*looks, *part.shape[1:]) for part in (images, known & usable, error)), strict=True
            )
            images = torch.cat([_agreed(*client) for client in clients])
        return replace(found, images=torch.where(usable, images, torch.nan).view_as(found.images))

    def _undo(self, shown: Tensor, defence: Ats, seen: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Decode each guess (N, C, H, W): return images, a mask of known pixels (N, 1, H, W), and errors (N,)."""
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

    def _correction(self, imitate: Imitation, defence: Ats, seen: Observation, rng: torch.Generator) -> Filter:
        """Return a filter that undoes what errors of the guesses do to decoded images, or none if it does not help."""
        public = seen.public_data.images.cpu()
        truth = public[torch.randperm(len(public), generator=rng)[:_REHEARSED]]
        played = self._undo(imitate(_obscured(truth, defence, rng), rng), defence, seen)[0]
        half = len(truth) // 2
        learned = learned_filter(played[:half], truth[:half])

        def correct(images: Tensor) -> Tensor:
            return learned(images.cpu()).clamp(0, 1).to(images)

        before, after = ((each - truth[half:]).square().mean() for each in (played[half:], correct(played[half:])))
        return correct if bool(after < before) else lambda images: images


def _obscured(images: Tensor, defence: Ats, rng: torch.Generator) -> Tensor:
    """Return images (N, C, H, W) after policies and signs that are drawn as a client does."""
    shown, policies = images.clone(), defence.policies
    chosen = torch.randint(len(policies), (len(images),), generator=rng)
    for number, steps in enumerate(policies):
        rows = (chosen == number).nonzero()[:, 0]
        signs = 2 * torch.randint(2, (len(rows), len(steps)), generator=rng) - 1
        shown[rows] = transformed(images[rows], steps, signs)
    return shown


def _repeats(found: Reconstruction, defence: Ats, seen: Observation) -> bool:
    """Return whether each round of a client shows the same images, up to the policy."""
    return (
        seen.rounds > 1
        and len(found.images) == seen.num_targets
        and seen.knows(Knowledge.NUM_EXAMPLES)
        and found.images.shape[1] == seen.num_examples == seen.num_images
        and not (defence.crop or defence.mirror)
        and member(seen.defence, Mixup) is None
    )


def _agreed(images: Tensor, known: Tensor, error: Tensor) -> Tensor:
    """Return for each guess of a client the median of what all rounds know about its image, (rounds * B, C, H, W).

    Args:
        images: (rounds, B, C, H, W), in any order within a round.
        known: (rounds, B, 1, H, W).
        error: (rounds, B), how badly each guess is explained; the others are matched to the round with the least.
    """
    told = torch.where(known, images, torch.nan)
    model = told[error.masked_fill(~known.flatten(2).any(2), torch.inf).mean(1).argmin()]
    for _ in range(_TURNS):
        owners = torch.stack([_matched(model, look) for look in told])  # (rounds, B): the image of each guess
        places = owners.argsort(1)[..., None, None, None].expand_as(told)
        model = told.gather(1, places).nanmedian(0).values
    return filled(model, model[:, :1].isfinite())[owners].flatten(0, 1)


def _matched(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return, for each guess of another round, the index (B,) of the same image in the model.

    It is found by optimal assignment on correlations of known pixels. A wrong guess of brightness or contrast does not
    change a correlation. Unknown pixels are NaN.
    """
    a, b = ours.flatten(1).nan_to_num(0.0), theirs.flatten(1).nan_to_num(0.0)
    m, n = ours.flatten(1).isfinite().to(a), theirs.flatten(1).isfinite().to(b)
    count = (n @ m.T).clamp_min(1)
    mean_a, mean_b = n @ a.T / count, b @ m.T / count
    var_a, var_b = n @ a.square().T / count - mean_a.square(), b.square() @ m.T / count - mean_b.square()
    alike = (b @ a.T / count - mean_a * mean_b) / (var_a * var_b).clamp_min(1e-12).sqrt()
    return torch.as_tensor(linear_sum_assignment(-alike.cpu().numpy())[1], device=ours.device)


_REHEARSED = 128
"""Public images, at most, that are obscured and decoded to learn a correction; half of them check it."""
_TURNS = 3
"""How often guesses are matched to images and medians are taken."""


def _signs(steps: list[Transform]) -> list[Tensor]:
    """Return every combination (1, operations) of the signs that matter."""
    return [
        torch.tensor([each]) for each in itertools.product(*((1, -1) if step.is_signed else (1,) for step in steps))
    ]


def _undone(images: Tensor, steps: list[Transform], signs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images before all operations and a mask of their known pixels; signs are (N, operations)."""
    known = torch.ones_like(images[:, :1], dtype=torch.bool)
    signs = signs.to(images)
    for step, sign in zip(steps, signs.T, strict=True):
        known = step.left(known, sign)
    for step, sign in reversed(list(zip(steps, signs.T, strict=True))):
        images, known = step.undone(images, known, sign)
    return filled(images, known), known


def _tones(images: Tensor) -> Tensor:
    """Return brightness and contrast (N, 2)."""
    flat = images.flatten(1)
    return torch.stack([flat.mean(1), flat.std(1)], 1)
