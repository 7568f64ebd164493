import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import structural_similarity

from gradveil.metrics.ssim import Ssim

OPTIONS = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1}


def pair(shape, seed, scale=0.2):
    rng = np.random.default_rng(seed)
    truth = rng.random(shape)
    return truth, np.clip(truth + scale * rng.standard_normal(shape), 0, 1)


def naive(truth, guess, size):
    """Return SSIM of one image by a sum over each square window of ``size``."""
    middle = size // 2
    weights = np.array(
        [[math.exp(-((i - middle) ** 2 + (j - middle) ** 2) / (2 * 1.5**2)) for j in range(size)] for i in range(size)]
    )
    weights /= weights.sum()
    values = []
    for x, y in zip(truth, guess, strict=True):
        for h in range(x.shape[0] - size + 1):
            for w in range(x.shape[1] - size + 1):
                a, b = x[h : h + size, w : w + size], y[h : h + size, w : w + size]
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
                cov = (weights * (a - mean_a) * (b - mean_b)).sum()
                top = (2 * mean_a * mean_b + 1e-4) * (2 * cov + 9e-4)
                values.append(top / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)))
    return np.mean(values)


def ours(truth, guess):
    return Ssim()(torch.from_numpy(truth)[None], torch.from_numpy(guess)[None]).item()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(11, 40), st.integers(11, 40)),
    scale=st.sampled_from([0.0, 0.01, 0.2, 2.0]),
    seed=st.integers(0, 1000),
)
def test_equals_scikit_image(shape, scale, seed):
    truth, guess = pair(shape, seed, scale)
    assert ours(truth, guess) == pytest.approx(structural_similarity(truth, guess, channel_axis=0, **OPTIONS), abs=1e-9)


def test_equals_scikit_image_on_grey_and_flat_images():
    truth, guess = pair((28, 28), 0)
    assert ours(truth[None], guess[None]) == pytest.approx(structural_similarity(truth, guess, **OPTIONS), abs=1e-9)
    flat = np.full((28, 28), 0.3)
    assert ours(truth[None], flat[None]) == pytest.approx(structural_similarity(truth, flat, **OPTIONS), abs=1e-9)


@pytest.mark.parametrize(
    ("sides", "window"),
    [((11, 11), 11), ((12, 14), 11), ((10, 10), 9), ((8, 20), 7), ((20, 3), 3), ((2, 5), 1), ((1, 1), 1)],
)
def test_small_images_have_the_largest_odd_window_that_fits(sides, window):
    truth, guess = pair((2, *sides), 3)
    assert ours(truth, guess) == pytest.approx(naive(truth, guess, window), abs=1e-9)


def test_flat_images_by_hand():
    black, grey = torch.zeros(1, 1, 12, 12, dtype=torch.float64), torch.full((1, 1, 12, 12), 0.5, dtype=torch.float64)
    assert Ssim()(black, grey).item() == pytest.approx(1e-4 / (0.25 + 1e-4), rel=1e-9)
    assert Ssim()(grey, grey / 2).item() == pytest.approx((0.25 + 1e-4) / (0.25 + 0.0625 + 1e-4), rel=1e-9)


def test_the_same_image_has_exactly_one_and_its_negative_less_than_zero():
    truth, _ = pair((3, 16, 16), 5)
    assert ours(truth, truth) == 1.0
    assert -1 < ours(truth, 1 - truth) < 0
