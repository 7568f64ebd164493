import torch

from gradveil.models import create_model


def test_parameters():
    with torch.device("meta"):
        network = create_model("densenet121:stem=7x7", (3, 224, 224), 1000, seed=0)
    assert sum(parameter.numel() for parameter in network.parameters()) == 7_978_856
    assert network.classifier.in_features == 1024


def test_parameters_have_torchvisions_names():
    names = set(create_model("densenet121:growth=1,stem=7x7", (3, 32, 32), 4, seed=0).state_dict())
    assert len(names) == 727
    assert {"features.conv0.weight", "features.norm5.running_mean", "classifier.bias"} <= names
    assert {"features.denseblock3.denselayer24.conv2.weight", "features.transition3.norm.bias"} <= names


def test_a_dense_layer_appends_channels_to_its_input():
    layer = create_model("densenet121:growth=3", (1, 8, 8), 2, seed=0).eval().features.denseblock1.denselayer1
    images = torch.rand(1, 6, 4, 4)
    result = layer(images)
    assert result.shape == (1, 9, 4, 4)
    torch.testing.assert_close(result[:, :6], images)


def test_transitions_halve_channels_and_image():
    transition = create_model("densenet121:growth=2", (1, 8, 8), 2, seed=0).eval().features.transition1
    assert transition(torch.rand(1, 16, 7, 6)).shape == (1, 8, 4, 3)


def test_7x7_stem_divides_the_side_by_four():
    for stem, side in {"7x7": 8, "3x3": 32}.items():
        features = create_model(f"densenet121:growth=1,stem={stem}", (3, 32, 32), 4, seed=0).features
        start = list(dict(features.named_children())).index("denseblock1")
        assert features[:start](torch.rand(2, 3, 32, 32)).shape == (2, 2, side, side)
