"""Laws of additive noise of any distribution, inherited by the tests of each noise defence."""

import math

import pytest
import torch
from torch import nn

from gradveil.defences import Arrived, Client, build_defence
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
ENTRIES = 200_000


def rng(seed=0):
    return SecretStream(seed)


def client():
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, {}, {}, rng())


class NoiseLaws:
    """The laws; a subclass sets the attributes.

    Attributes:
        name: name of the defence.
        strength: name of the setting for the strength of the noise.
        spread: standard deviation of noise of strength 1.
        distance: distance that corresponds to the likelihood of the noise.
    """

    name: str
    strength: str
    spread: float
    distance: str

    def make(self, strength=1e-2, **settings):
        more = "".join(f",{key}={value}" for key, value in settings.items())
        return build_defence(f"{self.name}:{self.strength}={strength}{more}")

    def noise(self, where):
        """Return many draws of noise of strength 1; check that noise is added only where ``where`` says."""
        defence = self.make(0.02, where=where)
        tensors, buffers = {"w": torch.full((ENTRIES,), 3.0)}, {"running_mean": torch.ones(2)}
        update = defence.on_update(Update(tensors, 1, buffers), client())
        gradient = defence.on_gradient(tensors, NO_BATCH, client())
        noisy, plain = (update.tensors, gradient) if where == "update" else (gradient, update.tensors)
        assert plain is tensors
        assert torch.equal(update.buffers["running_mean"], torch.ones(2))
        return (noisy["w"] - 3.0) / 0.02

    def test_relative_noise_is_in_units_of_the_whole_update(self):
        tensors = {"a": torch.full((ENTRIES,), 3.0), "b": torch.full((ENTRIES,), -4.0)}
        result = self.make(0.1, relative=True).perturb(tensors, rng())
        for name, tensor in tensors.items():
            assert abs((result[name] - tensor).std() / (0.1 * self.spread * math.sqrt(12.5)) - 1) < 0.01
        assert not self.make(relative=True).perturb({"w": torch.zeros(3)}, rng())["w"].any()
        assert self.make(relative=True).perturb({}, rng()) == {}

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (17,)])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("seed", [0, 7])
    def test_every_shape_and_type_gets_its_noise_and_the_seed_decides(self, shape, dtype, seed):
        tensors = {"a": torch.ones(shape, dtype=dtype), "b": torch.ones(5)}
        one, same, other = (self.make(1.0).perturb(tensors, rng(s)) for s in (seed, seed, seed + 1))
        assert one["a"].shape == shape
        assert one["a"].dtype == dtype
        assert all(torch.equal(one[name], same[name]) for name in tensors)
        assert bool((one["b"] != tensors["b"]).all())
        assert not torch.equal(one["b"], other["b"])

    @pytest.mark.parametrize("where", ["update", "gradient"])
    @pytest.mark.parametrize("relative", [False, True])
    @pytest.mark.parametrize("steps", [[0.5], [0.1, 0.3, 0.2]])
    def test_the_attacker_knows_the_noise_in_what_it_sees(self, where, relative, steps):
        defence = self.make(0.4, where=where, relative=relative)
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
        ((name, move),) = defence.adaptive(Arrived(targets, steps)).items()
        assert (name, move.distance, move.sent) == ("likelihood", self.distance, None)
        for key in gradient:
            assert abs(float((seen[key][0] - gradient[key]).std()) / move.noise[key] - 1) < 0.02

    def test_the_noise_is_positive_and_finite_whatever_is_seen(self):
        for seen in ({"w": torch.zeros(2, 3)}, {"w": torch.full((2, 3), math.inf)}, {"w": torch.zeros(2, 0)}):
            for steps in ([1.0], [0.0]):
                for defence in (self.make(relative=True), self.make(), self.make(where="gradient")):
                    noise = defence.adaptive(Arrived(seen, steps))["likelihood"].noise
                    assert noise.keys() == seen.keys()
                    assert all(0 < value < math.inf for value in noise.values())
        assert self.make(relative=True).adaptive(Arrived({}, [1.0]))["likelihood"].noise == {}
