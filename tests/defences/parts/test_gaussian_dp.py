"""Gaussian differential privacy as one number."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from gradveil.defences.parts.gaussian_dp import epsilon_of, identification_bound, mu_of


@pytest.mark.parametrize(("mu", "epsilon", "picked"), [(1, 4.4, 0.018), (2, 10, 0.138), (3, 16.7, 0.46), (5, 33, 0.97)])
def test_known_values(mu, epsilon, picked):
    assert epsilon_of(mu, 1e-5) == pytest.approx(epsilon, rel=0.01)
    assert identification_bound(mu) == pytest.approx(picked, rel=0.02)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.05, 30), st.sampled_from([1e-9, 1e-5, 0.01]))
def test_mu_and_epsilon_are_inverse(mu, delta):
    found = epsilon_of(mu, delta)
    if found > 1e-6:
        assert mu_of(found, delta) == pytest.approx(mu, rel=1e-6)
        assert norm.cdf(mu / 2 - found / mu) - math.exp(found) * norm.cdf(-mu / 2 - found / mu) == pytest.approx(
            delta, rel=1e-3, abs=1e-12
        )


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 6), st.integers(2, 10_000))
def test_the_bound_on_identification_is_that_of_the_best_test(mu, candidates):
    """Naming an image if the draw exceeds a threshold that holds with chance 1 / M without it is right this often."""
    threshold = norm.isf(1 / candidates)
    assert identification_bound(mu, candidates) == pytest.approx(norm.sf(threshold - mu), rel=1e-9)
    assert identification_bound(0.0, candidates) == pytest.approx(1 / candidates)
