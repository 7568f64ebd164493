"""Random LPIPS weights of the true shapes in a data root, so that no test needs the published ones."""

import pytest
import torch
from safetensors.torch import save_file

from gradveil.metrics.lpips_alex import LpipsAlex
from gradveil.metrics.lpips_vgg import LpipsVgg


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_trunk(kind, seed=0):
    """Draw weights of all convolutions, scaled so that features neither vanish nor explode."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, layer in enumerate(kind.layers()):
        if isinstance(layer, torch.nn.Conv2d):
            shape = layer.weight.shape
            tensors[f"features.{index}.weight"] = torch.randn(shape, generator=rng) * (2 / shape[1:].numel()) ** 0.5
            tensors[f"features.{index}.bias"] = torch.randn(shape[0], generator=rng) * 0.1
    return tensors


def random_heads(kind, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(1, channels, 1, 1) for channels in kind.compared.values()]
    return {f"lin{index}.model.1.weight": torch.rand(shape, generator=rng) for index, shape in enumerate(shapes)}


@pytest.fixture(scope="session")
def random_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    (root / "weights").mkdir()
    for kind in (LpipsAlex, LpipsVgg):
        save_file(random_trunk(kind) | random_heads(kind), root / "weights" / kind.default_file)
    return root


@pytest.fixture
def with_weights(random_root, monkeypatch):
    monkeypatch.setenv("GRADVEIL_DATA", str(random_root))


@pytest.fixture
def without_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "empty"))
    return tmp_path / "empty"
