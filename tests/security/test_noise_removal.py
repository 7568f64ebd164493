"""Nobody can take the noise off an update: the attack that did so in 0.1, and its control.

The control gives the defences the noise that they had, torch.randn, whatever its seed: then the attack must succeed.
"""

import numpy as np
import pytest
import torch

from gradveil.defences import Client
from gradveil.defences.dp_sgd import DpSgd
from gradveil.defences.parts.grid import grid_of
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from tests.security.noise import DEFENCES, IMAGES, LAYOUTS, STD, attacked, sent_by, twister_noise, victim


@pytest.mark.parametrize("name", DEFENCES)
def test_the_attack_takes_off_all_noise_of_torchs_generator(name):
    with twister_noise():
        before, after = attacked(name)
    assert before > 10
    assert after is not None
    assert after < 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DEFENCES)
def test_the_attack_fails_against_what_is_sent(name, layout):
    before, after = attacked(name, layout)
    assert before > 10
    assert after is None


@pytest.mark.parametrize("name", DEFENCES)
def test_where_the_gradient_is_zero_the_attack_looks_at_bare_noise(name):
    assert np.std(sent_by(DEFENCES[name])[0][:3840]) == pytest.approx(STD[name], rel=0.05)


@pytest.mark.parametrize("clip", [1.0, 0.3])
@pytest.mark.parametrize("noise", [0.2, 1.0, 4.0])
def test_every_entry_of_a_noisy_sum_is_on_the_grid(noise, clip):
    defence = DpSgd(noise=noise, clip=clip, sampling="shuffle")
    data = Batch(torch.rand(IMAGES, 1, 12, 12), torch.arange(IMAGES) % 3, torch.zeros(IMAGES) > 0)
    client = Client(0, 1, victim(), {}, data, {}, {}, SecretStream(0))
    gradient = {name: torch.zeros_like(p) for name, p in client.model.named_parameters()}
    for tensor in defence.on_gradient(gradient, data, client).values():
        steps = tensor.double() * IMAGES / grid_of(noise * clip, bound=clip)  # four images: the mean is exact too
        assert torch.equal(steps, steps.round())


def test_every_entry_of_a_noisy_update_is_on_the_grid():
    steps = sent_by(DEFENCES["pogz"])[0] / grid_of(STD["pogz"])
    assert np.array_equal(steps, np.round(steps))


def test_noise_tells_nothing_of_other_noise():
    """Noise of other clients, rounds and seeds is unrelated."""
    names = [(0, "client", 0, "round", 1), (0, "client", 0, "round", 2), (0, "client", 1, "round", 1),
             (0, "batches", 0, "round", 1), (1, "client", 0, "round", 1)]  # fmt: skip
    drawn = torch.stack([SecretStream(*name).normal((100_000,), torch.float64) for name in names])
    assert (torch.corrcoef(drawn) - torch.eye(len(names))).abs().max() < 5 / np.sqrt(100_000)
