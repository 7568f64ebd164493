import pytest
import torch
from torch.distributions import Normal, kl_divergence

from gradveil.attacks.parts.makers import Latents
from gradveil.generators import Latent


class Told(Latent):
    """A generator that returns its inputs."""

    conditional = True

    def forward(self, latents, labels=None):
        self.labels = labels
        return latents.view(-1, 1, 1, self.latent)


def test_each_image_has_its_own_latents_and_label():
    generator = Told(3)
    maker = Latents(generator, 2, squash=False, divergence=0.0)
    flat = maker.begin(4, torch.Generator().manual_seed(0))
    labels = torch.arange(8).view(4, 2)
    images = maker.pictures(flat, labels)
    assert torch.equal(images.flatten(), flat.flatten())
    assert torch.equal(generator.labels, torch.arange(8))
    assert maker.penalty(flat, images).tolist() == [0] * 4


def test_the_penalty_is_the_divergence_from_the_standard_normal():
    maker = Latents(Told(50), 2, squash=False, divergence=0.3)
    flat = 1.7 * torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) + 0.4
    halves = flat.view(6, 50)
    apart = [kl_divergence(Normal(half.mean(), half.std(correction=0)), Normal(0.0, 1.0)).item() for half in halves]
    expected = [0.3 * (apart[2 * row] + apart[2 * row + 1]) / 2 for row in range(3)]
    assert maker.penalty(flat, flat).tolist() == pytest.approx(expected, rel=1e-4)


def test_squashed_latents_stay_inside_one():
    maker = Latents(Told(4), 1, squash=True, divergence=1.0)
    flat = torch.tensor([[-9.0, 0.0, 0.5, 9.0]])
    assert torch.equal(maker.pictures(flat, torch.zeros(1, 1)).flatten(), flat.tanh().flatten())
    assert maker.penalty(flat, flat).item() == 0
