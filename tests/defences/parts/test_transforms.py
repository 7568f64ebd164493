"""Compare the operations on tensors with those of Pillow on bytes."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from gradveil.defences.parts.transforms import STEPS, Transform, filled


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
    step, images = Transform(name, level), picture(level)
    ours = step(images, torch.tensor([sign]))
    theirs = from_pillow(PILLOW[name](to_pillow(images), step.strength, sign))
    off = (ours - theirs).abs()
    assert off.median() <= 2.1 / 255  # bytes are rounded, and brightness twice
    assert (off > 3 / 255).float().mean() < 0.03  # a few pixels at the edge of the rotated picture


def test_every_image_has_its_own_sign():
    images = picture().expand(2, -1, -1, -1)
    both = Transform("translate-x", 9)(images, torch.tensor([-1, 1]))
    assert torch.equal(both[:1], Transform("translate-x", 9)(images[:1], torch.tensor([-1])))
    assert not torch.equal(both[0], both[1])


def test_the_fifty_are_there_with_the_published_strengths():
    assert len(STEPS) == 50
    assert {step.name for step in STEPS} <= set(PILLOW)
    assert STEPS[21] == Transform("translate-x", 5)
    assert STEPS[3].strength == pytest.approx(150 / 331)
    assert STEPS[13].strength == pytest.approx(0.5 * 5 / 9)
    assert STEPS[37].strength == pytest.approx(256 * 5 / 9)


def everywhere(images):
    return torch.ones_like(images[:, :1], dtype=torch.bool)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("name", ["shear-x", "shear-y", "translate-x", "translate-y", "rotate"])
def test_moves_are_undone_where_nothing_was_lost(name, sign):
    images, signs, step = picture(side=32), torch.tensor([sign]), Transform(name, 4)
    there = step(images, signs)
    back, known = step.undone(there, step.left(everywhere(images), signs), signs)
    assert 0.6 < known.float().mean() < 1
    inner = (..., slice(12, 20), slice(12, 20))
    assert known[inner].all()
    assert (back - images)[inner].abs().max() < 0.15
    off, before = ((shown - images)[known.expand_as(images)] for shown in (back, there))
    assert off.square().mean() < 0.1 * before.square().mean()
    lost = (~known).expand_as(images)
    assert torch.equal(back[lost], filled(back, known)[lost])


def test_a_pixel_is_known_if_it_never_left_the_picture():
    images, plus = picture(), torch.tensor([1])
    steps = [(Transform("translate-x", 9), plus), (Transform("translate-x", 5), -plus), (Transform("invert", 0), plus)]
    known, shown = everywhere(images), images
    for step, sign in steps:
        known, shown = step.left(known, sign), step(shown, sign)
    for step, sign in reversed(steps):
        shown, known = step.undone(shown, known, sign)
    columns = known[0, 0].all(0)  # 7 columns leave to the left; then 4 to the right, which are black already
    assert torch.equal(columns, torch.arange(16) >= 7)
    assert torch.equal(known, columns.expand_as(known))
    assert torch.allclose(shown[..., columns], images[..., columns])


def test_lost_pixels_are_filled_from_known_ones_of_the_same_image_and_channel():
    images, rng = torch.cat([picture(1), picture(2)]), torch.Generator().manual_seed(0)
    known = torch.rand(2, 1, 16, 16, generator=rng) < 0.5
    full = filled(images, known)
    for image in range(2):
        for channel in range(3):
            there = images[image, channel][known[image, 0]]
            assert torch.equal(full[image, channel][known[image, 0]], there)
            assert (full[image, channel][~known[image, 0]] == there.median()).all()
    assert (filled(images, ~everywhere(images)) == 0.5).all()


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness", "invert"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_tones_are_undone_exactly(name, sign):
    images, signs = 0.4 + 0.2 * picture(), torch.tensor([sign])
    step = Transform(name, 9)
    known = picture()[:, :1] < 0.5
    back, there = step.undone(step(images, signs), step.left(known, signs), signs)
    assert (back - images).abs().max() < 1e-3
    assert torch.equal(there, known)


@pytest.mark.parametrize("name", list(PILLOW))
def test_grey_and_flat_images_stay_finite_and_in_range(name):
    for images in (torch.full((2, 1, 8, 8), 0.5), torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)):
        out = Transform(name, 9)(images, torch.ones(len(images)))
        assert out.shape == images.shape
        assert out.isfinite().all()
        assert out.min() >= 0
        assert out.max() <= 1
