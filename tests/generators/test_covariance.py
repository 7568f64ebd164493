import torch

from gradveil.generators.covariance import normal_images


def some(count=30, shape=(1, 3, 2)):
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(count, 6, generator=rng) @ torch.randn(6, 6, generator=rng)
    return (0.5 + 0.1 * mixed).view(count, *shape)


def naive(images):
    """Return the covariance of Ledoit and Wolf, by loops over images."""
    flat = images.flatten(1).double()
    centred = flat - flat.mean(0)
    count, size = flat.shape
    sample = centred.T @ centred / count
    level = sample.trace() / size
    target = level * torch.eye(size).double()
    error = sum((torch.outer(row, row) - sample).square().sum() for row in centred) / count**2
    share = min(1.0, float(error / (sample - target).square().sum()))
    return (1 - share) * sample + share * target


def test_the_covariance_is_that_of_ledoit_and_wolf():
    for count in (4, 30):  # fewer and more images than pixels
        torch.testing.assert_close(normal_images(some(count)).covariance(), naive(some(count)))


def test_the_penalty_is_half_the_squared_mahalanobis_distance_per_pixel():
    images = some()
    found = normal_images(images)
    normal = torch.distributions.MultivariateNormal(found.mean, naive(images))
    expected = (normal.log_prob(found.mean) - normal.log_prob(images.flatten(1).double())) / 6
    torch.testing.assert_close(found.penalty(images.double()), expected)


def test_equal_images_leave_a_small_variance():
    found = normal_images(torch.full((5, 1, 2, 2), 0.5))
    assert bool(torch.isfinite(found.penalty(torch.rand(3, 1, 2, 2))).all())
