import pytest
import torch

from gradveil.errors import ConfigError
from gradveil.generators.covariance import normal_images
from gradveil.runs.image_prior import FEWEST, image_prior
from gradveil.types import Batch


def batch(images, labels):
    return Batch(images, torch.as_tensor(labels), torch.zeros(len(images)) > 0)


def some(count, channels=1, seed=0):
    return torch.rand(count, channels, 2, 2, generator=torch.Generator().manual_seed(seed))


def test_pixels_vary_around_the_mean_of_their_channel():
    """Red pixels are 0 or 1, green ones 0.4 or 0.6."""
    images = torch.stack([torch.tensor([0.0, 0.4]), torch.tensor([1.0, 0.6])]).view(2, 2, 1, 1).expand(2, 2, 1, 3)
    found = image_prior(batch(images, [0, 1]))
    torch.testing.assert_close(found.white, torch.tensor([0.25] * 3 + [0.01] * 3).double())
    assert found.covariance is None  # two images do not tell how pixels vary together
    assert list(found.named) == ["white"]


def test_what_the_label_tells_does_not_count_as_variance():
    labels = torch.arange(400) % 2
    noise = 0.1 * (some(400) - 0.5)
    found = image_prior(batch(0.25 + 0.5 * labels.view(-1, 1, 1, 1) + noise, labels))
    within = 0.01 / 12  # variance of a uniform number, 0.1 wide
    torch.testing.assert_close(found.covariance.diagonal(), torch.full((4,), within).double(), rtol=0.1, atol=0)
    assert float(found.white.mean()) == pytest.approx(0.0625 + within, rel=0.05)
    mixed = image_prior(batch(0.25 + 0.5 * labels.view(-1, 1, 1, 1) + noise, torch.zeros(400, dtype=torch.long)))
    assert float(mixed.covariance.diagonal().mean()) == pytest.approx(0.0625 + within, rel=0.05)


def test_classes_with_few_images_share_a_mean():
    """With a mean image for each image, nothing would vary."""
    images = some(40, channels=3)
    alone = image_prior(batch(images, torch.arange(40))).covariance
    together = normal_images(images.double() - images.double().mean(0)).covariance() * 40 / 39
    torch.testing.assert_close(alone, together)


def test_a_covariance_needs_some_images_and_a_score_needs_public_ones():
    assert image_prior(batch(some(FEWEST - 1), [0] * (FEWEST - 1))).covariance is None
    covariance = image_prior(batch(some(FEWEST), [0] * FEWEST)).covariance
    assert bool((torch.linalg.eigvalsh(covariance) > 0).all())
    with pytest.raises(ConfigError, match="Add other test images, or --aux"):
        image_prior(batch(some(0), torch.zeros(0, dtype=torch.long)))
    with pytest.raises(ConfigError, match="public images whose pixels vary"):
        image_prior(batch(torch.full((20, 1, 2, 2), 0.5), [0] * 20))
