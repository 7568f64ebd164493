"""A canary's image has the gradient that was asked for, directions have equal layers, and the spread needs no draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradveil.engines.canary_network import CanaryNetwork, random_directions, spread_along
from gradveil.models import create_model
from gradveil.networks.grads import example_gradients

SHAPE = (1, 28, 28)


@pytest.fixture
def lenet():
    return create_model("lenet-dlg", SHAPE, 10, 0)


def sizes(network):
    return {name: parameter.numel() for name, parameter in network.named_parameters()}


def flat(gradients):
    return torch.cat([tensor.flatten(1) for tensor in gradients.values()], 1)


def test_each_canary_has_its_gradient_and_other_images_none(lenet):
    wanted = 3 * random_directions(4, sizes(lenet), seed=0)
    network = CanaryNetwork(lenet, wanted, SHAPE, seed=0)
    data = network.data(6, one=False)
    found = flat(example_gradients(network, data.images, data.labels))
    assert torch.allclose(found[:4], -wanted, atol=1e-6)
    assert not found[4:].any()
    with torch.no_grad():  # whatever the weights are
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(flat(example_gradients(network, data.images, data.labels)), found)


def test_a_client_of_one_canary_moves_along_it(lenet):
    wanted = random_directions(1, sizes(lenet), seed=0)
    network = CanaryNetwork(lenet, wanted, SHAPE, seed=0)
    data = network.data(5, one=True)
    F.cross_entropy(network(data.images), data.labels).backward()
    assert torch.allclose(torch.cat([p.grad.flatten() for p in network.parameters()]), -wanted[0], atol=1e-6)


def test_names_and_values_are_those_of_the_network(lenet):
    network = CanaryNetwork(lenet, random_directions(2, sizes(lenet), seed=0), SHAPE, seed=0)
    ours, theirs = network.state_dict(), lenet.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_parameters_of_the_network_itself_are_kept():
    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("shift", torch.ones(2))

    network = CanaryNetwork(Odd(), torch.ones(1, 6), (1, 3, 3), seed=0)
    assert list(network.state_dict()) == ["weight", "bias", "shift"]


def test_directions_have_norm_one_and_equal_layers():
    parts = {"a.weight": 30, "a.bias": 3, "b.weight": 200}
    drawn = random_directions(5, parts, seed=1)
    assert drawn.shape == (5, 233)
    assert torch.allclose(drawn[:, :33].square().sum(1), torch.full((5,), 0.5))
    assert torch.allclose(drawn[:, 33:].square().sum(1), torch.full((5,), 0.5))
    assert not torch.equal(drawn, random_directions(5, parts, seed=2))


def test_the_spread_is_that_of_many_random_directions():
    parts = {"a.weight": 40, "b.weight": 400}
    rest = torch.cat([torch.full((40,), 3.0), torch.ones(400)]).double()
    many = random_directions(20_000, parts, seed=0).double() @ rest
    assert spread_along(rest[None], torch.zeros(1, 440), parts) == pytest.approx(float(many.std()), rel=0.02)
    half = spread_along(rest[None], torch.full((1, 440), 0.75), parts)  # the rest is a quarter of the noise
    assert half == pytest.approx(2 * spread_along(rest[None], torch.zeros(1, 440), parts))
