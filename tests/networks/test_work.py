import torch
from torch import nn

from gradveil.networks.work import work_per_example


def test_multiplications_are_counted_by_hand():
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5))
    # 3x3 positions of 3 * 2 * 3 * 3 weights, then 27 * 5
    assert work_per_example(network, torch.zeros(4, 2, 6, 6)) == 9 * 54 + 135


def test_each_image_size_has_its_own_count():
    network = nn.Conv2d(1, 1, 1)
    assert [work_per_example(network, torch.zeros(1, 1, side, side)) for side in (2, 3, 2)] == [4, 9, 4]
