import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Client, build_defence
from gradveil.defences.laplace import Laplace
from gradveil.errors import ConfigError
from gradveil.types import Batch, Update

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
ENTRIES = 200_000


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def client():
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, {}, {}, rng())


def test_worked_by_hand():
    generator = rng()
    plus, minus = (torch.empty(2).exponential_(generator=generator) for _ in range(2))
    result = Laplace(scale=0.5).perturb({"a": torch.tensor([1.0, 2.0])}, rng())
    assert torch.equal(result["a"], torch.tensor([1.0, 2.0]) + 0.5 * (plus - minus))


@pytest.mark.parametrize("where", ["update", "gradient"])
def test_noise_has_its_moments_at_both_places(where):
    defence = build_defence(f"laplace:scale=0.02,where={where}")
    tensors, buffers = {"w": torch.full((ENTRIES,), 3.0)}, {"running_mean": torch.ones(2)}
    update = defence.on_update(Update(tensors, 1, buffers), client())
    gradient = defence.on_gradient(tensors, NO_BATCH, client())
    noisy, plain = (update.tensors, gradient) if where == "update" else (gradient, update.tensors)
    assert plain is tensors
    assert torch.equal(update.buffers["running_mean"], torch.ones(2))
    noise = (noisy["w"] - 3.0) / 0.02
    assert noise.mean().abs() < 5 * math.sqrt(2 / ENTRIES)
    assert abs(noise.abs().mean() - 1) < 5 / math.sqrt(ENTRIES)
    assert abs(noise.square().mean() - 2) < 5 * math.sqrt(20 / ENTRIES)
    assert abs((noise > math.log(2)).double().mean() - 0.25) < 5 * math.sqrt(0.1875 / ENTRIES)


def test_relative_noise_is_in_units_of_the_whole_update():
    tensors = {"a": torch.full((ENTRIES,), 3.0), "b": torch.full((ENTRIES,), -4.0)}
    result = Laplace(scale=0.1, relative=True).perturb(tensors, rng())
    for name, tensor in tensors.items():
        assert abs((result[name] - tensor).std() / (0.1 * math.sqrt(2 * 12.5)) - 1) < 0.01
    assert not Laplace(relative=True).perturb({"w": torch.zeros(3)}, rng())["w"].any()
    assert Laplace(relative=True).perturb({}, rng()) == {}


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([(), (1,), (0,), (3, 2), (17,)]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(0, 9),
)
def test_every_shape_and_type_gets_its_noise_and_the_seed_decides(shape, dtype, seed):
    tensors = {"a": torch.ones(shape, dtype=dtype), "b": torch.ones(5)}
    one, same, other = (Laplace(scale=1.0).perturb(tensors, rng(s)) for s in (seed, seed, seed + 1))
    assert one["a"].shape == shape
    assert one["a"].dtype == dtype
    assert all(torch.equal(one[name], same[name]) for name in tensors)
    assert bool((one["b"] != tensors["b"]).all())
    assert not torch.equal(one["b"], other["b"])


@pytest.mark.parametrize("where", ["update", "gradient"])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("steps", [[0.5], [0.1, 0.3, 0.2]])
def test_the_attacker_knows_the_noise_in_what_it_sees(where, relative, steps):
    defence = Laplace(where=where, scale=0.4, relative=relative)
    gradient = {"w": torch.full((ENTRIES,), 2.0), "b": torch.full((ENTRIES,), -2.0)}
    generator = rng(1)
    change = dict.fromkeys(gradient, torch.zeros(()))
    for length in steps:
        step = defence.perturb(gradient, generator) if where == "gradient" else gradient
        change = {name: change[name] - length * step[name] for name in gradient}
    if where == "update":
        change = defence.perturb(change, generator)
    seen = {name: torch.stack([tensor, 0 * tensor]) / -sum(steps) for name, tensor in change.items()}
    targets = seen if relative else {name: tensor[:1] for name, tensor in seen.items()}
    ((name, move),) = defence.adaptive(targets, steps).items()
    assert (name, move.distance, move.sent) == ("likelihood", "l1", None)
    for key in gradient:
        assert abs(float((seen[key][0] - gradient[key]).std()) / move.noise[key] - 1) < 0.02


def test_the_noise_is_positive_and_finite_whatever_is_seen():
    for seen in ({"w": torch.zeros(2, 3)}, {"w": torch.full((2, 3), math.inf)}, {"w": torch.zeros(2, 0)}):
        for steps in ([1.0], [0.0]):
            for defence in (Laplace(relative=True), Laplace(), Laplace(where="gradient")):
                noise = defence.adaptive(seen, steps)["likelihood"].noise
                assert noise.keys() == seen.keys()
                assert all(0 < value < math.inf for value in noise.values())
    assert Laplace(relative=True).adaptive({}, [1.0])["likelihood"].noise == {}


@pytest.mark.parametrize("wrong", ["scale=0", "scale=-1", "scale=inf", "where=server"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"laplace:{wrong}")
