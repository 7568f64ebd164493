import math

import pytest
import torch

from gradveil.defences import build_defence
from gradveil.defences.laplace import Laplace
from gradveil.errors import ConfigError
from tests.defences.noise_laws import ENTRIES, NoiseLaws, rng


class TestLaplace(NoiseLaws):
    name, strength, spread, distance = "laplace", "scale", math.sqrt(2), "l1"

    @pytest.mark.parametrize("where", ["update", "gradient"])
    def test_noise_has_its_moments_at_both_places(self, where):
        noise = self.noise(where)
        assert noise.mean().abs() < 5 * math.sqrt(2 / ENTRIES)
        assert abs(noise.abs().mean() - 1) < 5 / math.sqrt(ENTRIES)
        assert abs(noise.square().mean() - 2) < 5 * math.sqrt(20 / ENTRIES)
        assert abs((noise > math.log(2)).double().mean() - 0.25) < 5 * math.sqrt(0.1875 / ENTRIES)


def test_worked_by_hand():
    drawn = rng().laplace((2,), torch.float64)
    result = Laplace(scale=0.5).perturb({"a": torch.tensor([1.0, -2.1])}, rng())
    steps = torch.tensor([2.0**21, -math.floor(2.1 * 2**21)]) + (drawn * 2**20).round()  # a step is 0.5 / 2^20
    assert torch.equal(result["a"], (steps / 2**21).float())


@pytest.mark.parametrize("wrong", ["scale=0", "scale=-1", "scale=inf", "where=server"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"laplace:{wrong}")
