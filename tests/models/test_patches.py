"""Features of whitened patches of public pictures."""

import pytest
import torch

from gradveil.errors import ConfigError
from gradveil.models import Normalisation, create_model, normalisation_of
from gradveil.models.patches import CONTRAST, FLOOR, PatchTrunk, whitened_filters


def noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_features_are_those_of_a_loop_over_patches():
    pictures, image = noise(12, 2, 9, 9), noise(1, 2, 9, 9, seed=1)
    trunk = PatchTrunk(pictures, 5, 4, 2, 0.25, whiten=1e9)
    kernels, offsets = whitened_filters(pictures, 5, 4)
    cells = torch.zeros(10, 2, 2)
    for row in range(6):
        for column in range(6):
            patch = image[0, :, row : row + 4, column : column + 4]
            patch = (patch - patch.mean()) / (patch.var(unbiased=False) + CONTRAST).sqrt()
            answer = (kernels * patch).sum((1, 2, 3)) - offsets
            both = torch.cat([(answer - 0.25).relu(), (-answer - 0.25).relu()])
            cells[:, row // 3, column // 3] += both / 9
    expected = ((cells.flatten() + FLOOR).sqrt() - trunk.scaling.mean) / trunk.scaling.std
    assert torch.allclose(trunk.features(image)[0], expected, atol=3e-4), "half a step of rounding is 1.2e-4"


def test_filters_whiten_public_patches():
    pictures = noise(40, 1, 12, 12)
    kernels, offsets = whitened_filters(pictures, 30, 3)
    windows = pictures.unfold(2, 3, 1).unfold(3, 3, 1).reshape(-1, 9)
    windows = windows - windows.mean(1, keepdim=True)
    windows = windows / (windows.var(1, keepdim=True, unbiased=False) + CONTRAST).sqrt()
    answers = windows @ kernels.view(30, 9).T - offsets
    assert float(answers.mean(0).abs().max()) < 0.1
    assert 0.7 < float(answers.std(0).mean()) < 1.1, "unit filters on whitened patches"


def test_features_do_not_depend_on_the_images_beside_it():
    trunk, images = create_model("patches:filters=30", (1, 28, 28), 3, 0).trunk, noise(33, 1, 28, 28)
    together = trunk(images)
    assert all(torch.equal(trunk(images[some]), together[some]) for some in (slice(1), slice(7, 20), slice(16, 33)))


def test_features_of_an_even_image_have_a_bounded_slope():
    trunk = create_model("patches:filters=4", (1, 12, 12), 3, 0).trunk
    image = torch.zeros(1, 1, 12, 12, requires_grad=True)
    (slope,) = torch.autograd.grad(trunk(image).sum(), image)
    assert bool(slope.isfinite().all())


def test_public_pictures_decide_the_trunk_and_its_fingerprint():
    usual = create_model("patches:filters=4", (1, 12, 12), 3, 0)
    again = create_model("patches:filters=4", (1, 12, 12), 3, 5)
    other = create_model("patches:filters=4", (1, 12, 12), 3, 0, public=noise(9, 1, 12, 12))
    assert usual.trunk.fingerprint == again.trunk.fingerprint != other.trunk.fingerprint
    assert torch.equal(usual.trunk.kernels, again.trunk.kernels)
    pinned = f"patches:filters=4,sha256={usual.trunk.fingerprint[:16]}"
    create_model(pinned, (1, 12, 12), 3, 0)
    with pytest.raises(ConfigError, match="must have the fingerprint"):
        create_model(pinned, (1, 12, 12), 3, 0, public=noise(9, 1, 12, 12))


def test_it_takes_pixels_without_a_normalisation():
    assert normalisation_of(create_model("patches:filters=4", (1, 12, 12), 3, 0, Normalisation((0.5,), (0.5,)))) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("patches:size=1", "size must be"),
        ("patches:grid=99", "grid must be at most 7"),
        ("patches:threshold=-1", "threshold must be"),
        ("patches:whiten=0", "whiten must be"),
        ("patches:filters=10001", "filters must be"),
    ],
)
def test_bad_settings(spec, message):
    with pytest.raises(ConfigError, match=message):
        create_model(spec, (1, 12, 12), 3, 0)


def test_more_filters_than_patches_are_refused():
    with pytest.raises(ConfigError, match="at most the 9 patches"):
        create_model("patches:filters=10", (1, 8, 8), 3, 0, public=noise(1, 1, 8, 8))
