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
    generator = rng()
    plus, minus = (torch.empty(2).exponential_(generator=generator) for _ in range(2))
    result = Laplace(scale=0.5).perturb({"a": torch.tensor([1.0, 2.0])}, rng())
    assert torch.equal(result["a"], torch.tensor([1.0, 2.0]) + 0.5 * (plus - minus))


@pytest.mark.parametrize("wrong", ["scale=0", "scale=-1", "scale=inf", "where=server"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"laplace:{wrong}")
