import re

import pytest
import torch

from gradveil.metrics import MetricUnavailable
from gradveil.metrics.lpips_vgg import LpipsVgg
from tests.metrics.conftest import random_heads, random_trunk
from tests.metrics.naive_lpips import naive_lpips


@pytest.fixture
def pair():
    rng = torch.Generator().manual_seed(6)
    return torch.rand(2, 2, 3, 16, 20, generator=rng).unbind(0)


@pytest.mark.usefixtures("with_weights")
def test_equals_a_plain_transcription(pair):
    same = {"padding": 1}
    plan = [
        (0, same), (2, same), "compare", (2, 2), (5, same), (7, same), "compare", (2, 2),
        (10, same), (12, same), (14, same), "compare", (2, 2), (17, same), (19, same), (21, same), "compare", (2, 2),
        (24, same), (26, same), (28, same), "compare",
    ]  # fmt: skip
    expected = naive_lpips(random_trunk(LpipsVgg) | random_heads(LpipsVgg), plan, *pair)
    torch.testing.assert_close(LpipsVgg()(*pair), expected, rtol=1e-4, atol=1e-6)


def test_the_layers_are_those_of_torchvision_up_to_the_last_relu():
    shapes = {index: layer.weight.shape for index, layer in enumerate(LpipsVgg.layers()) if hasattr(layer, "weight")}
    assert list(shapes) == [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    assert [shape[0] for shape in shapes.values()] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert len(LpipsVgg.layers()) == 30


def test_16_pixels_is_the_smallest_side_of_the_trunk():
    trunk = torch.nn.Sequential(*LpipsVgg.layers())
    assert trunk(torch.zeros(1, 3, 16, 16)).shape == (1, 512, 1, 1)
    with pytest.raises(RuntimeError, match="too small"):
        trunk(torch.zeros(1, 3, 15, 16))


def test_heads_and_trunk_in_two_files_of_torch(tmp_path, with_weights, pair):
    torch.save(random_heads(LpipsVgg), tmp_path / "vgg.pth")
    torch.save(random_trunk(LpipsVgg), tmp_path / "vgg16.pth")
    split = LpipsVgg(weights=str(tmp_path / "vgg.pth"), trunk=str(tmp_path / "vgg16.pth"))
    assert torch.equal(split(*pair), LpipsVgg()(*pair))


def test_missing_weights_say_where_to_put_them(without_weights, pair):
    place = without_weights / "weights" / "lpips_vgg_v0.1.safetensors"
    with pytest.raises(MetricUnavailable, match=re.escape(str(place)) + ".*vgg.pth,trunk=PATH/vgg16-397923af.pth"):
        LpipsVgg()(*pair)
