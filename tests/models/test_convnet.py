from torch import nn

from gradveil.models import create_model


def test_convnet_is_the_network_of_inverting_gradients():
    network = create_model("convnet", (3, 32, 32), 10, seed=0)
    convs = [module for module in network if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [64, 128, 128, 256, 256, 256, 256, 256]
    assert network.linear.in_features == 36 * 64
    # convolutions 1,792 + 73,856 + 147,584 + 295,168 + 4·590,080, BatchNorm 2·1,600, linear 2,304·10 + 10
    assert sum(parameter.numel() for parameter in network.parameters()) == 2_878_720 + 3_200 + 23_050


def test_dcs2_has_half_the_width():
    assert create_model("convnet:width=32", (1, 28, 28), 10, seed=0).linear.in_features == 36 * 32


def test_pooling_follows_the_sixth_and_the_eighth_convolution():
    names = [name for name, _ in create_model("convnet:width=2", (3, 32, 32), 10, seed=0).named_children()]
    assert names[names.index("act6") + 1] == "pool6"
    assert names[names.index("act8") + 1] == "pool8"
    assert sum(name.startswith("pool") for name in names) == 2
