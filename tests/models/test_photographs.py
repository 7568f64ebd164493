"""Pieces of photographs that come with an installation."""

import torch

from gradveil.models.photographs import _reduced, photographs


def test_photographs_are_cut_into_pieces_at_three_scales():
    colours, grey, two = (photographs((channels, 32, 32)) for channels in (3, 1, 2))
    assert colours.shape == (670, 3, 32, 32)
    assert grey.shape == (670, 1, 32, 32)
    assert torch.equal(two[:, 0], two[:, 1])
    assert 0 <= float(colours.min()) < 0.1 < 0.9 < float(colours.max()) <= 1
    assert photographs((3, 500, 700)).shape == (2, 3, 500, 700), "too large to be cut: enlarged"


def test_reducing_rounds_means_down():
    picture = torch.tensor([[[1, 2, 9], [3, 5, 9]]])
    assert _reduced(picture, 2).tolist() == [[[2]]]  # 11 / 4
