"""Identification and the rule of recognisable pictures, compared with naive loops over pixels."""

import math

import pytest
import torch

from gradveil.errors import ConfigError
from gradveil.metrics.identification import identified
from gradveil.metrics.recognition import MORE_PSNR, MORE_SSIM, recognisable


def naive(truth, guess, others):
    """Return whether each guess is nearest to its own truth, by sums over lists of pixels."""

    def distance(one, other):
        pairs = zip(one.flatten().tolist(), other.clamp(0, 1).flatten().tolist(), strict=True)
        return math.fsum((x - y) ** 2 for x, y in pairs)

    return [
        all(distance(true, mine) < distance(other, mine) for other in others)
        for true, mine in zip(truth, guess, strict=True)
    ]


def test_identified_is_that_of_a_naive_loop():
    rng = torch.Generator().manual_seed(3)
    truth, others = torch.rand(12, 2, 4, 3, generator=rng), torch.rand(40, 2, 4, 3, generator=rng)
    noise = torch.linspace(0, 1.5, 12).view(-1, 1, 1, 1) * torch.randn(truth.shape, generator=rng)
    found = identified(truth, truth + noise, others).tolist()
    assert found == naive(truth, truth + noise, others)
    assert {True, False} == set(found)


def test_chance_picks_about_one_in_all_candidates():
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(10, 1, 3, 3, generator=rng)
    guesses = torch.rand(3000, 1, 3, 3, generator=rng)
    share = identified(images[:1].expand(3000, -1, -1, -1), guesses, images[1:]).float().mean().item()
    mine = identified(images[:1], images[:1], images[1:])
    assert mine.tolist() == [True]
    assert 0.03 < share < 0.25  # of 10 images


def test_a_tie_and_a_missing_guess_pick_nothing():
    truth = torch.full((2, 1, 2, 2), 0.5)
    guess = torch.stack([truth[0], torch.full((1, 2, 2), math.nan)])
    assert identified(truth, guess, truth[:1]).tolist() == [False, False]
    assert identified(truth, guess, truth[:0]).tolist() == [True, False]


def test_shapes_must_fit():
    with pytest.raises(ConfigError, match="one guess per true image"):
        identified(torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2), torch.zeros(3, 1, 2, 3))


@pytest.mark.parametrize(
    ("ssim", "psnr", "counts"),
    [
        (0.9, 30.0, True),
        (0.68 + MORE_SSIM, 18.8 + MORE_PSNR, True),
        (0.69, 30.0, False),
        (0.9, 19.5, False),
        (0.49, 30.0, False),
        (math.nan, math.nan, False),
    ],
)
def test_only_what_is_clearly_above_blind_counts(ssim, psnr, counts):
    blind = torch.tensor(0.68), torch.tensor(18.8)
    assert bool(recognisable(torch.tensor(ssim + 1e-6), torch.tensor(psnr + 1e-4), *blind)) is counts


def test_half_of_similarity_is_needed_even_if_a_blind_guess_has_less():
    few = torch.tensor([0.45, 0.5])
    assert recognisable(few, None, torch.tensor(0.1), None).tolist() == [False, True]
