"""Sums of whole numbers modulo a power of two."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.config import TrainSettings
from gradveil.engines.run_folder import settings_hash
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.federated.secure_sum import Quantiser, secure_sum
from gradveil.types import Update


def updates(count, seed=0, scale=0.1):
    rng = torch.Generator().manual_seed(seed)
    return [
        Update({"w": scale * torch.randn(3, 2, generator=rng)}, 5, {"b": torch.rand(2, generator=rng)})
        for _ in range(count)
    ]


def exact(some, weights, name):
    return sum(one.tensors.get(name, one.buffers.get(name)).double() * w for one, w in zip(some, weights, strict=True))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(4, 30))
def test_the_sum_is_off_by_half_a_step_per_client_at_most(count, bits):
    some, how = updates(count), Quantiser(bits, 2.0)
    weights = [1 / (k + 1) for k in range(count)]
    found = secure_sum(some, weights, how)
    assert found.clipped == 0
    assert found.total.num_examples == 5 * count
    for name, tensor in {**found.total.tensors, **found.total.buffers}.items():
        assert float((tensor - exact(some, weights, name)).abs().max()) <= how.step / 2 * count + 1e-9


def test_clipping_and_the_loss_are_measured():
    some = [Update({"w": torch.tensor([3.0, 0.5])}, 1), Update({"w": torch.tensor([0.0, 0.25])}, 1)]
    found = secure_sum(some, [1.0, 1.0], Quantiser(8, 1.0))
    assert found.total.tensors["w"].tolist() == [1.0, 0.75]
    assert found.clipped == 0.25
    assert found.error == pytest.approx(2 / np.hypot(3, 0.75))
    assert secure_sum([Update({"w": torch.zeros(2)}, 1)], [1.0], Quantiser(8, 1.0)).error == 0


def test_it_agrees_with_flowers_quantisation():
    values = np.linspace(-2, 2, 41)
    theirs = dequantize(quantize([values], 1.5, 2**10), 1.5, 2**10)[0]
    how = Quantiser(10, 1.5)
    ours = how.decode(how.encode(torch.from_numpy(values)), 1).numpy()
    assert np.abs(ours - theirs).max() <= how.step + 1e-12


def test_the_modulus_has_room_for_every_client():
    assert Quantiser(22, 8.0).modulus(1000) == 2**32
    assert Quantiser(22, 8.0).modulus(5000) == 2**35
    assert Quantiser(8, 1.0).modulus(4) > 4 * 2**8


def test_a_training_adds_whole_numbers_and_states_the_loss(tiny):
    models = {}
    for bits in (0, 6, 30):
        how = replace(tiny, aggregation="secure", sum_bits=bits, save_rounds=(2,))
        with Simulation(how, workers=0) as simulation:
            row, _ = simulation.step(1)
            before = simulation.model
            row, played = simulation.step(2)
            models[bits] = simulation.model
        assert ("sum_error" in row) == bool(bits)
        moved = {name: before[name].double() + played.mean.tensors[name].double() for name in before}
        assert all(torch.allclose(moved[name].float(), tensor, atol=1e-6) for name, tensor in models[bits].items())
        if bits:
            assert row["sum_clipped"] == 0
            assert (row["sum_error"] < 1e-5) == (bits == 30)
    assert torch.allclose(models[0]["linear.weight"], models[30]["linear.weight"], atol=1e-6)
    assert not torch.allclose(models[0]["linear.weight"], models[6]["linear.weight"], atol=1e-3)


def test_whole_numbers_need_secure_aggregation():
    with pytest.raises(ConfigError, match="sum_bits is for sums under secure aggregation, got 8"):
        TrainSettings(sum_bits=8)
    with pytest.raises(ConfigError, match="sum_range must be"):
        TrainSettings(sum_range=0.0)


def test_more_rounds_under_veil_are_another_run():
    """Its noise is planned for all rounds: longer training with the first rounds' noise would break the guarantee."""
    hashes = [settings_hash(TrainSettings(rounds=n, defence=d)) for d in ("veil", "none") for n in (5, 9)]
    assert hashes[0] != hashes[1]
    assert hashes[2] == hashes[3]
