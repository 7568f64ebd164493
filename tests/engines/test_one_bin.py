import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradveil.engines.one_bin import ramps, twins

RNG = torch.Generator().manual_seed(0)
IMAGES = torch.rand(200, 30, generator=RNG)
ROWS = torch.randn(8, 30, generator=RNG)


@given(st.floats(-3, 3), st.floats(0.001, 0.05), st.floats(0.1, 5))
def test_a_narrow_ramp_is_found_wherever_it_lies_among_the_images(at, width, scale):
    outputs = torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    few = min(int((outputs < at).sum()), int((outputs > at + width).sum()))
    found = ramps(outputs, scale * (outputs - at).clamp(0, width))
    assert found == ([0] if few >= 3 else [])


@pytest.mark.parametrize(
    "act", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Tanh(), nn.Hardtanh(), nn.Identity(), nn.ReLU6(), nn.GELU()]
)
def test_usual_activations_are_no_ramps(act):
    outputs = torch.randn(300, 20, generator=torch.Generator().manual_seed(1))
    assert ramps(outputs, act(outputs)) == []


def test_a_row_that_one_image_activates_or_that_is_dead_is_no_ramp():
    outputs = torch.randn(100, 2, generator=torch.Generator().manual_seed(1)) - 10
    outputs[3, 0] = 1.0
    assert ramps(outputs, outputs.relu()) == []


def test_a_few_images_show_nothing():
    outputs = torch.tensor([[-1.0], [0.0], [1.0]])
    assert ramps(outputs, outputs.clamp(0, 0.1)) == []


def slopes(outputs, columns):
    """The gradient by each row of a loss that multiplies ReLU outputs by different columns per image."""
    errors = torch.randn(len(outputs), columns.shape[0], generator=torch.Generator().manual_seed(2))
    return (outputs > 0) * (errors @ columns)


def test_two_rows_with_one_direction_two_thresholds_and_opposite_columns_are_found():
    rows = torch.cat([ROWS, 3 * ROWS[:1]])
    outputs = IMAGES @ rows.T
    outputs -= outputs.median(0).values
    columns = torch.randn(5, 9, generator=torch.Generator().manual_seed(3))
    columns[:, 8] = -2 * columns[:, 0]
    assert twins(IMAGES, outputs, slopes(outputs, columns)) == []  # the thresholds are the same
    outputs[:, 8] += 0.01
    assert twins(IMAGES, outputs, slopes(outputs, columns)) == [(0, 8)]
    columns[:, 8] = columns[:, 1]
    assert twins(IMAGES, outputs, slopes(outputs, columns)) == []  # other images differ in both rows


def test_images_that_are_all_alike_show_nothing():
    alike = IMAGES[:1] + torch.rand(200, 1, generator=torch.Generator().manual_seed(4))
    outputs = F.linear(alike, torch.ones(2, 30), torch.tensor([-30.0, -30.1]))
    assert twins(alike, outputs, slopes(outputs, torch.ones(3, 2))) == []
