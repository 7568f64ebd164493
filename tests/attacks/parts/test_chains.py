import pytest
import torch
from torch import nn

from gradveil.attacks.parts.chains import chain_of, gradient_matrix, inverted, weight_matrix

NETWORK = nn.Sequential(
    nn.Conv2d(1, 6, 4, 2, 2), nn.LeakyReLU(0.2), nn.Conv2d(6, 12, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 4)
).double()


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_matrices_are_those_of_the_layer_and_of_its_gradient(place):
    layer = chain_of(NETWORK, (1, 8, 8))[place]
    inputs, weight = drawn(1, *layer.shape), layer.module.weight.clone().requires_grad_()
    flat = inputs.flatten(1) if isinstance(layer.module, nn.Linear) else inputs
    outputs = torch.func.functional_call(layer.module, {"weight": weight}, (flat,))
    bias = layer.module(torch.zeros_like(flat))
    assert torch.allclose(weight_matrix(layer) @ inputs.flatten(), (outputs - bias).detach().flatten())
    error = drawn(*outputs.shape)
    (wanted,) = torch.autograd.grad((outputs * error).sum(), weight)
    matrix = gradient_matrix(layer, error[0].view(layer.out[0], -1))
    assert torch.allclose(matrix @ inputs.flatten(), wanted.flatten())


@pytest.mark.parametrize("act", [nn.Identity(), nn.LeakyReLU(0.2), nn.Sigmoid(), nn.Tanh()])
def test_activations_are_inverted_with_their_slope(act):
    before = drawn(20).requires_grad_()
    after = act(before)
    (slope,) = torch.autograd.grad(after.sum(), before)
    found = inverted(act, after.detach())
    assert torch.allclose(found[0], before.detach())
    assert torch.allclose(found[1], slope)
