import pytest
import torch
import torch.nn.functional as F

from gradveil.errors import ConfigError
from gradveil.generators import denoiser as module
from gradveil.generators.denoiser import train_denoiser, varied


def smooth(count, channels=1, side=8, seed=0):
    coarse = torch.rand(count, channels, 3, 3, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(coarse, (side, side), mode="bilinear")


def test_it_removes_noise_from_images_that_it_never_saw():
    denoiser, clean = train_denoiser(smooth(64), steps=150), smooth(40, seed=1)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(2))
    for level in (0.1, 0.4):
        found = denoiser(clean + level * noise, torch.full((40,), level))
        assert (found - clean).square().mean() < 0.5 * level**2


def test_the_same_images_give_the_same_weights_once_and_the_global_generator_is_left_alone(monkeypatch):
    before = torch.get_rng_state()
    first = train_denoiser(smooth(32), steps=3)
    assert train_denoiser(smooth(32), steps=3) is first
    monkeypatch.setattr(module, "_TRAINED", {})
    again, other = train_denoiser(smooth(32), steps=3), train_denoiser(smooth(32, seed=5), steps=3)
    assert torch.equal(before, torch.get_rng_state())
    state = first.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert not all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


def test_only_the_last_few_stay_in_memory(monkeypatch):
    monkeypatch.setattr(module, "_TRAINED", {})
    for seed in range(module._KEPT + 2):
        train_denoiser(smooth(32, seed=seed), steps=1)
    assert len(module._TRAINED) == module._KEPT


@pytest.mark.parametrize("shape", [(2, 1, 7, 9), (2, 3, 40, 33)])
def test_any_shape_is_denoised_and_large_images_are_cropped_in_training(shape):
    images = torch.rand(32, *shape[1:], generator=torch.Generator().manual_seed(0))
    denoiser = train_denoiser(images, steps=1)
    assert denoiser(torch.rand(shape), torch.full((2,), 0.2)).shape == shape
    assert varied(images, torch.Generator()).shape == (32, shape[1], min(shape[2], 32), min(shape[3], 32))


def test_too_few_images_are_refused():
    with pytest.raises(ConfigError, match="at least 32"):
        train_denoiser(smooth(31))
