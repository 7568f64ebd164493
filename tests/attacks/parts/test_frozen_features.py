"""Images behind frozen features."""

import pytest
import torch

from gradveil.attacks.linear import Linear
from gradveil.attacks.parts.frozen_features import features_of, head_of
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run


def look(targets, size):
    rng = torch.Generator().manual_seed(0)
    coarse = torch.rand(targets * size, 1, 4, 4, generator=rng)
    images = torch.nn.functional.interpolate(coarse, (16, 16), mode="bilinear").view(targets, size, 1, 16, 16)
    network = create_model("patches:filters=40", (1, 16, 16), 4, 0).eval()
    private = [Batch(some, torch.arange(size) % 4, torch.zeros(size) > 0) for some in images]
    return images, observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=4)


def test_the_gradient_of_one_image_tells_its_features():
    images, seen = look(3, 1)
    assert head_of(seen.network) == "head"
    found = features_of(seen.updates["head.weight"])
    assert torch.allclose(found, seen.network.trunk(images[:, 0]), atol=1e-5)


def test_the_gradient_of_two_images_with_errors_alike_tells_the_mean_of_their_features():
    feature = torch.rand(2, 9, generator=torch.Generator().manual_seed(0))
    feature[:, -1] = 0.3
    error = torch.tensor([0.25, -0.75, 0.5])
    found = features_of((error[:, None] * feature.sum(0))[None])
    assert torch.allclose(found[0], feature.mean(0))


def test_no_gradient_is_no_feature():
    assert features_of(torch.zeros(1, 3, 5)).isnan().all()


def test_linear_finds_a_single_image_behind_frozen_features():
    images, seen = look(2, 1)
    found = run(Linear(), seen)
    blind = psnr(images[:, 0], torch.full_like(images[:, 0], 0.5))
    assert (psnr(images[:, 0], found.images[:, 0]) > blind + 3).all()
    assert found.why == ("", "")


def test_linear_says_that_a_batch_is_mixed():
    _, seen = look(1, 3)
    found = run(Linear(), seen)
    assert found.images[0, 0].isfinite().all()
    assert found.images[0, 1:].isnan().all()
    assert found.why == ("1 guess for 3 images, from a mixture of their features",)
    assert not found.converged.any()


@pytest.mark.parametrize("model", ["mlp", "lenet5"])
def test_other_networks_have_no_such_head(model):
    assert head_of(create_model(model, (1, 28, 28), 10, 0)) is None
