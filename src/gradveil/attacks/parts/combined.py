"""Several attacks on the same updates: what an ignorant attacker sees, how good guesses are, how two combine."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradveil.metrics import align
from gradveil.metrics.psnr import Psnr
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.types import Batch

SECRETS = (Knowledge.KEY, Knowledge.LOCK, Knowledge.PRIVATE_STATE)
"""Secrets of a defence, useless to an attacker who does not know the defence."""


def ignorant(seen: Observation) -> Observation:
    """Return the observation of an attacker who does not know the defence."""
    return seen.without(Knowledge.DEFENCE, *SECRETS)


def mean_psnr(found: Reconstruction, truth: Sequence[Batch]) -> float:
    """Return the mean PSNR of all guesses; an image without a guess counts as grey."""
    values = []
    for guess, batch in zip(found.images.cpu(), truth, strict=True):
        filled = torch.where(guess.isfinite(), guess, torch.full_like(guess, 0.5))
        images = batch.images.cpu()
        values.append(Psnr()(images, align(images, filled)))
    return float(torch.cat(values).mean())


def mixed(first: Reconstruction, second: Reconstruction, take: Tensor) -> Reconstruction:
    """Return the first result with the targets (T,) to ``take`` from the second; iterates are those of the first."""

    def chosen(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(take.to(one.device).view(-1, *[1] * (one.dim() - 1)), other, one)

    def texts(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
        blank = ("",) * len(take)
        return tuple(b if t else a for a, b, t in zip(one or blank, other or blank, take.tolist(), strict=True))

    none = ((),) * len(take)
    flags = zip(first.flags or none, second.flags or none, take.tolist(), strict=True)
    return replace(
        first,
        flags=tuple(b if t else a for a, b, t in flags),
        images=chosen(first.images, second.images),
        labels=chosen(first.labels, second.labels),
        loss=chosen(first.loss, second.loss),
        converged=chosen(first.converged, second.converged),
        why=texts(first.why, second.why),
        answers=texts(first.answers, second.answers),
        not_decoded=texts(first.not_decoded, second.not_decoded),
    )
