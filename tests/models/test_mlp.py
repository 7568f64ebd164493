import torch

from gradveil.models import create_model


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


def test_mlp_is_fedavgs_2nn():
    # 784·200 + 200, 200·200 + 200, 200·10 + 10
    assert count(create_model("mlp", (1, 28, 28), 10, seed=0)) == 157_000 + 40_200 + 2_010


def test_hidden_widths_are_written_with_slashes():
    network = create_model("mlp:hidden=5/4/3", (1, 2, 2), 2, seed=0)
    assert [tuple(p.shape) for p in network.parameters() if p.ndim == 2] == [(5, 4), (4, 5), (3, 4), (2, 3)]


def test_logistic_is_one_affine_map():
    network = create_model("logistic", (1, 28, 28), 10, seed=0)
    assert count(network) == 7_850
    images = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(network(images), images.flatten(1) @ network.linear.weight.T + network.linear.bias)


def test_mlp_without_hidden_layers_is_logistic():
    one, two = (create_model(spec, (1, 4, 4), 3, seed=1) for spec in ("mlp:hidden=", "logistic"))
    assert torch.equal(one.linear.weight, two.linear.weight)
