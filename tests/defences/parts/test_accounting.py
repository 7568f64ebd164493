import math
import warnings

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from gradveil.defences.parts.accounting import epsilon
from gradveil.errors import ConfigError

noises, rates, counts = st.floats(0.5, 10), st.floats(0.001, 0.5), st.integers(1, 2000)


def sampled(noise, rate, steps):
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)


def exact_delta(noise, steps, eps):
    """Return δ of composed Gaussian mechanisms: Theorem 8 of Balle and Wang 2018, mu = sqrt(steps) / noise."""
    mu = math.sqrt(steps) / noise
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


@settings(deadline=None, max_examples=15)
@given(st.floats(1, 10), st.floats(0.001, 0.1), st.integers(1, 300))
def test_the_rdp_accountant_agrees_with_googles(noise, rate, steps):
    orders = [*np.arange(25, 120) / 10, *range(12, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024]
    theirs = RdpAccountant(orders).compose(sampled(noise, rate, steps)).get_epsilon(1e-5)
    assert epsilon(noise, rate, steps, 1e-5) == pytest.approx(theirs, rel=0.01, abs=1e-4)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(5.5, 0.5, 1000), (1.0, 0.125, 2000)])
def test_low_orders_that_googles_leaves_out_are_still_bounds(noise, rate, steps):
    event = sampled(noise, rate, steps)
    tight, loose = (kind().compose(event).get_epsilon(1e-5) for kind in (PLDAccountant, RdpAccountant))
    assert tight < epsilon(noise, rate, steps, 1e-5) < loose


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.01, 1000), (0.7, 0.1, 30), (4.0, 0.5, 100)])
def test_the_prv_accountant_agrees_with_googles_and_is_tighter(noise, rate, steps):
    theirs = PLDAccountant().compose(sampled(noise, rate, steps)).get_epsilon(1e-5)
    ours = epsilon(noise, rate, steps, 1e-5, "prv")
    assert theirs - 1e-3 <= ours <= theirs * 1.02 + 0.02
    assert ours < epsilon(noise, rate, steps, 1e-5)


@settings(deadline=None)
@given(st.floats(0.3, 50), st.integers(1, 1000), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_without_sampling_it_is_the_renyi_bound_in_closed_form(noise, steps, delta):
    orders = np.union1d(1 + np.geomspace(0.1, 1023, 4000), np.arange(11, 640) / 10)
    bounds = steps * orders / 2 / noise**2 + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    found = epsilon(noise, 1.0, steps, delta)
    assert bounds.min() * (1 - 1e-5) <= found <= bounds.min() * 1.05 + 1e-3


@settings(deadline=None, max_examples=25)
@given(st.floats(0.5, 20), st.integers(1, 100), st.sampled_from(["rdp", "prv"]))
def test_without_sampling_it_holds_by_the_exact_formula(noise, steps, accountant):
    found = epsilon(noise, 1.0, steps, 1e-5, accountant)
    assert exact_delta(noise, steps, found) <= 1e-5 * 1.001
    if accountant == "prv":
        assert exact_delta(noise, steps, found * 0.96 - 0.05) >= 1e-5


@settings(deadline=None, max_examples=10)
@given(noises, rates, counts, st.floats(1.01, 3))
def test_more_noise_fewer_steps_and_rarer_images_cost_less(noise, rate, steps, factor):
    base = epsilon(noise, rate, steps, 1e-5)
    assert epsilon(noise * factor, rate, steps, 1e-5) <= base
    assert epsilon(noise, rate / factor, steps, 1e-5) <= base + 1e-9
    assert epsilon(noise, rate, math.ceil(steps * factor), 1e-5) >= base
    assert base <= epsilon(noise, 1.0, steps, 1e-5)


def test_the_paper_s_example():
    """Abadi et al. 2016, Section 3.2: q = 0.01, σ = 4, 10 000 steps, δ = 1e-5 give ε = 1.26 by their accountant."""
    assert epsilon(4.0, 0.01, 10_000, 1e-5) == pytest.approx(1.03, abs=0.02)
    assert epsilon(4.0, 0.01, 10_000, 1e-5, "prv") < epsilon(4.0, 0.01, 10_000, 1e-5) < 1.26


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_extremes(accountant):
    assert epsilon(0.0, 0.1, 1, 1e-5, accountant) == math.inf
    assert epsilon(1.0, 0.1, 0, 1e-5, accountant) == epsilon(1.0, 0.0, 9, 1e-5, accountant) == 0
    assert epsilon(0.0, 0.0, 9, 1e-5, accountant) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for noise, rate, steps in [(0.01, 1.0, 1000), (0.05, 0.3, 10), (1000.0, 0.001, 1), (1.0, 1.0, 100_000)]:
            assert 0 <= epsilon(noise, rate, steps, 1e-5, accountant) < math.inf


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((-1.0, 0.1, 1, 1e-5), "noise"),
        ((1.0, 1.1, 1, 1e-5), "rate"),
        ((1.0, 0.1, -1, 1e-5), "steps"),
        ((1.0, 0.1, 1.5, 1e-5), "steps must be a whole number"),
        ((1.0, 0.1, 1, 0.0), "delta"),
        ((1.0, 0.1, 1, 1e-5, "moments"), "accountant"),
    ],
)
def test_bad_arguments(wrong, message):
    with pytest.raises(ConfigError, match=message):
        epsilon(*wrong)
