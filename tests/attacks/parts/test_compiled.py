import shutil

import pytest
import torch

from gradveil.attacks.parts import compiled as module
from gradveil.attacks.parts.compiled import compiled


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_function_is_reused_for_another_network_of_the_same_kind(monkeypatch):
    monkeypatch.setattr(module, "_known", type(module._known)())
    torch.manual_seed(0)
    networks = [torch.nn.Linear(3, 2) for _ in range(2)]

    def derivative_of(network):
        def derivative(inputs):
            leaf = inputs.detach().requires_grad_()
            return (torch.autograd.grad(network(leaf).tanh().square().sum(), leaf)[0],)

        return derivative

    inputs = torch.rand(4, 3)
    for network in networks:
        fast = compiled(derivative_of(network), (inputs,))
        for given in (inputs, inputs + 1):
            torch.testing.assert_close(fast(given)[0], derivative_of(network)(given)[0])
    assert len(module._known) == 1
    compiled(derivative_of(networks[0]), (torch.rand(5, 3),))
    assert len(module._known) == 2
