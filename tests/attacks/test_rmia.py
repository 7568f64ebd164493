import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.attacks.rmia import Rmia
from gradveil.attacks.shadow import log_odds, log_probability
from gradveil.errors import ConfigError


@pytest.mark.parametrize("a", [-0.1, 1.1])
def test_bad_settings(a):
    with pytest.raises(ConfigError, match=r"a must be in \[0, 1\]"):
        Rmia(a=a)


def test_the_ratio_by_hand():
    """The shadow models give 0.4 and 0.6; half of 1.3 times their mean plus 0.7 is 0.675, and 0.9 / 0.675 is 4/3."""
    own, others = torch.tensor([0.9]).log(), torch.tensor([[0.4], [0.6]]).log()
    assert Rmia(a=0.3).compare(own, others).item() == pytest.approx(math.log(4 / 3))


def test_images_that_all_models_know_or_none_knows_are_no_evidence():
    own = torch.tensor([1.0, 1e-30]).double().log()
    same, unknown = Rmia(a=1.0).compare(own, own.expand(3, 2)).tolist()
    assert (same, unknown) == pytest.approx((0, 0))
    assert Rmia(a=1.0).compare(own, torch.full((3, 2), -torch.inf)).isfinite().all()


probabilities = st.lists(st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)), min_size=2, max_size=12)


@given(probabilities, probabilities, st.sampled_from([1.0, 2.0]), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_published_count_of_population_images_orders_images_as_the_ratio_does(images, population, gamma, a):
    """The share of images z with p(x|f)/p(x) >= gamma * p(z|f)/p(z) never falls where our score rises."""

    def ratio(own, out):
        return own / (((1 + a) * out + 1 - a) / 2)

    counts = [sum(ratio(*x) >= gamma * ratio(*z) for z in population) for x in images]
    own, out = (torch.tensor(part, dtype=torch.float64) for part in zip(*images, strict=True))
    scores = Rmia(a=a).compare(own.log(), out.log()[None])
    order = sorted(range(len(images)), key=lambda n: (round(scores[n].item(), 9), counts[n]))
    assert [counts[n] for n in order] == sorted(counts)


@given(st.lists(st.floats(-80, 80), min_size=2, max_size=5))
def test_log_odds_are_those_of_the_probability(values):
    logits, label = torch.tensor([values], dtype=torch.float64), torch.tensor([0])
    p = log_probability(logits, label).exp().item()
    if 1e-12 < p < 1 - 1e-4:
        assert log_odds(logits, label).item() == pytest.approx(math.log(p / (1 - p)), rel=1e-6, abs=1e-6)
    assert log_odds(logits, label).isfinite().all()
