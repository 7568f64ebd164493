import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Arrived, Client, build_defence
from gradveil.defences.quantise import Quantise
from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
GIVEN = {"a": torch.tensor([6.0, -1.0, 0.0, 2.9]), "b": torch.tensor([[1.0], [-3.0]])}
ROUNDED = {
    1: {"a": [2.475, -2.475, 0.0, 2.475], "b": [[2.0], [-2.0]]},
    2: {"a": [6.0, 0.0, 0.0, 0.0], "b": [[0.0], [-3.0]]},
    3: {"a": [6.0, -0.0, 0.0, 2.0], "b": [[1.0], [-3.0]]},  # levels -3..3 of 2 and of 1
}
floats = st.floats(-100, 100, width=32)


def rng(seed=0):
    return SecretStream(seed)


def client():
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, {}, {}, rng())


def quantise(tensor, generator=None, **how):
    return Quantise(**how).perturb({"w": tensor}, generator or rng())["w"]


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("where", ["update", "gradient"])
def test_worked_by_hand_at_both_places(bits, where):
    defence = build_defence(f"quantise:bits={bits},where={where}")
    update = defence.on_update(Update(GIVEN, 1, {"running_mean": torch.tensor([0.1, 5.0])}), client())
    gradient = defence.on_gradient(GIVEN, NO_BATCH, client())
    rounded, plain = (update.tensors, gradient) if where == "update" else (gradient, update.tensors)
    assert plain is GIVEN
    for name, expected in ROUNDED[bits].items():
        assert torch.allclose(rounded[name], torch.tensor(expected)), name
    assert torch.equal(update.buffers["running_mean"], torch.tensor([0.1, 5.0]))


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=20), st.integers(2, 16), st.booleans())
def test_rounding_moves_by_less_than_a_level_to_one_of_the_levels(values, bits, stochastic):
    tensor = torch.tensor(values, dtype=torch.float64)
    result = quantise(tensor, bits=bits, stochastic=stochastic)
    levels = 2 ** (bits - 1) - 1
    level = tensor.abs().max() / levels
    reach = level if stochastic else level / 2
    assert bool(((result - tensor).abs() <= reach * (1 + 1e-9)).all())
    if level > 0:
        numbers = result / level
        assert torch.allclose(numbers, numbers.round(), atol=1e-6)
        assert bool((numbers.abs() <= levels + 1e-6).all())
        assert len(set(numbers.round().tolist())) <= 2**bits - 1


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=20), st.booleans())
def test_one_bit_has_one_magnitude(values, stochastic):
    tensor = torch.tensor(values, dtype=torch.float64)
    result = quantise(tensor, stochastic=stochastic)
    scale = tensor.abs().max() if stochastic else tensor.abs().mean()
    assert torch.allclose(result.abs(), scale * ((tensor != 0) | stochastic))
    assert stochastic or torch.equal(result.sign(), tensor.sign() * (scale != 0))


@settings(deadline=None, max_examples=25)
@given(st.lists(floats, min_size=1, max_size=5), st.sampled_from([1, 2, 3, 8, 16]), st.integers(0, 99))
def test_stochastic_rounding_has_the_entry_as_its_mean(values, bits, seed):
    draws = 20_000
    tensor = torch.tensor(values, dtype=torch.float64)
    many = quantise(tensor.repeat(draws, 1), rng(seed), bits=bits, stochastic=True)
    width = tensor.abs().max() * 2 / max(2**bits - 2, 1)  # distance of two levels; the std is at most half of it
    assert bool(((many.mean(0) - tensor).abs() <= 6 * width / 2 / draws**0.5 + 1e-9).all())


def test_stochastic_rounding_draws_from_its_own_generator():
    tensor = torch.linspace(-1, 1, 50)
    one, same, other = (quantise(tensor, rng(seed), bits=2, stochastic=True) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("how", [{}, {"bits": 4}, {"stochastic": True}, {"bits": 4, "stochastic": True}])
def test_tiny_zero_empty_and_half(how):
    for tensor in (torch.zeros(3), torch.zeros(0), torch.tensor(1e-45), torch.tensor([3.0, 1.0]).half()):
        result = quantise(tensor, **how)
        assert result.shape == tensor.shape
        assert result.dtype == tensor.dtype
        assert bool(result.isfinite().all())
        assert bool((result == 0).all()) or bool(tensor.any())


def test_to_the_attacker_the_true_gradient_explains_all_that_it_saw():
    torch.manual_seed(0)
    true = {"a": torch.randn(3, 40), "b": torch.randn(3), "c": torch.zeros(3, 0)}
    defence = Quantise(bits=3)
    rows = [defence.perturb({name: tensor[t] for name, tensor in true.items()}, rng(t)) for t in range(3)]
    seen = {name: torch.stack([row[name] for row in rows]) for name in true}
    ((name, move),) = defence.adaptive(Arrived(seen, [0.1])).items()
    assert (name, move.distance, move.noise) == ("cell", "l2", {})
    assert all(torch.allclose(tensor, seen[key], atol=1e-6) for key, tensor in move.sent(true, seen).items())


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_to_the_attacker_rounding_at_random_is_noise_of_the_right_strength(bits):
    torch.manual_seed(123)  # not the seeds of the rounding
    true = {"a": torch.rand(2, 20_000) * 2 - 1, "b": torch.randn(2), "c": torch.zeros(2, 0)}
    defence = Quantise(bits=bits, stochastic=True)
    rows = [defence.perturb({name: tensor[t] for name, tensor in true.items()}, rng(t)) for t in range(2)]
    seen = {name: torch.stack([row[name] for row in rows]) for name in true}
    ((name, move),) = defence.adaptive(Arrived(seen, [0.1])).items()
    assert (name, move.distance, move.sent) == ("likelihood", "l2", None)
    spread = (seen["a"] - true["a"]).std().item()
    assert move.noise["a"] == pytest.approx(spread, rel=0.05 if bits > 1 else 0.3)  # an upper bound for one bit
    assert move.noise["a"] >= 0.99 * spread


def test_what_lies_outside_the_cell_counts():
    seen = {"w": torch.tensor([[3.0, 0.0, -1.0]])}  # levels of 1
    guess = torch.tensor([[3.2, 0.75, -3.0]], requires_grad=True)
    sent = Quantise(bits=3).adaptive(Arrived(seen, [1.0]))["cell"].sent({"w": guess}, seen)["w"]
    assert torch.allclose(sent, torch.tensor([[3.0, 0.25, -2.5]]))
    assert torch.autograd.grad(sent.sum(), guess)[0].tolist() == [[0, 1, 1]]


def test_one_bit_is_matched_by_soft_signs():
    seen = {"w": torch.tensor([[2.0, -2.0, 2.0], [0.5, 0.5, -0.5]]), "s": torch.tensor([1.0, 0.0])}
    guess = {"w": torch.tensor([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True), "s": torch.tensor([4.0, 5.0])}
    ((name, move),) = Quantise().adaptive(Arrived(seen, [1.0])).items()
    assert (name, move.distance) == ("sign", "cosine")
    sent = move.sent(guess, seen)
    assert torch.allclose(sent["w"], torch.tensor([[2 / 3, -1.0, 6 / 5], [0, 0, 0]]))
    assert torch.allclose(sent["s"], torch.tensor([0.5, 0.0]))
    assert bool(torch.autograd.grad(sent["w"].sum(), guess["w"])[0].isfinite().all())


@pytest.mark.parametrize("wrong", ["bits=0", "bits=17", "bits=1.5", "where=server"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"quantise:{wrong}")


def test_bits_are_whole():
    with pytest.raises(ConfigError, match=r"bits must be a whole number, got 1\.5"):
        Quantise(bits=1.5)
