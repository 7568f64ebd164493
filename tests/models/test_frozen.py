"""Frozen networks under a fresh head."""

import pytest
import torch

from gradveil.errors import ConfigError
from gradveil.federated.flat import FlatModel
from gradveil.models import create_model
from gradveil.models.frozen import last_linear, random_trunk
from gradveil.storage import save_tensors

SHAPE = (1, 12, 12)


def images(count=3):
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def weights(tmp_path):
    """Weights of a network for seven public classes."""
    path = tmp_path / "public.safetensors"
    save_tensors(path, create_model("mlp:hidden=6/5", SHAPE, 7, seed=9).state_dict())
    return path


def test_the_trunk_is_the_public_network_without_its_last_layer(weights):
    network = create_model(f"frozen:network=mlp:hidden=6/5,weights={weights}", SHAPE, 3, seed=0)
    public = create_model("mlp:hidden=6/5", SHAPE, 7, seed=9)
    expected = network.trunk.scaling(public[:-1](images()))
    expected = expected / expected.norm(dim=1, keepdim=True)
    found = network.trunk(images())
    assert torch.allclose(found[:, :-1], expected, atol=1e-6)
    assert network.head.weight.shape == (3, 6)
    assert FlatModel(network).shared_names == ["head.weight"]


def test_other_weights_have_another_fingerprint_which_can_be_pinned(weights, tmp_path):
    spec = f"frozen:network=mlp:hidden=6/5,weights={weights}"
    first = create_model(spec, SHAPE, 3, seed=0).trunk.fingerprint
    assert create_model(f"{spec},sha256={first[:20]}", SHAPE, 5, seed=4).trunk.fingerprint == first
    state = create_model("mlp:hidden=6/5", SHAPE, 7, seed=9).state_dict()
    state["linear1.bias"] += 1e-6
    save_tensors(weights, state)
    with pytest.raises(ConfigError, match="must have the fingerprint"):
        create_model(f"{spec},sha256={first}", SHAPE, 3, seed=0)
    state["linear1.bias"] -= 1e-6
    state["linear.bias"] += 1  # the layer that is not used
    save_tensors(weights, state)
    assert create_model("frozen:network=mlp:hidden=6/5,classes=7", SHAPE, 3, 0).trunk.fingerprint != first


def test_features_are_centred_by_public_pictures(weights):
    spec = f"frozen:network=mlp:hidden=6/5,weights={weights}"
    public = images(40)
    network, usual = (create_model(spec, SHAPE, 3, seed=0, public=some) for some in (public, None))
    normalised = (public - public.mean()) / public.std()
    found = network.trunk.features(normalised)
    assert float(found.mean(0).abs().max()) < 1e-3
    assert float(usual.trunk.features(normalised).mean(0).abs().max()) > 1e-2
    assert network.trunk.fingerprint != usual.trunk.fingerprint


def test_batch_norm_of_the_trunk_keeps_its_statistics():
    network = create_model("frozen:network=resnet20:width=2", (3, 12, 12), 3, seed=0).train()
    before = {name: tensor.clone() for name, tensor in network.trunk.state_dict().items()}
    network(torch.rand(5, 3, 12, 12)).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.trunk.state_dict().items())
    assert [name for name, parameter in network.named_parameters() if parameter.requires_grad] == ["head.weight"]


def test_a_uniform_start_leaves_the_trunk_alone():
    usual, uniform = (
        create_model(f"frozen:network=mlp:hidden=6,init={init}", SHAPE, 3, 0) for init in ("default", "uniform")
    )
    assert torch.equal(usual.trunk(images()), uniform.trunk(images()))
    assert bool(uniform.head.weight.any())


def test_networks_that_do_not_fit_are_refused(tmp_path):
    own = tmp_path / "nets.py"
    own.write_text(
        "from torch import nn\n"
        "def none(): return nn.Sequential(nn.Flatten(), nn.Flatten())\n"
        "def inner(num_classes):\n"
        "    layers = nn.Linear(144, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, num_classes, 1), nn.Flatten()\n"
        "    return nn.Sequential(nn.Flatten(), *layers)\n"
    )
    with pytest.raises(ConfigError, match=r"must end with a Linear layer.*without a Linear"):
        create_model(f"frozen:network={own}:none", SHAPE, 3, 0)
    with pytest.raises(ConfigError, match="must end with a Linear layer"):
        create_model(f"frozen:network={own}:inner", SHAPE, 3, 0)
    with pytest.raises(ConfigError, match="readable safetensors file"):
        create_model("frozen:weights=missing.safetensors", SHAPE, 3, 0)
    assert last_linear(create_model("lenet5", (1, 28, 28), 3, 0)) == "fc3"


@pytest.mark.parametrize("spec", ["frozen", "frozen:network=mlp", "frozen:weights="])
def test_a_trunk_without_weights_is_worth_a_warning(spec):
    assert "random weights" in random_trunk(spec)
    assert not random_trunk("frozen:network=mlp,weights=public.safetensors")
    assert not random_trunk("patches")


def test_training_on_a_random_trunk_warns_and_goes_on(gradveil, tmp_path):
    ended = gradveil(
        "train", "--model", "frozen:network=mlp", "--partition", "iid:images=10", "--clients", 2, "--rounds", 1,
        "--workers", 0, "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert ended.code == 0
    assert "Warning: Model 'frozen:network=mlp' freezes a network of random weights" in ended.err
