import pickle

import pytest
import torch
from safetensors.torch import save_file

from gradveil.errors import ConfigError
from gradveil.models import create_model, load_weights


def network(seed=0, spec="resnet20:width=2"):
    return create_model(spec, (1, 8, 8), 3, seed)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def save(path, **changes):
    tensors = {key: tensor.clone() for key, tensor in network(seed=1).state_dict().items()} | changes
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)


def same(one, two):
    return all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def test_all_tensors_are_loaded(path):
    save(path, **{"bn1.running_mean": torch.tensor([3.0, 4.0])})
    loaded = network(seed=0)
    load_weights(loaded, path)
    assert same(loaded.state_dict(), network(seed=1).state_dict() | {"bn1.running_mean": torch.tensor([3.0, 4.0])})


def test_the_counter_of_batch_norm_may_be_absent(path):
    counters = [key for key in network().state_dict() if key.endswith("num_batches_tracked")]
    assert counters
    save(path, **dict.fromkeys(counters))
    loaded = network(seed=0)
    load_weights(loaded, path)
    assert same(loaded.state_dict(), network(seed=1).state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear.bias": None}, r"got missing: linear\.bias\. Check the model"),
        ({"fc.bias": torch.zeros(3)}, r"got unexpected: fc\.bias\."),
        ({"linear.bias": torch.zeros(10)}, r"got wrong shape: linear\.bias \(10,\) instead of \(3,\)\."),
        (
            {"linear.bias": None, "fc.bias": torch.zeros(3), "bn1.bias": torch.zeros(4)},
            r"missing: linear.bias; unexpected: fc.bias; wrong shape: bn1.bias",
        ),
        ({f"extra{i}": torch.zeros(1) for i in range(5)}, r"unexpected: extra0, extra1, extra2 and 2 more\."),
    ],
)
def test_mismatches_are_named_and_nothing_is_loaded(path, changes, message):
    save(path, **changes)
    loaded = network(seed=0)
    with pytest.raises(ConfigError, match=message):
        load_weights(loaded, path)
    assert same(loaded.state_dict(), network(seed=0).state_dict())


def test_pickles_and_invalid_files_are_never_opened(path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was opened",))

    for content in (pickle.dumps(Bomb()), b"", b"rubbish" * 9):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="must be a readable safetensors file"):
            load_weights(network(), path)
    torch.save(network().state_dict(), path)
    with pytest.raises(ConfigError, match=r"save_file\(model.state_dict\(\), path\)"):
        load_weights(network(), path)


def test_missing_files_and_folders_are_refused(path, tmp_path):
    for wrong in (path, tmp_path):
        with pytest.raises(ConfigError, match="must be a readable safetensors file"):
            load_weights(network(), wrong)
