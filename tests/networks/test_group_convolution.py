import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.networks.convolution import Geometry, weight_gradient
from gradveil.networks.group_convolution import group_weight_gradient, is_faster

shapes = st.tuples(
    st.integers(1, 3),  # groups
    st.integers(1, 3),  # examples per group
    st.integers(1, 3),  # channels in
    st.integers(1, 3),  # channels out
    st.tuples(st.integers(4, 7), st.integers(4, 7)),  # image
    st.tuples(st.integers(1, 3), st.integers(1, 3)),  # kernel
    st.tuples(st.integers(1, 2), st.integers(1, 2)),  # stride
    st.tuples(st.integers(0, 1), st.integers(0, 1)),  # padding
)


def drawn(shape, seed=0):
    groups, group, ins, outs, size, kernel, stride, padding = shape
    where, rng = Geometry(size, kernel, stride, padding), torch.Generator().manual_seed(seed)
    images = torch.randn(groups * group, ins, *size, generator=rng, dtype=torch.float64, requires_grad=True)
    delta = torch.randn(groups * group, outs, *where.outputs, generator=rng, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(groups, outs, ins, *kernel, generator=rng, dtype=torch.float64, requires_grad=True)
    return where, group, images, delta, direction


@settings(deadline=None, max_examples=30)
@given(shapes)
def test_gradients_of_groups_are_sums_of_the_examples_own_by_products_of_patches(shape):
    where, group, images, delta, _ = drawn(shape)
    found = group_weight_gradient(images, delta, where, group)
    single = weight_gradient(images, delta, where)
    assert torch.allclose(found, single.view(-1, group, *single.shape[1:]).sum(1), atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(shapes)
def test_derivatives_of_all_orders_agree_with_products_of_patches(shape):
    where, group, images, delta, direction = drawn(shape)
    single = weight_gradient(images, delta, where)
    maps = (group_weight_gradient(images, delta, where, group), single.view(-1, group, *single.shape[1:]).sum(1))
    firsts = [torch.autograd.grad(one, (images, delta), direction, create_graph=True) for one in maps]
    for ours, theirs in zip(*firsts, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    losses = [(by_images.square().sum() + by_delta.square().sum()) for by_images, by_delta in firsts]
    seconds = [torch.autograd.grad(loss, (images, delta, direction)) for loss in losses]
    for ours, theirs in zip(*seconds, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize(
    ("where", "weight", "group", "expected"),
    [
        (Geometry((32, 32), (5, 5), (2, 2), (2, 2)), (12, 3, 5, 5), 1, False),  # lenet-dlg: few products
        (Geometry((32, 32), (5, 5), (2, 2), (2, 2)), (12, 3, 5, 5), 8, True),  # a batch
        (Geometry((4, 4), (3, 3), (1, 1), (1, 1)), (512, 512, 3, 3), 1, True),  # wide
        (Geometry((32, 32), (3, 3), (1, 1), (1, 1)), (16, 3, 3, 3), 1, True),  # many positions
        (Geometry((8, 8), (1, 1), (2, 2), (0, 0)), (128, 64, 1, 1), 1, True),  # a shortcut
    ],
)
def test_the_rule_goes_by_operation_counts(where, weight, group, expected):
    assert is_faster(where, torch.Size(weight), group) is expected
