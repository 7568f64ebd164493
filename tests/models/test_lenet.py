import pytest
import torch
from torch import nn

from gradveil.models import Model, create_model
from gradveil.registry import build


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(("shape", "hidden"), [((3, 32, 32), 768), ((1, 28, 28), 588), ((3, 31, 45), 12 * 8 * 12)])
def test_lenet_dlg_hidden_features(shape, hidden):
    assert create_model("lenet-dlg", shape, 10, seed=0).fc.in_features == hidden


def test_lenet_dlg_is_the_network_of_the_authors_code():
    # 3·12·25 + 12, 2·(12·12·25 + 12), 768·100 + 100
    network = create_model("lenet-dlg", (3, 32, 32), 100, seed=0)
    assert count(network) == 912 + 2 * 3_612 + 76_900
    assert [module.stride[0] for module in network if isinstance(module, nn.Conv2d)] == [2, 2, 1]
    assert sum(isinstance(module, nn.Sigmoid) for module in network) == 3
    assert network.fc.weight.abs().max() > 0.45, "DLG draws from U(-0.5, 0.5)"


def test_soterias_lenet_has_a_fourth_convolution_of_stride_one():
    network = create_model("lenet-dlg:convs=4,init=default", (3, 32, 32), 10, seed=0)
    assert [module.stride[0] for module in network if isinstance(module, nn.Conv2d)] == [2, 2, 1, 1]
    assert network.fc.in_features == 768
    assert network.fc.weight.abs().max() < 0.05


def test_lenet5_parameters():
    # 1·6·25 + 6, 6·16·25 + 16, 400·120 + 120, 120·84 + 84, 84·10 + 10
    assert 156 + 2_416 + 48_120 + 10_164 + 850 == 61_706
    assert count(create_model("lenet5", (1, 28, 28), 10, seed=0)) == 61_706


@pytest.mark.parametrize(("side", "features"), [(28, 400), (32, 400), (64, 16 * 13 * 13), (12, 16)])
def test_lenet5_features(side, features):
    assert create_model("lenet5", (3, side, side), 10, seed=0).fc1.in_features == features


def test_lenet5_pads_height_and_width_separately():
    network = create_model("lenet5", (1, 28, 40), 10, seed=0)
    assert network.conv1.padding == (2, 0)
    assert network(torch.rand(1, 1, 28, 40)).shape == (1, 10)


def test_lenet5_with_the_settings_of_grnn():
    network = create_model("lenet5:activation=sigmoid,init=uniform", (3, 32, 32), 10, seed=0)
    assert sum(isinstance(module, nn.Sigmoid) for module in network) == 4
    assert network.fc1.weight.abs().max() > 0.49


def test_lenet_dlg_spec_hides_the_papers_settings():
    assert build(Model, "lenet-dlg:activation=sigmoid,init=uniform,width=8").spec == "lenet-dlg:width=8"


def test_lenet5_uses_max_pooling():
    network = create_model("lenet5", (1, 28, 28), 10, seed=0)
    image = torch.tensor([[[[1.0, 2.0], [3.0, 9.0]]]])
    assert network.pool1(image).item() == network.pool2(image).item() == 9
