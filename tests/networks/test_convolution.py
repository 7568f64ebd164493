"""The three linear maps of a convolution, compared with torch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradgradcheck

from gradveil.networks.convolution import Geometry, convolve, transpose, weight_gradient

pairs = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def problems(draw):
    """Draw images, weights, an output gradient and the geometry of the kernel."""
    kernel, stride = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
    size = tuple(max(draw(st.integers(1, 9)), k - 2 * p) for k, p in zip(kernel, padding, strict=True))
    where = Geometry(size, kernel, stride, padding)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    shapes = ((3, 2, *size), (3, 4, 2, *kernel), (3, 4, *where.outputs))
    return *(torch.randn(shape, generator=rng, dtype=torch.double) for shape in shapes), where


@settings(max_examples=60, deadline=None)
@given(problems())
def test_all_three_maps_equal_a_loop_over_torchs_convolution(problem):
    images, weight, delta, where = problem
    images.requires_grad_()
    weight.requires_grad_()
    outputs = [
        F.conv2d(x[None], w, stride=where.stride, padding=where.padding) for x, w in zip(images, weight, strict=True)
    ]
    output = torch.cat(outputs)
    by_images, by_weight = torch.autograd.grad((output * delta).sum(), (images, weight))
    torch.testing.assert_close(convolve(images, weight, where), output)
    torch.testing.assert_close(transpose(delta, weight, where), by_images)
    torch.testing.assert_close(weight_gradient(images, delta, where), by_weight)


@pytest.mark.parametrize("shared", [False, True])
def test_each_can_be_differentiated_twice(shared):
    where = Geometry((5, 4), (3, 2), (2, 1), (1, 0))
    images, delta = (torch.rand(2, c, *size, dtype=torch.double) for c, size in ((2, (5, 4)), (3, where.outputs)))
    weight = torch.rand(*(() if shared else (2,)), 3, 2, 3, 2, dtype=torch.double)
    for tensor in (images, delta, weight):
        tensor.requires_grad_()
    assert gradgradcheck(lambda x, w: convolve(x, w, where), (images, weight))
    assert gradgradcheck(lambda d, w: transpose(d, w, where), (delta, weight))
    assert gradgradcheck(lambda x, d: weight_gradient(x, d, where), (images, delta))
