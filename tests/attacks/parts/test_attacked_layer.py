import pytest
from torch import nn

from gradveil.attacks.parts.attacked_layer import attacked_layer, first_on_features
from gradveil.errors import ConfigError
from gradveil.models import create_model

SHAPE = (1, 16, 16)


def test_the_first_layer_on_the_image_is_taken_if_there_is_one():
    found = attacked_layer(create_model("mlp:hidden=8/6", SHAPE, 4, 0), SHAPE)
    assert found.name == "linear1"
    assert found.shape == SHAPE
    assert found.on_images
    assert found.relu
    assert found.after == "linear2"


def test_behind_convolutions_it_is_the_first_on_features():
    network = create_model("lenet5", SHAPE, 4, 0).train()
    found = attacked_layer(network, SHAPE)
    assert found.name == "fc1"
    assert found.shape == (network.get_submodule("fc1").in_features,)
    assert not found.on_images
    assert found.after == "fc2"
    assert network.training


def test_an_activation_that_is_no_relu_has_no_layer_after_it():
    found = attacked_layer(create_model("mlp:hidden=8/6,activation=tanh", SHAPE, 4, 0), SHAPE)
    assert not found.relu
    assert found.after == ""


def test_layers_without_bias_on_many_vectors_or_called_twice_are_passed_over():
    bare = nn.Sequential(nn.Flatten(), nn.Linear(256, 8, bias=False), nn.Linear(8, 4))
    assert first_on_features(bare, SHAPE) == "2"
    rows = nn.Sequential(nn.Linear(16, 16), nn.Flatten(), nn.Linear(256, 4))
    assert first_on_features(rows, SHAPE) == "2"
    same = nn.Linear(256, 256)
    assert first_on_features(nn.Sequential(nn.Flatten(), same, same), SHAPE) == ""


def test_a_network_without_such_a_layer_is_refused():
    with pytest.raises(ConfigError, match="must have a Linear layer with bias"):
        attacked_layer(nn.Sequential(nn.Conv2d(1, 4, 16), nn.Flatten()), SHAPE)
