import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.errors import ConfigError
from gradveil.metrics import align, match


def images(count, seed=0, shape=(2, 3, 4)):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(truth, guess):
    return (truth - guess.clamp(0, 1)).square().mean().item()


def best_by_force(truth, guess):
    """Return the lowest sum of errors over all one-to-one assignments of guesses to images."""
    short, long = sorted((truth, guess), key=len)
    ways = itertools.permutations(range(len(long)), len(short))
    return min(sum(error(short[i], long[j]) for i, j in enumerate(way)) for way in ways)


@settings(max_examples=40, deadline=None)
@given(num_truth=st.integers(1, 5), num_guess=st.integers(1, 5), seed=st.integers(0, 1000))
def test_equals_brute_force(num_truth, num_guess, seed):
    truth, guess = images(num_truth, seed), images(num_guess, seed + 1)
    order = match(truth, guess)
    used = order[order >= 0].tolist()
    assert (order.shape, order.dtype) == ((num_truth,), torch.int64)
    assert len(set(used)) == len(used) == min(num_truth, num_guess)
    total = sum(error(truth[i], guess[j]) for i, j in enumerate(order.tolist()) if j >= 0)
    assert total == pytest.approx(best_by_force(truth, guess), abs=1e-9)


def test_the_best_assignment_is_not_the_nearest_guess_for_each():
    truth = torch.tensor([0.5, 0.6]).view(2, 1, 1, 1)
    guess = torch.tensor([0.55, 1.0]).view(2, 1, 1, 1)  # 0.55 is nearest to both
    assert match(truth, guess).tolist() == [0, 1]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(6)))
def test_a_shuffled_truth_is_restored(order):
    truth = images(6).float()
    assert torch.equal(align(truth, truth[list(order)]), truth)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_guesses_are_used_last(bad):
    truth = images(3)
    guess = truth[[2, 0, 1]].clone()
    guess[0, 0, 0, 0] = bad
    assert match(truth, guess).tolist() == [1, 2, 0]
    far = torch.cat([guess, 1 - truth[:1].round()])  # a poor guess is better than none
    assert match(truth, far).tolist() == [1, 2, 3]


def test_missing_guesses_are_marked_and_become_nan():
    truth = images(4)
    guess = truth[[3, 1]].float()
    assert match(truth, guess).tolist() == [-1, 1, -1, 0]
    aligned = align(truth, guess)
    assert (aligned.shape, aligned.dtype) == (truth.shape, torch.float32)
    assert torch.equal(aligned[[1, 3]], truth[[1, 3]].float())
    assert aligned[[0, 2]].isnan().all()


def test_superfluous_guesses_are_left_out():
    truth = images(2)
    assert match(truth, torch.cat([images(3, seed=9), truth])).tolist() == [3, 4]


def test_guesses_are_compared_clamped_and_returned_unclamped():
    truth = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1)
    guess = torch.tensor([0.4, 9.0]).view(2, 1, 1, 1)
    assert align(truth, guess).flatten().tolist() == [9.0, pytest.approx(0.4)]


def test_empty_batches():
    assert match(images(0), images(2)).shape == (0,)
    assert match(images(2), images(0)).tolist() == [-1, -1]
    assert match(images(0), images(0)).shape == (0,)
    assert align(images(2), images(0)).isnan().all()


def test_nothing_is_edited_and_the_result_is_a_copy():
    truth, guess = images(3), images(3, seed=1).requires_grad_()
    kept = truth.clone(), guess.detach().clone()
    aligned = align(truth, guess)
    assert not aligned.requires_grad
    aligned.zero_()
    assert torch.equal(truth, kept[0])
    assert torch.equal(guess, kept[1])


def test_other_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"got \(2, 2, 3, 4\) and \(2, 2, 4, 4\)"):
        match(images(2), images(2, shape=(2, 4, 4)))
    with pytest.raises(ConfigError, match="truth must be finite"):
        align(images(2) * math.nan, images(2))
