"""Operations on tensors against Pillow's on bytes."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from gradveil.transforms import STEPS, Step


def picture(seed=0, side=16):
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 4, 4, generator=rng)
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)
    return torch.round(smooth * 255) / 255


def to_pillow(images):
    return Image.fromarray(np.round(images[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8))


def from_pillow(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None] / 255


def rotated(image, angle):
    turned = image.convert("RGBA").rotate(angle)
    return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert("RGB")


def moved(image, rows, how):
    return image.transform(image.size, Image.Transform.AFFINE, rows, how, fillcolor=(0, 0, 0))


PILLOW = {
    "shear-x": lambda image, m, s: moved(image, (1, m * s, 0, 0, 1, 0), Image.Resampling.BICUBIC),
    "shear-y": lambda image, m, s: moved(image, (1, 0, 0, m * s, 1, 0), Image.Resampling.BICUBIC),
    "translate-x": lambda image, m, s: moved(image, (1, 0, m * image.width * s, 0, 1, 0), Image.Resampling.NEAREST),
    "translate-y": lambda image, m, s: moved(image, (1, 0, 0, 0, 1, m * image.height * s), Image.Resampling.NEAREST),
    "rotate": lambda image, m, s: rotated(image, m),
    "color": lambda image, m, s: ImageEnhance.Color(image).enhance(1 + m * s),
    "contrast": lambda image, m, s: ImageEnhance.Contrast(image).enhance(1 + m * s),
    "sharpness": lambda image, m, s: ImageEnhance.Sharpness(image).enhance(1 + m * s),
    "brightness": lambda image, m, s: ImageEnhance.Brightness(image).enhance(1 + m * s),
    "posterize": lambda image, m, s: ImageOps.posterize(image, round(m)),
    "solarize": lambda image, m, s: ImageOps.solarize(image, m),
    "autocontrast": lambda image, m, s: ImageOps.autocontrast(image),
    "equalize": lambda image, m, s: ImageOps.equalize(image),
    "invert": lambda image, m, s: ImageOps.invert(image),
}


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", [2, 9])
@pytest.mark.parametrize("name", list(PILLOW))
def test_it_does_what_pillow_does(name, level, sign):
    step, images = Step(name, level), picture(level)
    ours = step(images, torch.tensor([sign]))
    theirs = from_pillow(PILLOW[name](to_pillow(images), step.strength, sign))
    off = (ours - theirs).abs()
    assert off.median() <= 2.1 / 255  # bytes are rounded, and brightness is so twice
    assert (off > 3 / 255).float().mean() < 0.03  # a few pixels at the border of what was turned out of the picture


def test_every_image_has_its_own_sign():
    images = picture().expand(2, -1, -1, -1)
    both = Step("translate-x", 9)(images, torch.tensor([-1, 1]))
    assert torch.equal(both[:1], Step("translate-x", 9)(images[:1], torch.tensor([-1])))
    assert not torch.equal(both[0], both[1])


def test_the_fifty_are_there_with_the_published_strengths():
    assert len(STEPS) == 50
    assert {step.name for step in STEPS} <= set(PILLOW)
    assert STEPS[21] == Step("translate-x", 5)
    assert STEPS[3].strength == pytest.approx(150 / 331)
    assert STEPS[13].strength == pytest.approx(0.5 * 5 / 9)
    assert STEPS[37].strength == pytest.approx(256 * 5 / 9)


@pytest.mark.parametrize("name", ["shear-x", "shear-y", "translate-x", "translate-y", "rotate"])
def test_moves_are_undone_where_nothing_was_lost(name):
    images, sign, step = picture(side=32), torch.tensor([1]), Step(name, 4)
    there = step(images, sign)
    back = step.undone(there, sign)
    inner = (slice(None), slice(None), slice(12, 20), slice(12, 20))
    assert (back - images)[inner].abs().max() < 0.15
    assert (back - images)[inner].square().mean() < 0.1 * (there - images)[inner].square().mean()


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness", "invert"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_tones_are_undone_exactly(name, sign):
    images, signs = 0.4 + 0.2 * picture(), torch.tensor([sign])
    step = Step(name, 9)
    assert (step.undone(step(images, signs), signs) - images).abs().max() < 1e-3


@pytest.mark.parametrize("name", list(PILLOW))
def test_grey_and_flat_images_stay_finite_and_in_range(name):
    for images in (torch.full((2, 1, 8, 8), 0.5), torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)):
        out = Step(name, 9)(images, torch.ones(len(images)))
        assert out.shape == images.shape
        assert out.isfinite().all()
        assert out.min() >= 0
        assert out.max() <= 1
