import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences.parts.certificate import certificate, operator_norms
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.secret_stream import SecretStream


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def linear_network(features=5, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, features), nn.Linear(features, 3)).double()


def curved_network(seed=0):
    torch.manual_seed(seed)
    body = [nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 8), nn.Tanh()]
    return nn.Sequential(*body, nn.Linear(8, 3)).double().requires_grad_(False)


def pictures(*shape, seed=0):
    return torch.rand(*shape, generator=rng(seed), dtype=torch.float64)


def whole_jacobians(function, inputs):
    """Return the Jacobians (N, features, pixels) of all images."""

    def one(image):
        return function(image.unsqueeze(0)).squeeze(0)

    return torch.func.vmap(torch.func.jacrev(one))(inputs).flatten(2)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 99))
def test_operator_norms_are_the_largest_singular_values(count, features, seed):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, features), nn.Tanh()).double()
    images = pictures(count, 1, 3, 4, seed=seed)
    expected = torch.linalg.svd(whole_jacobians(network, images)).S[:, 0]
    found = operator_norms(network, images, rng=SecretStream(0), tolerance=1e-9, max_steps=2000)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
    assert bool((found <= expected * (1 + 1e-9)).all())


def test_operator_norms_of_a_convolutional_network():
    network = create_model("lenet-dlg", (1, 12, 12), 4, seed=0).double().eval()
    images = pictures(3, 1, 12, 12)
    expected = torch.linalg.svd(whole_jacobians(network[:-1], images)).S[:, 0]
    torch.testing.assert_close(operator_norms(network[:-1], images, rng=SecretStream(0)), expected, rtol=1e-2, atol=0)


def test_fewer_steps_stop_below():
    network, images = linear_network(), pictures(2, 1, 3, 4)
    few = operator_norms(network, images, rng=SecretStream(0), max_steps=1)
    many = operator_norms(network, images, rng=SecretStream(0))
    assert bool((few < many).all())


def test_a_value_worked_by_hand():
    network = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    network[1].weight.data = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    image = torch.tensor([[[[2.0, 5.0]]]])  # r = (6, 5)
    mask = torch.tensor([[False, True]])
    assert certificate(network, "2", image, mask, rng=SecretStream(0)).item() == pytest.approx(5 / 3, rel=1e-3)
    assert certificate(network, "2", image, torch.tensor([[2.0, 2.0]]), rng=SecretStream(0)).item() == pytest.approx(
        5 / 3, rel=1e-3
    )


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 99), st.integers(1, 5))
def test_it_holds_for_a_linear_network_with_equality_in_the_worst_direction(seed, features):
    network, images = linear_network(features, seed), pictures(2, 1, 3, 4, seed=seed)
    matrix = network[1].weight.detach()  # (features, 12)
    clean = network[:2](images).detach()
    exact = {"rng": SecretStream(0), "tolerance": 1e-9, "max_steps": 2000}
    target = clean + torch.randn(clean.shape, generator=rng(seed), dtype=torch.float64)
    nearest = (torch.linalg.pinv(matrix) @ (target - clean).T).norm(dim=0)  # distance of the nearest X' with this r'
    assert bool((nearest >= certificate(network, "2", images, target, **exact) * (1 - 1e-3)).all())
    left, _, _ = torch.linalg.svd(matrix)
    worst = clean + 0.7 * left[:, 0]
    nearest = (torch.linalg.pinv(matrix) @ (worst - clean).T).norm(dim=0)
    torch.testing.assert_close(certificate(network, "2", images, worst, **exact), nearest, rtol=1e-3, atol=0)


def invert(network, images, target, steps=40):
    """Search for X' with f(X') = r' from X, by least-squares steps."""
    guess = images.clone()
    for step in range(steps):
        left = target - network[:-1](guess)
        moves = torch.linalg.pinv(whole_jacobians(network[:-1], guess)) @ left.unsqueeze(2)
        guess = guess + (0.3 if step < steps // 2 else 1.0) * moves.view_as(guess)
    return guess


def ratios(strength, worst, seeds):
    """Return the distances of actual inversions over the certified ones, for all images where r' was reached."""
    found = []
    for seed in seeds:
        network, images = curved_network(seed), pictures(8, 1, 4, 4, seed=seed)
        clean = network[:-1](images)
        direction = torch.randn(clean.shape, generator=rng(seed), dtype=torch.float64)
        if worst:  # the direction that f stretches most
            direction = torch.linalg.svd(whole_jacobians(network[:-1], images)).U[:, :, 0]
        target = (clean + strength * direction / direction.norm(dim=1, keepdim=True)).clamp(-0.95, 0.95)
        guess = invert(network, images, target)
        reached = (network[:-1](guess) - target).norm(dim=1) < 1e-6
        bound = certificate(network, "5", images, target, rng=SecretStream(0))
        found.append(((guess - images).flatten(1).norm(dim=1) / bound)[reached])
    return torch.cat(found)


def test_inversions_are_as_far_as_certified_in_random_directions():
    for strength in (0.01, 0.5):
        found = ratios(strength, worst=False, seeds=range(4))
        assert len(found) >= 30
        assert found.min() >= 1


def test_in_the_worst_direction_the_bound_is_met_nearby_and_missed_by_little_farther_off():
    near = ratios(0.001, worst=True, seeds=range(4))
    assert len(near) == 32
    assert bool(((near - 1).abs() < 5e-3).all())
    far = ratios(0.3, worst=True, seeds=range(4))
    assert len(far) >= 30
    assert 0.8 < far.min() < 1  # the bound holds to first order only


def test_beyond_first_order_it_can_fail():
    """f(x) = x^3 is steeper between X and X' than at X, so the image is closer than certified."""

    class Cube(nn.Module):
        def forward(self, x):
            return x**3

    network = nn.Sequential(nn.Flatten(), Cube(), nn.Linear(1, 2))
    image = torch.full((1, 1, 1, 1), 0.5)
    bound = certificate(network, "2", image, torch.tensor([[1.0]]), rng=SecretStream(0)).item()
    assert bound == pytest.approx((1 - 0.125) / 0.75, rel=1e-4)
    assert bound > 1 - 0.5


def test_nothing_perturbed_and_nothing_moved():
    network = linear_network()
    network[1].weight.data.zero_()
    images, mask = pictures(2, 1, 3, 4), torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 0] = True
    assert certificate(network, "2", images, mask, rng=SecretStream(0)).tolist() == [0.0, math.inf]


def test_batch_norm_is_taken_in_evaluation_mode_and_the_network_stays():
    network = create_model("convnet:width=2", (3, 12, 12), 4, seed=0).train()
    before = copy.deepcopy(network.state_dict())
    images, mask = torch.rand(3, 3, 12, 12, generator=rng()), torch.ones(3, 8, dtype=torch.bool)
    found = certificate(network, "linear", images, mask, rng=SecretStream(0))
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    assert network.training
    assert not any(layer._forward_pre_hooks for layer in network.modules())
    torch.testing.assert_close(
        found[:1], certificate(network, "linear", images[:1], mask[:1], rng=SecretStream(0)), rtol=1e-2, atol=0
    )
    batch = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(432, 2))
    with pytest.raises(ConfigError, match="BatchNorm"):
        certificate(batch, "2", images, mask, rng=SecretStream(0))


def test_what_does_not_fit_is_refused():
    network, images = linear_network(), pictures(2, 1, 3, 4)
    with pytest.raises(ConfigError, match="Unknown layer 'fc'"):
        certificate(network, "fc", images, torch.zeros(2, 5), rng=SecretStream(0))
    with pytest.raises(ConfigError, match=r"perturbed must have the shape \(2, 5\).*got \(2, 4\)"):
        certificate(network, "2", images, torch.zeros(2, 4), rng=SecretStream(0))
    with pytest.raises(ConfigError, match="tolerance"):
        operator_norms(network, images, rng=SecretStream(0), tolerance=0.0)
    with pytest.raises(ConfigError, match="max_steps"):
        operator_norms(network, images, rng=SecretStream(0), max_steps=0)
