"""Noise on a grid, compared with exact samplers and exact probabilities."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gradveil.defences.parts.grid import add_gaussian, add_laplace, gaussian_steps, grid_of, in_steps
from gradveil.secret_stream import SecretStream

ADD = {"gaussian": add_gaussian, "laplace": add_laplace}
STD = {"gaussian": 1.0, "laplace": math.sqrt(2)}
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# --- The exact sampler of Canonne, Kamath and Steinke 2020, Algorithms 1 to 3, in whole numbers -----------------------


def bernoulli_exp(gamma, rng):
    """Return true with probability exp(-gamma), for a fraction gamma."""
    while gamma > 1:
        if not bernoulli_exp(Fraction(1), rng):
            return False
        gamma -= 1
    count = 1
    while rng.randrange(gamma.denominator * count) < gamma.numerator:
        count += 1
    return count % 2 == 1


def discrete_laplace(scale, rng):
    while True:
        first = rng.randrange(scale)
        if not bernoulli_exp(Fraction(first, scale), rng):
            continue
        rest = 0
        while bernoulli_exp(Fraction(1), rng):
            rest += 1
        size, negative = first + scale * rest, rng.randrange(2)
        if size or not negative:
            return -size if negative else size


def discrete_gaussian(std, rng):
    scale = std + 1
    while True:
        drawn = discrete_laplace(scale, rng)
        gap = abs(drawn) - Fraction(std**2, scale)
        if bernoulli_exp(gap * gap / (2 * std**2), rng):
            return drawn


def steps_of(std, count, seed=0):
    return gaussian_steps(torch.empty(count), std, 1.0, SecretStream(seed))


def test_the_noise_has_the_moments_of_the_exact_discrete_gaussian():
    std, count, rng = 40, 4000, random.Random(0)
    exact = torch.tensor([float(discrete_gaussian(std, rng)) for _ in range(count)]) / std
    ours = steps_of(std, count) / std
    for moment, spread in ((1, 1), (2, math.sqrt(2)), (3, math.sqrt(15)), (4, math.sqrt(96))):
        gap = abs(exact.pow(moment).mean() - ours.pow(moment).mean())
        assert gap < 5 * spread * math.sqrt(2 / count)
    assert stats.ks_2samp(exact, ours).pvalue > 1e-3


@pytest.mark.parametrize("std", [0.7, 2.0, 5.0])
def test_each_number_of_steps_has_the_probability_of_a_rounded_gaussian(std):
    count, far = 200_000, math.ceil(4 * std)
    drawn = steps_of(std, count, seed=1).clamp(-far, far)
    edges = [-math.inf, *(k + 0.5 for k in range(-far, far)), math.inf]
    expected = torch.tensor(stats.norm.cdf(edges, scale=std)).diff() * count
    assert stats.chisquare(torch.bincount((drawn + far).long(), minlength=2 * far + 1), expected).pvalue > 1e-3


@pytest.mark.parametrize("name", ADD)
@pytest.mark.parametrize("scale", [1e-6, 0.3, 1.0, 40.0])
def test_noise_has_its_moments(name, scale):
    count = 200_000
    noise = ADD[name](torch.full((count,), 3 * scale), scale, SecretStream(2)).double() / scale - 3
    kurtosis = 3 if name == "gaussian" else 6
    assert abs(noise.mean()) < 5 * STD[name] / math.sqrt(count)
    assert abs(noise.var() / STD[name] ** 2 - 1) < 5 * math.sqrt(kurtosis / count)


# --- The grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADD)
@pytest.mark.parametrize("dtype", TYPES)
@settings(deadline=None, max_examples=25)
@given(size=st.floats(1e-3, 1e3), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_everything_that_is_sent_is_on_the_grid_whatever_went_in(name, dtype, size, scale, seed):
    given_ = (torch.linspace(-1, 1, 101, dtype=torch.float64) ** 3 * size).to(dtype)
    sent = ADD[name](given_, scale, SecretStream(seed))
    assert sent.dtype == dtype
    steps = sent.double() / grid_of(scale)
    assert torch.equal(steps, steps.round())
    assert len(set(sent.tolist())) > 20


@given(st.floats(1e-30, 1e30))
def test_a_step_is_a_power_of_two_and_far_smaller_than_the_noise(scale):
    grid = grid_of(scale)
    assert math.frexp(grid)[0] == 0.5
    assert 2**20 <= scale / grid < 2**21
    assert grid_of(scale, bound=scale) == grid
    assert scale / grid_of(0.0, bound=scale) < 2**33


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30), st.floats(1e-3, 10))
def test_rounding_toward_zero_is_exact_and_never_increases_a_norm(values, scale):
    numbers, grid = torch.tensor(values), grid_of(scale)
    steps = in_steps(numbers, grid)
    for value, whole in zip(numbers.tolist(), steps.tolist(), strict=True):
        assert whole == math.trunc(Fraction(value) / Fraction(grid))
        assert abs(Fraction(whole) * Fraction(grid)) <= abs(Fraction(value))


def test_a_shift_by_whole_steps_shifts_the_result_and_changes_nothing_else():
    grid = grid_of(1.0)
    for shift in (1, -5, 12_345_678):
        moved = add_gaussian(torch.full((1000,), shift * grid, dtype=torch.float64), 1.0, SecretStream(0))
        plain = add_gaussian(torch.zeros(1000, dtype=torch.float64), 1.0, SecretStream(0))
        assert torch.equal(moved - plain, torch.full((1000,), shift * grid, dtype=torch.float64))


def test_without_noise_nothing_changes():
    tensor = torch.tensor([0.1, -7.0])
    for add in ADD.values():
        assert torch.equal(add(tensor, 0.0, SecretStream(0)), tensor)
