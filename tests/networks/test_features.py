import pytest
import torch
from torch import nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.models import create_model
from gradveil.networks.features import Features, chosen_layers

SHAPE = (3, 8, 8)


@pytest.fixture
def network():
    return create_model("resnet20:width=2", SHAPE, 4, 0).eval()


def test_the_layers_chosen_by_the_paper(network):
    convolutions = [name for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 19
    assert chosen_layers(network, SHAPE, "all") == convolutions
    assert chosen_layers(network, SHAPE, "first-5") == convolutions[:5]
    assert chosen_layers(network, SHAPE, "last-5") == [*convolutions[-5:], "linear"]
    assert chosen_layers(network, SHAPE, "first-99") == convolutions
    assert chosen_layers(network, SHAPE, "conv1/linear") == ["conv1", "linear"]


def test_features_are_layer_outputs_and_later_layers_do_not_run(network):
    images = torch.rand(3, *SHAPE)
    ran = []
    network.linear.register_forward_hook(lambda *_: ran.append(1))
    found = Features(network, ["layer1.0.conv1", "conv1"], SHAPE)(images)
    first = network.conv1(images)
    second = network.layer1[0].conv1(network.act1(network.bn1(first)))
    ran.clear()
    assert torch.allclose(found[0], first)
    assert torch.allclose(found[1], second)
    Features(network, ["conv1"], SHAPE)(images)
    assert len(ran) == 1  # the first pass only finds the order of the layers


def test_the_distance_is_the_sum_over_layers_and_has_a_gradient(network):
    images, others = torch.rand(2, *SHAPE), torch.rand(2, *SHAPE, requires_grad=True)
    features = Features(network, ["conv1", "linear"], SHAPE)
    found = features.distance(others, features(images))
    by_hand = [
        sum(((a[n] - b[n]) ** 2).sum() for a, b in zip(features(images), features(others), strict=True))
        for n in range(2)
    ]
    assert torch.allclose(found, torch.stack(by_hand))
    assert torch.autograd.grad(found.sum(), others)[0].abs().sum() > 0


@pytest.mark.parametrize("mean", [False, True])
def test_the_slope_is_the_gradient_of_the_distance(network, mean):
    images, others = torch.rand(2, *SHAPE), torch.rand(2, *SHAPE, requires_grad=True)
    features = Features(network, ["conv1", "layer2.0.conv1"], SHAPE)
    wanted = features(images)
    distance = features.distance(others, wanted, mean=mean)
    assert torch.allclose(
        features.slope(others, wanted, mean=mean), torch.autograd.grad(distance.sum(), others)[0], atol=1e-5
    )


def test_an_output_changed_in_place_later_is_kept():
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3)).eval()
    images = torch.rand(2, *SHAPE)
    found = Features(network, ["0", "2"], SHAPE)(images)
    assert torch.equal(found[0], network[0](images))
    assert (found[0] < 0).any()


def test_missing_layers_and_layers_not_used_once_are_refused(network):
    with pytest.raises(UnknownNameError, match=r"layer1.0.conv9.*Did you mean 'layer1.0.conv2'"):
        Features(network, ["layer1.0.conv9"], SHAPE)
    twice = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
    twice.append(twice[0])
    with pytest.raises(ConfigError, match="used once in a forward pass, got 2 uses"):
        Features(twice, ["0"], SHAPE)
    with pytest.raises(ConfigError, match="choose at least one layer"):
        chosen_layers(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), SHAPE, "all")
