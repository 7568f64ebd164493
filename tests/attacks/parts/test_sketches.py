"""Sketches keep inner products in expectation, and equal seeds give equal projections."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.attacks.parts.sketches import sketched


def tensors(rows, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(rows, 4, 5, generator=rng), "b": torch.randn(rows, 30, generator=rng)}


def flat(parts):
    return torch.cat(list(parts.values()), 1)


def test_small_updates_are_kept_as_they_are():
    given_tensors = tensors(3)
    kept = sketched(given_tensors, 50, seed=1)
    assert torch.equal(kept["a"], given_tensors["a"].flatten(1))
    assert torch.equal(kept["b"], given_tensors["b"])


@given(width=st.integers(1, 60), seed=st.integers(0, 10))
def test_a_sketch_is_linear_and_has_its_width(width, seed):
    one, other = tensors(2, 0), tensors(2, 1)
    both = sketched({name: one[name] + 2 * other[name] for name in one}, width, seed)
    apart = flat(sketched(one, width, seed)) + 2 * flat(sketched(other, width, seed))
    assert torch.allclose(flat(both), apart, atol=1e-5)
    assert flat(both).shape[1] <= max(width + 1, 2)


def test_inner_products_are_kept_in_the_mean_over_projections():
    whole = tensors(2)
    exact = float((whole["b"][0] * whole["b"][1]).sum() + (whole["a"][0] * whole["a"][1]).sum())
    found = [flat(sketched(whole, 20, seed)) for seed in range(4000)]
    mean = sum(float(rows[0] @ rows[1]) for rows in found) / len(found)
    assert mean == pytest.approx(exact, abs=0.6)


def test_scalars_and_seeds():
    parts = {"scale": torch.tensor([1.0, 2.0]), "w": torch.ones(2, 100)}
    assert sketched(parts, 10, seed=0)["scale"].shape == (2, 1)
    same = [sketched(parts, 10, seed)["w"] for seed in (3, 3, 4)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
