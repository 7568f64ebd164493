import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio

from gradveil.metrics.psnr import Psnr
from tests.metrics.test_mse import naive


@pytest.mark.parametrize(("step", "decibels"), [(1.0, 0.0), (0.1, 20.0), (0.01, 40.0), (0.5, 20 * math.log10(2))])
def test_by_hand(step, decibels):
    truth = torch.zeros(1, 3, 4, 4, dtype=torch.float64)
    assert Psnr()(truth, truth + step).item() == pytest.approx(decibels, abs=1e-9)


@pytest.mark.parametrize("step", [0.0, 1e-6, 1e-5, 1.0000001e-5])
def test_the_cap_is_reached_at_100_decibels(step):
    truth = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    value = Psnr()(truth, truth + step).item()
    assert value == pytest.approx(100, abs=1e-5)
    assert value <= 100
    assert (value == 100) == (step < 1e-5) or step == 1e-5


def test_one_exact_image_does_not_change_the_others():
    truth, guess = torch.zeros(4, 1, 2, 2), torch.full((4, 1, 2, 2), 0.1)
    guess[2] = 0
    torch.testing.assert_close(Psnr()(truth, guess), torch.tensor([20.0, 20.0, 100.0, 20.0]).double())


def test_a_batch_scores_the_mean_of_its_images_not_of_its_errors():
    truth = torch.zeros(2, 1, 2, 2, dtype=torch.float64)
    guess = truth + torch.tensor([0.1, 0.001], dtype=torch.float64).view(2, 1, 1, 1)
    assert Psnr()(truth, guess).mean().item() == pytest.approx(40)


def test_white_on_black_has_no_negative_zero():
    assert math.copysign(1, Psnr()(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).item()) == 1


@settings(max_examples=20, deadline=None)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)), seed=st.integers(0, 1000))
def test_equals_a_plain_loop_and_scikit_image(shape, seed):
    rng = np.random.default_rng(seed)
    truth, guess = rng.random((2, 2, *shape))
    values = Psnr()(torch.from_numpy(truth), torch.from_numpy(guess)).tolist()
    for value, one, other in zip(values, truth, guess, strict=True):
        assert value == pytest.approx(-10 * math.log10(naive(one, other)), abs=1e-9)
        assert value == pytest.approx(peak_signal_noise_ratio(one, other, data_range=1), abs=1e-9)
