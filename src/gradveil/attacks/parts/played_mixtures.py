"""Mixtures that an attacker makes of public images as Mixup and InstaHide do, to learn from. Pixels are in [-1, 1]."""

from dataclasses import replace

import torch
from torch import Tensor

from gradveil.attacks.parts.imitation import Imitation, learned_filter
from gradveil.attacks.parts.unmixing import Encoder, Mixtures, Solution, solved
from gradveil.defences.mixup import Mixup, coefficients
from gradveil.secret_stream import attackers_stream

_REHEARSED = 8
"""Sets of public images, each as large as a client's, from which the correction of decoded images is learned."""


def encoder(defence: Mixup, public: Tensor, *, flipped: bool, imitate: Imitation | None) -> Encoder:
    """Return a function that mixes an attacker's images as the defence does; each is the main image in turn.

    If there is an ``imitate``, its errors are made in the mixtures.
    """

    def encode(images: Tensor, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        parts = defence.num_private
        weights = coefficients(count, defence.k, defence.own, defence.cap, attackers_stream(rng))
        keys = torch.rand(count, len(images), generator=rng)
        keys[torch.arange(count), torch.arange(count) % len(images)] = -1.0
        chosen = keys.argsort(1)[:, :parts]  # the main image first
        mixing = torch.zeros(count, len(images)).scatter_(1, chosen, weights[:, :parts])
        mixed = torch.einsum("en,n...->e...", mixing, images)
        for rest in weights[:, parts:].T:
            strangers = public[torch.randint(len(public), (count,), generator=rng)]
            mixed = mixed + rest.view(-1, 1, 1, 1) * strangers
        if imitate is not None:
            if flipped:
                mixed = mixed * (2 * torch.randint(2, mixed.shape, generator=rng) - 1)
            mixed = 2 * imitate((mixed + 1) / 2, rng) - 1
        return (mixed.abs() if flipped else mixed), mixing

    return encode


def corrected(
    solution: Solution, mixtures: Mixtures, defence: Mixup, public: Tensor, imitate: Imitation, rng: torch.Generator
) -> Solution:
    """Return the solution with images after a filter that undoes what errors of the guesses do to decoded images.

    The filter is learned from public images that were mixed in the shares found, shown with such errors, and decoded.
    """
    mixing, strangers = solution.coefficients, defence.k - defence.num_private
    decoded, truth = list[Tensor](), list[Tensor]()
    for _ in range(_REHEARSED):
        images = public[torch.randperm(len(public), generator=rng)[: mixing.shape[1]]]
        mixed = torch.einsum("en,n...->e...", mixing, images)
        for _ in range(strangers):
            others = public[torch.randint(len(public), (len(mixing),), generator=rng)]
            mixed = mixed + ((1 - mixing.sum(1)) / strangers).view(-1, 1, 1, 1) * others
        shown = 2 * imitate((mixed + 1) / 2, rng) - 1
        played = replace(mixtures, encodings=shown.flatten(1), known=True)
        decoded.append(solved(played, mixing, rounds=1, restarts=1, rng=rng).images.view_as(images))
        truth.append(images)
    correct = learned_filter(torch.cat(decoded), torch.cat(truth))
    return solution._replace(images=correct(solution.images.view_as(images)).clamp(-1, 1).flatten(1))
