"""Files of other frameworks: checkpoints of torch, .npz with and without names, and pickles that hold more."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.errors import ConfigError, DataError
from gradveil.own import adopt
from gradveil.runs.inputs import load_network, named, observe_files, read_sent, read_tensors
from gradveil.runs.update_spec import UpdateSpec

CPU = torch.device("cpu")


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def spec(**changes):
    usual = {"shape": (1, 4, 4), "num_classes": 3, "kind": "weights", "lr": 0.5, "num_examples": 1}
    return UpdateSpec(adopt("files-net", net), **usual | changes)


@pytest.fixture
def trained():
    """Return the tensors of a network before and after one step in evaluation mode, and the gradient of that step."""
    torch.manual_seed(0)
    network = net().eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    nn.functional.cross_entropy(network(torch.rand(1, 1, 4, 4)), torch.tensor([1])).backward()
    gradient = {name: p.grad.clone() for name, p in network.named_parameters()}
    torch.optim.SGD(network.parameters(), 0.5).step()
    return before, dict(network.state_dict()), gradient


def saved(folder, name, tensors):
    """Save tensors in the way that a framework does; return the path."""
    path = folder / name
    plain = {key: tensor.numpy() for key, tensor in tensors.items()}
    ways = {
        "plain.pt": lambda: torch.save(tensors, path),
        "checkpoint.pth": lambda: torch.save({"epoch": 3, "state_dict": tensors, "optimizer": {"lr": 0.1}}, path),
        "wrapped.ckpt": lambda: torch.save({f"module.{key}": value for key, value in tensors.items()}, path),
        "named.npz": lambda: np.savez(path, **plain),
        "listed.npz": lambda: np.savez(path, *plain.values()),
        "plain.safetensors": lambda: save_file(tensors, path),
    }
    ways[name]()
    return path


WAYS = ("plain.pt", "checkpoint.pth", "wrapped.ckpt", "named.npz", "listed.npz", "plain.safetensors")


@pytest.mark.parametrize("before_as", WAYS)
@pytest.mark.parametrize("after_as", ["checkpoint.pth", "listed.npz"])
def test_weights_before_and_after_give_the_gradient(tmp_path, trained, before_as, after_as):
    before, after, gradient = trained
    (tmp_path / "after").mkdir()
    files = saved(tmp_path, before_as, before), saved(tmp_path / "after", after_as, after)
    seen = observe_files(spec(), files[0], [files[1]], CPU)
    for name, wanted in gradient.items():
        torch.testing.assert_close(seen.gradients[name][0], wanted, rtol=1e-4, atol=1e-6)


def test_a_change_may_be_a_torch_file(tmp_path, trained):
    before, after, _ = trained
    change = {name: after[name] - old for name, old in before.items() if old.is_floating_point()}
    network, _ = load_network(spec(kind="change"), saved(tmp_path, "plain.pt", before), CPU)
    torch.save(change, tmp_path / "update.pt")
    found = read_sent(tmp_path / "update.pt", network, spec(kind="change"))
    assert {name: torch.equal(found[name], change[name]) for name in change} == dict.fromkeys(change, True)


class Runs:
    def __reduce__(self):
        return (pytest.fail, ("code was run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": Runs()}, "must hold tensors and plain values only"),
        (nn.Linear(2, 2), r"no code in it is run, got torch\.nn\.modules\.linear\.Linear\. Save"),
        ([torch.zeros(2)], "must hold tensors by name, got list"),
        ({"epoch": 3}, "must hold tensors by name, got none"),
    ],
)
def test_torch_files_with_more_than_tensors_are_refused_and_run_nothing(tmp_path, content, message):
    torch.save(content, tmp_path / "u.pt")
    with pytest.raises(DataError, match=message):
        read_tensors(tmp_path / "u.pt")


def test_old_pickles_under_the_name_of_a_torch_file_are_never_opened(tmp_path):
    torch.save({"a": Runs()}, tmp_path / "u.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match="never opened"):
        read_tensors(tmp_path / "u.pt")


def test_unnamed_arrays_follow_the_order_of_the_model(trained):
    before, _, gradient = trained
    unnamed = {f"arr_{number}": tensor for number, tensor in enumerate(gradient.values())}
    assert list(named(unnamed, net())) == list(gradient)
    assert list(named({"arr_0": torch.zeros(1)}, net())) == ["arr_0"]
    assert named(before, net()) == before


def test_weights_that_do_not_fit_are_refused(tmp_path, trained):
    before, after, _ = trained
    model = saved(tmp_path, "plain.pt", before)
    torch.save(after | {"1.weight": torch.zeros(2)}, tmp_path / "u.pt")
    with pytest.raises(ConfigError, match=r"1.weight of .* must have the shape"):
        observe_files(spec(), model, [tmp_path / "u.pt"], CPU)
    with pytest.raises(ConfigError, match="must have the names and shapes"):
        load_network(spec(num_classes=4), saved(tmp_path, "checkpoint.pth", {"a": torch.zeros(2)}), CPU)
    with pytest.raises(ConfigError, match="lr must be the clients' learning rate if kind is 'weights'"):
        spec(lr=None)
