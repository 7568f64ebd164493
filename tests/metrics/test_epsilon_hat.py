"""An epsilon from canaries' scores: against numerical integration, exact Gaussian scores, and their edges."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from gradveil.defences.parts.accounting import epsilon
from gradveil.defences.parts.gaussian_dp import MOST_EPSILON as MOST
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.metrics.epsilon_hat import estimate


def naive_delta(eps, mu):
    """Return the area by which N(mu, 1) exceeds e^eps times N(0, 1)."""
    begin = eps / mu + mu / 2
    value, _ = quad(lambda x: norm.pdf(x, mu) - math.exp(eps) * norm.pdf(x), begin, begin + 40, limit=200)
    return value


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5])
def test_epsilon_gives_back_its_delta(mu, delta):
    assert naive_delta(epsilon_of(mu, delta), mu) == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize("mu", [0.5, 2.0, 20.0])
def test_epsilon_is_just_below_the_accountants_bound(mu):
    bound = epsilon(1 / mu, 1.0, 1, 1e-5)
    assert 0.9 * bound < epsilon_of(mu, 1e-5) <= bound


@given(st.floats(1e-4, 1e4), st.floats(1e-4, 1e4), st.sampled_from([1e-9, 1e-5, 0.1]))
def test_epsilon_grows_with_mu(one, other, delta):
    low, high = sorted([one, other])
    assert 0 <= epsilon_of(low, delta) <= epsilon_of(high, delta) * (1 + 1e-9) <= MOST * (1 + 1e-9)


@pytest.mark.parametrize(("mu", "wanted"), [(0.0, 0.0), (-3.0, 0.0), (1e-12, 0.0), (math.inf, MOST), (1e6, MOST)])
def test_edges(mu, wanted):
    assert epsilon_of(mu, 1e-5) == wanted


@pytest.mark.parametrize("mu", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("distance", [1.0, 2.0])
def test_the_interval_holds_the_truth_in_19_of_20_seeds(mu, distance):
    inside = 0
    for seed in range(20):
        drawn = np.random.default_rng(seed).normal(mu / distance, 1.0, 16)
        found = estimate(torch.from_numpy(drawn) * 7, 7.0, 1e-5, distance)  # the unit of scores does not matter
        inside += found.low <= epsilon_of(mu, 1e-5) <= found.high
        assert found.low <= found.epsilon <= found.high
    assert inside >= 19


def test_without_noise_the_estimate_is_the_largest():
    assert estimate(torch.ones(4), 0.0, 1e-5) == (MOST, MOST, MOST)
    assert estimate(torch.zeros(4), 0.0, 1e-5) == (0.0, 0.0, 0.0)
