"""Watching layers: what is seen, what is replaced, and that nothing stays behind."""

import pytest
import torch
from torch import nn

from gradveil.networks.watch import input_of, inputs_of, record, watch


class Twice(nn.Module):
    """Uses one layer twice, and a layer that works in place."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(1, 1, bias=False), nn.ReLU(inplace=True)
        nn.init.constant_(self.linear.weight, 2.0)

    def forward(self, numbers):
        return self.act(self.linear(self.linear(numbers)))


def hooks_left(network):
    return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in network.modules()]


def test_calls_are_recorded_by_name_and_number():
    with record(Twice()) as calls, torch.no_grad():
        pass
    assert calls == []
    network = Twice()
    with record(network) as calls, torch.no_grad():
        network(torch.tensor([[1.0]]))
    assert [(call.name, call.number) for call in calls] == [("linear", 0), ("linear", 1), ("act", 0), ("", 0)]
    assert [call.inputs[0].item() for call in calls[:2]] == [1.0, 2.0]
    assert [call.output.item() for call in calls] == [2.0, 4.0, 4.0, 4.0]
    assert calls[0].layer is network.linear


def test_before_sees_inputs_that_the_layer_then_changes_in_place():
    network, met = Twice(), []
    with watch(network, ["act"], before=lambda call: met.append((call.inputs[0].item(), call.output))):
        network(torch.tensor([[-1.0]]))
    assert met == [(-4.0, None)]


def test_a_returned_tensor_replaces_the_output():
    network = Twice()
    with watch(network, ["linear"], after=lambda call: torch.full((1, 1), 5.0) if call.number else None):
        assert network(torch.tensor([[1.0]])).item() == 5.0
    assert network(torch.tensor([[1.0]])).item() == 4.0


def test_inputs_of_holds_the_latest_pass():
    network = Twice()
    with inputs_of(network, ["linear"]) as inputs, torch.no_grad():
        for number in (1.0, 3.0):
            network(torch.tensor([[number]]))
            assert inputs["linear"].item() == 2 * number


def test_the_input_of_a_layer_is_what_the_layers_before_make_of_the_images():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    network.register_forward_pre_hook(lambda _, given: (given[0] - 0.5,))
    images = torch.rand(2, 1, 2, 2)
    assert torch.equal(input_of(network, "2", images), network[1]((images - 0.5).flatten(1)))


def test_hooks_are_removed_after_an_error_too():
    network = Twice()

    def refuse(call):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), watch(network, after=refuse, before=lambda call: None):
        network(torch.tensor([[1.0]]))
    assert not any(hooks_left(network))
    with pytest.raises(AttributeError), watch(network, ["linear", "no such layer"], after=refuse):
        pass
    assert not any(hooks_left(network))
