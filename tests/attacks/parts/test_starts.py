import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.attacks.parts.starts import begin
from gradveil.errors import ConfigError, ThreatModelError, UnknownNameError
from gradveil.models import Normalisation, create_model
from gradveil.networks.space import Space
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

SHAPE = (1, 10, 9)
AVERAGES = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(4, *SHAPE)


def look(*grants):
    network = create_model("mlp:hidden=3", SHAPE, 4, 0, Normalisation((0.25,), (0.5,)))
    private = [Batch(torch.rand(1, *SHAPE), torch.tensor([1]), torch.zeros(1) > 0)]
    public = Batch(torch.full((3, *SHAPE), 0.75), torch.zeros(3, dtype=torch.long), torch.zeros(3) > 0)
    seen = observe(
        network, private, threat=ThreatModel.of(*grants), num_classes=4, public=PublicKnowledge(public, AVERAGES)
    )
    return seen, Space(network, SHAPE, torch.zeros(1))


def first(start, *grants, labels=None, rows=3, seed=0):
    """Return the pixels of initial guesses, (rows, 2, C, H, W)."""
    seen, space = look(*grants)
    flat = begin(start, seen, labels, rows, 2, space, torch.Generator().manual_seed(seed))
    assert flat.shape == (rows, 2 * 90)
    return space.to_pixels(flat.view(rows, 2, *SHAPE))


def test_normal_is_standard_in_normalised_space():
    pixels = first("normal", rows=200)
    assert pixels.mean().item() == pytest.approx(0.25, abs=0.02)
    assert pixels.std().item() == pytest.approx(0.5, abs=0.02)


def test_uniform_fills_the_box():
    pixels = first("uniform", rows=100)
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    assert pixels.std().item() == pytest.approx(12**-0.5, abs=0.02)


def test_patterned_repeats_a_tile():
    pixels = first("patterned")
    assert torch.equal(pixels[..., 4:8, :], pixels[..., :4, :])
    assert torch.equal(pixels[..., 4:8], pixels[..., :4])
    assert not torch.equal(pixels[0], pixels[1])


def test_class_average_is_that_of_each_label():
    labels = torch.tensor([[0, 3], [1, 1], [2, 0]])
    pixels = first("class-average", "class-averages", labels=labels)
    assert torch.allclose(pixels, AVERAGES[labels], atol=1e-6)
    with pytest.raises(ThreatModelError, match="class-averages"):
        first("class-average", labels=labels)
    with pytest.raises(ConfigError, match="labels"):
        first("class-average", "class-averages")


def test_public_needs_its_grant():
    assert torch.allclose(first("public", "public-data"), torch.tensor(0.75))
    with pytest.raises(ThreatModelError, match="public-data"):
        first("public")


def test_grey_and_a_given_picture(tmp_path):
    assert torch.allclose(first("grey"), torch.tensor(0.5))
    Image.fromarray(np.full((10, 9), 51, np.uint8)).save(tmp_path / "fifth.png")
    assert torch.allclose(first(str(tmp_path / "fifth.png")), torch.tensor(0.2), atol=1e-6)
    Image.fromarray(np.full((30, 20, 3), 51, np.uint8)).save(tmp_path / "larger.png")
    assert torch.allclose(first(str(tmp_path / "larger.png")), torch.tensor(0.2), atol=1e-6)


def test_images_of_another_shape_are_refused():
    seen, space = look("class-averages")
    space.shape = (1, 9, 10)
    with pytest.raises(ConfigError, match="shape"):
        begin("class-average", seen, torch.zeros(1, 1, dtype=torch.long), 1, 1, space, torch.Generator())


def test_random_starts_follow_the_generator_and_unknown_ones_are_refused():
    for start in ("normal", "uniform", "patterned"):
        assert torch.equal(first(start, seed=1), first(start, seed=1))
        assert not torch.equal(first(start, seed=1), first(start, seed=2))
    with pytest.raises(UnknownNameError, match="normal"):
        first("nromal")
