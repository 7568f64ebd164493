import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.attacks.parts.priors import batch_norm_distance, group_consistency, squared_norm, total_variation


@given(st.integers(1, 4), st.integers(2, 5), st.integers(2, 5), st.booleans())
def test_total_variation_equals_a_naive_loop(channels, height, width, isotropic):
    images = torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0)).double()
    for image, value in zip(images, total_variation(images, isotropic=isotropic), strict=True):
        down, right, both = [], [], []
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    dy = image[c, i + 1, j] - image[c, i, j] if i + 1 < height else None
                    dx = image[c, i, j + 1] - image[c, i, j] if j + 1 < width else None
                    down += [dy.abs()] if dy is not None else []
                    right += [dx.abs()] if dx is not None else []
                    both += [(dx**2 + dy**2).sqrt()] if dx is not None and dy is not None else []
        expected = torch.stack(both).mean() if isotropic else torch.stack(down).mean() + torch.stack(right).mean()
        assert value.item() == pytest.approx(expected.item(), abs=1e-6)


def test_flat_images_cost_nothing_and_have_a_finite_gradient():
    images = torch.full((1, 3, 4, 4), 0.5, requires_grad=True)
    for isotropic in (False, True):
        total_variation(images, isotropic=isotropic).sum().backward()
        assert bool(images.grad.isfinite().all())
    assert squared_norm(images).item() == 0.25


def test_group_consistency_is_the_distance_from_the_mean():
    images = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1)
    assert group_consistency(images).tolist() == [[0.25], [0.25]]


def test_batch_norm_distance_by_hand():
    seen = {"bn": (torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]]))}
    wanted = {"bn": (torch.zeros(2), torch.tensor([1.0, 3.0]))}
    assert batch_norm_distance(seen, wanted).tolist() == [7.0]
