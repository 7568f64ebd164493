import pytest
import torch
from torch import nn

from gradveil.models import create_model


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "num_classes", "parameters"),
    [
        ("vgg16:head=full,batch_norm=false", (3, 224, 224), 1000, 138_357_544),
        # 13 convolutions 14,714,688, BatchNorm 2·4,224, linear 512·10 + 10
        ("vgg16", (3, 32, 32), 10, 14_714_688 + 8_448 + 5_130),
        ("vgg16:batch_norm=no", (3, 64, 64), 10, 14_714_688 + 5_130),
    ],
)
def test_parameters(spec, shape, num_classes, parameters):
    with torch.device("meta"):
        assert count(create_model(spec, shape, num_classes, seed=0)) == parameters


@pytest.mark.parametrize(("side", "left"), [(28, 1), (32, 1), (33, 2), (64, 2), (1, 1)])
def test_pooling_rounds_up_and_never_reaches_zero(side, left):
    network = create_model("vgg16:width=1", (1, side, side), 3, seed=0).eval()
    assert network.features(torch.rand(1, 1, side, side)).shape == (1, 8, left, left)


def test_28x28_trains_with_one_image():
    """BatchNorm refuses one value per channel; rounding up leaves 2x2 pixels."""
    network = create_model("vgg16:width=2", (1, 28, 28), 3, seed=0).train()
    assert network(torch.rand(1, 1, 28, 28)).isfinite().all()


def test_full_head_has_torchvisions_names_and_works_on_small_images():
    network = create_model("vgg16:width=2,head=full,hidden=8", (3, 28, 28), 3, seed=0).eval()
    names = set(network.state_dict())
    assert {"features.0.weight", "classifier.0.weight", "classifier.3.bias", "classifier.6.weight"} <= names
    assert network.classifier[0].in_features == 16 * 49
    assert network(torch.rand(2, 3, 28, 28)).shape == (2, 3)


def test_dropout_is_off_by_default():
    rates = {}
    for spec in ("vgg16:width=1,head=full,hidden=4", "vgg16:width=1,head=full,hidden=4,dropout=0.5"):
        network = create_model(spec, (1, 8, 8), 2, seed=0)
        rates[spec] = [module.p for module in network.modules() if isinstance(module, nn.Dropout)]
    assert list(rates.values()) == [[0.0, 0.0], [0.5, 0.5]]
