import numpy as np
import torch

from gradveil.generators import principal_components


def test_it_has_the_mean_and_the_covariance_of_the_images():
    rng = torch.Generator().manual_seed(0)
    images = 0.5 + 0.05 * torch.randn(40, 1, 3, 2, generator=rng)
    network = principal_components(images, latent=6)
    mean = network(torch.zeros(1, 6))[0]
    assert torch.allclose(mean, images.mean(0), atol=1e-6)
    directions = network(torch.eye(6)).flatten(1) - mean.flatten()  # (6, pixels)
    covariance = np.cov(images.flatten(1).numpy().T)
    assert np.allclose((directions.T @ directions).numpy(), covariance, atol=1e-6)


def test_fewer_directions_are_those_of_greatest_variance_and_images_stay_in_range():
    images = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    all_, two = (principal_components(images, latent) for latent in (16, 2))
    assert two.latent == 2
    assert torch.allclose(two(torch.eye(2)), all_(torch.eye(16)[:2]), atol=1e-6)
    wild = two(100 * torch.randn(5, 2))
    assert wild.min() == 0
    assert wild.max() == 1


def test_a_single_image_is_the_only_output():
    image = torch.rand(1, 1, 4, 4)
    network = principal_components(image, 8)
    assert torch.allclose(network(torch.randn(3, network.latent)), image.expand(3, -1, -1, -1))
