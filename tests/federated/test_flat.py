import copy

import pytest
import torch
from torch import nn

from gradveil.errors import ConfigError
from gradveil.federated.flat import FlatModel


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def test_moving_into_a_vector_changes_no_value_and_no_output():
    plain = network()
    net = FlatModel(copy.deepcopy(plain))
    images = torch.rand(6, 3, 8, 8)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(net.module.state_dict()[name], tensor), name
    assert torch.allclose(net.module(images), plain(images), atol=1e-6)


def test_tensors_are_views_of_the_vector():
    net = FlatModel(network())
    with torch.no_grad():
        net.values.fill_(2.0)
    assert all(bool((t == 2).all()) for t in net.module.state_dict().values() if t.is_floating_point())


def test_layout_puts_private_tensors_outside_the_shared_part():
    private = {"0.weight", "1.running_var"}
    net = FlatModel(network(), lambda name: name in private)
    assert set(net.shared_names) == {"0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "1.running_mean"}
    assert set(net.private_tensors()) == private
    before = net.private_tensors()
    net.receive(torch.full((net.shared.stop - net.shared.start,), 7.0))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.private_tensors().items())
    assert bool((net.module[3].weight == 7).all())
    assert net.trained.start == 0
    assert net.trained.stop == sum(p.numel() for p in net.module.parameters())


def test_backward_fills_the_gradient_vector():
    plain = network().eval()
    net = FlatModel(copy.deepcopy(plain))
    images = torch.rand(2, 3, 8, 8)
    plain(images).square().sum().backward()
    net.gradients.zero_()
    net.module(images).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(net.gradient()[name], parameter.grad, rtol=1e-4, atol=1e-4), name
    net.set_gradient({name: torch.full_like(p, 3.0) for name, p in plain.named_parameters()})
    assert bool((net.gradients == 3).all())
    assert bool((net.module[0].weight.grad == 3).all())


def test_vectors_and_tensors_are_inverse_of_each_other():
    net = FlatModel(network(), lambda name: name == "0.bias")
    vector = torch.rand(net.shared.stop - net.shared.start)
    assert torch.equal(net.shared_vector(net.shared_tensors(vector)), vector)
    update = net.to_update(vector, 9)
    assert update.num_examples == 9
    assert set(update.buffers) == {"1.running_mean", "1.running_var"}
    assert torch.equal(net.to_vector(update), vector)
    # a contiguous copy, as it comes from a file, means the same
    plain = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in update.tensors.items()}
    assert torch.equal(net.to_vector(type(update)(plain, 9, update.buffers)), vector)


@pytest.mark.parametrize("change", ["drop", "rename", "reshape", "retype"])
def test_an_update_of_another_shape_is_refused(change):
    net = FlatModel(nn.Linear(3, 2))
    tensors = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    if change == "drop":
        del tensors["bias"]
    if change == "rename":
        tensors["other"] = tensors.pop("bias")
    if change == "reshape":
        tensors["weight"] = torch.ones(3, 2)
    if change == "retype":
        tensors["bias"] = tensors["bias"].double()
    assert net.to_vector(type(net.to_update(torch.zeros(8), 1))(tensors, 1)) is None


def test_frozen_parameters_are_broadcast_but_not_trained():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    net = FlatModel(module)
    assert set(net.gradient()) == {"weight"}
    assert set(net.shared_names) == {"weight", "bias"}


def test_mixed_types_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match="one dtype"):
        FlatModel(module)
