import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.metrics.roc import FALSE_RATES, advantage, area, area_interval, curve, found_at, rates

SCORES = st.lists(st.integers(0, 6), min_size=1, max_size=12).map(lambda some: torch.tensor(some).double())


@given(SCORES, SCORES)
def test_the_area_is_the_share_of_ordered_pairs_with_ties_counted_half(members, others):
    pairs = [(a > b) + 0.5 * (a == b) for a in members.tolist() for b in others.tolist()]
    assert area(members, others) == pytest.approx(sum(pairs) / len(pairs))
    assert area(others, members) == pytest.approx(1 - sum(pairs) / len(pairs))


@given(SCORES, SCORES, st.floats(0, 1))
def test_rates_cover_every_threshold(members, others, false_alarms):
    thresholds = [float("inf"), *{*members.tolist(), *others.tolist()}]
    pairs = [((others >= t).double().mean().item(), (members >= t).double().mean().item()) for t in thresholds]
    false, true = rates(members, others)
    assert sorted(zip(false.tolist(), true.tolist(), strict=True)) == sorted(pairs)
    assert advantage(members, others) == max(b - a for a, b in pairs)
    assert found_at(members, others, false_alarms) == max(b for a, b in pairs if a <= false_alarms)


@given(SCORES, SCORES)
def test_the_curve_interpolates_all_rates(members, others):
    points = list(zip(*(rate.tolist() for rate in rates(members, others)), strict=True))
    for false_rate, found in zip(FALSE_RATES, curve(members, others), strict=True):
        reached = [true for false, true in points if false == pytest.approx(false_rate, abs=1e-12)]
        for (left, low), (right, high) in itertools.pairwise(points):
            if left < false_rate < right:
                reached.append(low + (high - low) * (false_rate - left) / (right - left))
        assert found == pytest.approx(max(reached), abs=1e-5)


def test_by_hand():
    members, others = torch.tensor([5.0, 4.0, 1.0]), torch.tensor([4.0, 2.0, 0.0])
    assert area(members, others) == pytest.approx((3 + 2.5 + 1) / 9)
    assert found_at(members, others) == pytest.approx(1 / 3)
    assert advantage(members, others) == pytest.approx(1 / 3)


@given(SCORES, SCORES)
def test_the_interval_holds_the_area_and_stays_between_0_and_1(members, others):
    low, high = area_interval(members, others)
    assert 0 <= low <= area(members, others) + 1e-12
    assert area(members, others) - 1e-12 <= high <= 1
    if min(len(members), len(others)) == 1:
        assert (low, high) == (0, 1)


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_the_interval_holds_the_true_area_in_95_of_100_draws(apart):
    """Two Gaussians that lie d apart have the area Phi(d / sqrt 2)."""
    rng, inside, draws = torch.Generator().manual_seed(0), 0, 400
    truth = float(torch.special.ndtr(torch.tensor(apart) / 2**0.5))
    for _ in range(draws):
        low, high = area_interval(apart + torch.randn(60, generator=rng), torch.randn(90, generator=rng))
        inside += low <= truth <= high
    assert 0.92 <= inside / draws <= 0.98
