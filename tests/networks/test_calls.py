"""Calls of layers: their order of execution, and which layer feeds which."""

import torch
from torch import nn

from gradveil.networks.calls import calls_on_blank, traced_calls


class Crossed(nn.Module):
    """A network that defines its second convolution first, and optionally branches on the image."""

    def __init__(self, branches=False):
        super().__init__()
        self.second, self.first, self.norm = nn.Conv2d(2, 3, 1), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.branches = branches

    def forward(self, images):
        if self.branches and images.sum() > 1e9:
            return images
        hidden = self.norm(self.first(images))
        return self.second(hidden + hidden.relu()).mean((2, 3))


def test_calls_are_traced_in_the_order_of_execution_if_the_code_allows_it():
    assert [node.target for node in traced_calls(Crossed())] == ["first", "norm", "second"]
    assert traced_calls(Crossed(branches=True)) == []


def test_a_blank_image_shows_which_layer_feeds_which():
    network = Crossed(branches=True)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    calls = calls_on_blank(network, (1, 4, 4))
    by_name = {call.name: call for call in calls.layers}
    assert [call.name for call in calls.layers] == ["first", "norm", "second", ""]
    assert by_name["first"].feeds(by_name["norm"])
    assert not by_name["norm"].feeds(by_name["second"])  # an addition comes in between
    assert [calls.uses(by_name[name].made) for name in ("first", "norm", "second")] == [1, 2, 1]
    assert by_name["first"].made in calls.steps()
    assert by_name["first"].made not in calls.steps(stop=by_name["second"].made)
    assert network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
