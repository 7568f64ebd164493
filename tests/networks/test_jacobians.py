import math

import pytest
import torch

from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.networks.jacobians import batched_jvp, batched_vjp, jacobian_row_norms
from gradveil.secret_stream import SecretStream


def build(spec, shape, classes):
    return create_model(spec, shape, classes, seed=0).double()


def features(network):
    return lambda x: torch.sigmoid(network(x))


def test_jvp_and_vjp_equal_products_with_the_jacobian():
    torch.manual_seed(0)
    network = build("mlp:hidden=7", (1, 3, 3), 5)
    inputs = torch.rand(2, 1, 3, 3).double().requires_grad_()
    function = features(network)
    whole = torch.autograd.functional.jacobian(function, inputs)  # (2, 5, 2, 1, 3, 3)
    cotangents, tangents = torch.randn(3, 2, 5).double(), torch.randn(3, 2, 1, 3, 3).double()
    vjp = torch.einsum("kno,nomchw->kmchw", cotangents, whole)
    jvp = torch.einsum("nomchw,kmchw->kno", whole, tangents)
    assert torch.allclose(batched_vjp(function(inputs), inputs, cotangents, chunk=2), vjp, atol=1e-12)
    assert torch.allclose(batched_jvp(function, inputs.detach(), tangents, chunk=2), jvp, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize("forward", [False, True])
def test_row_norms_equal_the_jacobians_in_backward_and_forward_mode(forward, order):
    torch.manual_seed(0)
    network = build("mlp:hidden=7", (1, 3, 3), 5)
    inputs = torch.rand(2, 1, 3, 3).double()
    whole = torch.autograd.functional.jacobian(features(network), inputs)
    expected = torch.stack([whole[n, :, n].flatten(1).norm(order, dim=1) for n in range(2)])
    found = jacobian_row_norms(features(network), inputs, order=order, chunk=2, forward=forward)
    assert torch.allclose(found, expected, atol=1e-12)


def test_row_norms_estimated_by_probes():
    torch.manual_seed(0)
    network = build("mlp:hidden=7", (1, 3, 3), 5)
    inputs = torch.rand(2, 1, 3, 3).double()
    expected = jacobian_row_norms(features(network), inputs)
    rng = SecretStream(0)
    estimate = jacobian_row_norms(features(network), inputs, probes=2000, rng=rng)
    assert torch.allclose(estimate, expected, rtol=0.1)
    with pytest.raises(ConfigError, match="rng"):
        jacobian_row_norms(features(network), inputs, probes=2)
    with pytest.raises(ConfigError, match="order must be 2"):
        jacobian_row_norms(features(network), inputs, order=1, probes=2, rng=rng)


class Backward(torch.autograd.Function):
    """A function without forward-mode derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs):
        return inputs.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_probes_need_forward_mode():
    inputs = torch.rand(2, 3)
    assert torch.allclose(jacobian_row_norms(Backward.apply, inputs, forward=True), torch.ones(2, 3))
    with pytest.raises(ConfigError, match=r"probes must be 0 .* without forward-mode derivatives, got 4"):
        jacobian_row_norms(Backward.apply, inputs, probes=4, rng=SecretStream(0))


@pytest.mark.parametrize("order", [1.0, math.inf])
def test_row_norms_of_other_orders(order):
    network, inputs = build("mlp:hidden=7", (1, 3, 3), 5), torch.rand(2, 1, 3, 3).double()
    whole = torch.autograd.functional.jacobian(features(network), inputs)
    expected = torch.stack([torch.linalg.vector_norm(whole[n, :, n].flatten(1), order, dim=1) for n in range(2)])
    assert torch.allclose(jacobian_row_norms(features(network), inputs, order=order, chunk=3), expected, atol=1e-12)


def test_probes_are_unbiased_in_the_square_and_take_expanded_images():
    network, rng = build("mlp:hidden=7", (3, 2, 2), 5), SecretStream(0)
    inputs = torch.rand(2, 1, 2, 2).double().expand(-1, 3, -1, -1)
    expected = jacobian_row_norms(features(network), inputs).square()
    draws = [jacobian_row_norms(features(network), inputs, probes=8, rng=rng, chunk=3).square() for _ in range(200)]
    squares = torch.stack(draws)  # (200, 2, 5)
    assert ((squares.mean(0) - expected).abs() < 5 * squares.std(0) / 200**0.5).all()
    assert torch.allclose(squares.std(0) / expected, torch.tensor(2 / 8).sqrt().double(), rtol=0.4)
