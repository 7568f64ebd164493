from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.config import TrainSettings
from gradveil.errors import DefenceError, DivergedError
from gradveil.federated.aggregation import Aggregate, mean_of, update_weights
from gradveil.types import Update


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8), data=st.data())
def test_weights_by_size_and_uniform_add_up_to_one(sizes, data):
    drawn = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=9))
    for weighting in ("size", "uniform"):
        weights = update_weights(TrainSettings(clients=len(sizes), weighting=weighting), sizes, drawn)
        assert sum(weights.values()) == pytest.approx(1)
        assert weights.keys() == set(drawn)


def test_unbiased_weights_have_the_full_average_as_their_mean():
    sizes = [10, 30, 20, 40]
    settings = TrainSettings(clients=4, sampled=2, weighting="unbiased")
    pairs = [(a, b) for a in range(4) for b in range(4) if a < b]
    mean = [sum(update_weights(settings, sizes, pair).get(c, 0) for pair in pairs) / len(pairs) for c in range(4)]
    assert mean == pytest.approx([0.1, 0.3, 0.2, 0.4])


def test_a_client_drawn_twice_counts_twice():
    settings = TrainSettings(clients=2, sampled=3, sampling="uniform-replace")
    assert update_weights(settings, [10, 20], [0, 1, 0]) == pytest.approx({0: 0.5, 1: 0.5})
    assert update_weights(replace(settings, weighting="uniform"), [10, 20], [0, 1, 0]) == pytest.approx(
        {0: 2 / 3, 1: 1 / 3}
    )


def test_the_aggregate_is_the_weighted_sum():
    model = {"w": torch.tensor([1.0, 2.0]), "mean": torch.tensor([5.0])}
    aggregate = Aggregate()
    aggregate.add(Update({"w": torch.tensor([1.0, 0.0])}, 1, {"mean": torch.tensor([2.0])}), 0.25)
    aggregate.add(Update({"w": torch.tensor([0.0, 4.0])}, 1, {"mean": torch.tensor([-2.0])}), 0.75)
    moved = aggregate.apply(model)
    assert torch.equal(moved["w"], torch.tensor([1.25, 5.0]))
    assert torch.equal(moved["mean"], torch.tensor([4.0]))
    assert torch.equal(model["w"], torch.tensor([1.0, 2.0]))


def test_an_update_with_other_tensors_is_refused():
    aggregate = Aggregate()
    aggregate.add(Update({"packed": torch.ones(2)}, 1), 1.0)
    with pytest.raises(DefenceError, match="packed"):
        aggregate.apply({"w": torch.ones(2)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_model_is_refused(value):
    aggregate = Aggregate()
    aggregate.add(Update({"w": torch.tensor([value])}, 1), 1.0)
    with pytest.raises(DivergedError, match="diverged"):
        aggregate.apply({"w": torch.ones(1)})


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(0, 1000))
def test_the_mean_lies_between_and_counts_all_examples(weights, seed):
    rng = torch.Generator().manual_seed(seed)
    updates = [Update({"w": torch.randn(3, generator=rng)}, n, {"b": torch.ones(1)}) for n, _ in enumerate(weights)]
    mean, every = mean_of(updates, weights), torch.stack([update.tensors["w"] for update in updates])
    naive = sum(weight * update.tensors["w"] for weight, update in zip(weights, updates, strict=True)) / sum(weights)
    assert torch.allclose(mean.tensors["w"], naive, atol=1e-5)
    assert bool((mean.tensors["w"] <= every.amax(0) + 1e-6).all())
    assert mean.num_examples == sum(range(len(weights)))
    assert mean.buffers["b"].item() == pytest.approx(1.0)
