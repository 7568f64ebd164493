import io

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.report.pictures import GAP, strip_png


def drawn(images, **more):
    return np.asarray(Image.open(io.BytesIO(strip_png(images, **more))))


def test_images_are_placed_side_by_side_with_enlarged_pixels():
    images = torch.tensor([0.0, 1.0, 0.2, 0.4]).view(2, 1, 2, 1)
    picture = drawn(images, height=4)
    assert picture.shape == (4, 2 + GAP + 2, 3)
    assert (picture[:, :2, 0] == np.array([0, 0, 255, 255])[:, None]).all()
    assert (picture[:, 2 + GAP :, 1] == np.array([51, 51, 102, 102])[:, None]).all()
    assert (picture[:, 2 : 2 + GAP] == 255).all()


@pytest.mark.parametrize("side", [1, 8, 28, 100, 128, 200])
def test_pictures_are_at_least_as_tall_as_asked_and_never_shrunk(side):
    assert drawn(torch.rand(1, 3, side, side)).shape[0] >= max(128, side)


def test_images_with_other_numbers_of_channels_get_one_line_per_channel():
    picture = drawn(torch.tensor([0.0, 0.2]).view(1, 2, 1, 1), height=1)
    assert picture[:, 0, 0].tolist() == [0, 255, 255, 51]


def test_a_missing_guess_is_shown_as_a_chequerboard():
    images = torch.rand(2, 1, 8, 8)
    images[1, 0, 3, 3] = torch.nan
    picture = drawn(images)[:, 128 + GAP :, 0]
    assert sorted(set(picture.flatten().tolist())) == [153, 204]
    assert picture[0, 0] != picture[0, 16]
