"""Moved copies stay close to the picture, in [0, 1], and come from the generator alone."""

import torch

from gradveil.attacks.parts.augmentation import moved


def test_copies_move_a_little_and_stay_pictures():
    rng = torch.Generator().manual_seed(0)
    images = torch.zeros(50, 1, 16, 16)
    images[:, :, 6:10, 6:10] = 1
    copies = moved(images, rng)
    assert copies.shape == images.shape
    assert copies.min() >= 0
    assert copies.max() <= 1
    assert not torch.allclose(copies[0], copies[1])
    rows = torch.arange(16.0)
    centre = (copies.sum(3) * rows).sum(2) / copies.sum((2, 3))
    assert ((centre - 7.5).abs() < 2.5).all()
    assert (centre - 7.5).abs().max() > 0.3


def test_a_plain_picture_has_no_border_and_equal_draws_give_equal_copies():
    grey = torch.full((3, 3, 8, 8), 0.4)
    assert torch.allclose(moved(grey, torch.Generator().manual_seed(1)), grey, atol=1e-6)
    noise = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    one, two = (moved(noise, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
