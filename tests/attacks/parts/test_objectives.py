import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks.parts.objectives import SLICES, Objective, sliced_wasserstein
from gradveil.errors import UnknownNameError


def pair(targets=3, seed=0):
    rng = torch.Generator().manual_seed(seed)

    def one():
        return {
            "w": torch.randn(targets, 2, 3, generator=rng).double(),
            "b": torch.randn(targets, generator=rng).double(),
        }

    return one(), one()


def joined(tensors, target):
    return torch.cat([tensor[target].reshape(-1) for tensor in tensors.values()])


@given(st.integers(0, 50))
def test_values_equal_those_of_one_long_vector(seed):
    guess, target = pair(seed=seed)
    for t in range(3):
        a, b = joined(guess, t), joined(target, t)
        assert Objective("l2")(guess, target)[t].item() == pytest.approx((a - b).square().sum().item())
        assert Objective("l1")(guess, target)[t].item() == pytest.approx((a - b).abs().sum().item())
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        assert Objective("cosine")(guess, target)[t].item() == pytest.approx(1 - cosine)


@pytest.mark.parametrize("kind", ["l2", "l1", "cosine"])
def test_weights_and_masks_leave_entries_out(kind):
    guess, target = pair()
    spoiled = {**target, "b": target["b"] + 100}
    assert torch.allclose(
        Objective(kind, weights={"b": 0})(guess, target), Objective(kind, weights={"b": 0})(guess, spoiled)
    )
    assert not torch.allclose(Objective(kind)(guess, target), Objective(kind)(guess, spoiled))
    mask = torch.ones(3, 2, 3).double()
    mask[:, 0] = 0
    changed = {**target, "w": target["w"].clone()}
    changed["w"][:, 0] += 5
    masked = Objective(kind, masks={"w": mask})
    assert torch.allclose(masked(guess, target), masked(guess, changed))


def test_cosine_of_a_zero_gradient_is_finite():
    guess, target = pair()
    zero = {name: torch.zeros_like(tensor) for name, tensor in guess.items()}
    assert Objective("cosine")(zero, target).tolist() == pytest.approx([1, 1, 1])


def test_unknown_kind():
    with pytest.raises(UnknownNameError, match="cosine"):
        Objective("cosin")


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 20))
def test_grnns_distances(seed):
    guess, target = pair(seed=seed)
    square = Objective("l2")(guess, target)
    assert torch.allclose(Objective("l2+norm")(guess, target), square + square.sqrt())
    apart = sum(
        sliced_wasserstein(a, b)
        for a, b in ((guess["w"], target["w"]), (guess["b"][:, None, None], target["b"][:, None, None]))
    )
    assert torch.allclose(Objective("l2+sliced")(guess, target), square + apart)
    half = Objective("l2+sliced", weights={"b": 0.0, "w": 0.5})(guess, target)
    only = (guess["w"] - target["w"]).flatten(1).square().sum(1) + sliced_wasserstein(guess["w"], target["w"])
    assert torch.allclose(half, only / 2)


def test_the_sliced_distance_against_a_loop_and_its_laws():
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 5, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    directions = torch.randn(3, SLICES, generator=torch.Generator().manual_seed(0)).double()
    for target in range(2):
        squares = []
        for direction in (directions / directions.norm(dim=0)).T:
            a, b = (sorted((cloud[target] @ direction).tolist()) for cloud in (first, second))
            squares.append(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 5)
        expected = (sum(squares) / SLICES) ** 0.5
        assert sliced_wasserstein(first, second)[target].item() == pytest.approx(expected)
    shuffled = first[:, torch.randperm(5, generator=rng)]
    assert sliced_wasserstein(first, shuffled).max() < 1e-9  # clouds have no order
    line = first[..., :1]
    moved = sliced_wasserstein(line, line + 0.3)
    assert torch.allclose(moved, torch.full_like(moved, 0.3))
