"""Loading generators: accepted files and factories, and clear errors for all others."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.errors import ConfigError, DataError
from gradveil.generators import Generator, load_generator
from gradveil.generators.base import KEYS
from gradveil.registry import build, components
from gradveil.storage import save_tensors

SHAPE = (1, 6, 5)


def sequence(latent=4, hidden=7, pixels=30):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, pixels), nn.Tanh()
    )


@pytest.mark.parametrize("name", components("generators"))
def test_every_generator_makes_images_row_by_row_and_has_gradients(name):
    network = build(Generator, f"{name}:latent=4").build((3, 12, 20), 5).eval()
    latents = torch.randn(6, 4, requires_grad=True)
    labels = torch.arange(6) % 5
    images = network(latents, labels)
    assert images.shape == (6, 3, 12, 20)
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.allclose(images[2:4], network(latents[2:4], labels[2:4]), atol=1e-6)
    assert torch.autograd.grad(images.sum(), latents)[0].abs().min() > 0


def test_plain_weights_of_three_layers_are_read_by_position(tmp_path):
    theirs = sequence()
    save_file(theirs.state_dict(), tmp_path / "g.safetensors")
    network = load_generator(str(tmp_path / "g.safetensors"), SHAPE, 3)
    latents = torch.randn(8, 4)
    assert network.latent == 4
    assert torch.allclose(network(latents), (theirs(latents).view(8, *SHAPE) + 1) / 2, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert network.keys == frozenset()


def test_our_own_file_names_its_generator_classes_and_images(tmp_path):
    made = build(Generator, "dcgan:latent=3,width=2").build((1, 8, 8), 4).eval()
    tensors = {**made.state_dict(), KEYS: torch.tensor([5, -7])}
    path = tmp_path / "g.safetensors"
    save_tensors(path, tensors, {"generator": "dcgan:latent=3,width=2", "classes": "4"})
    network = load_generator(str(path), (1, 8, 8), 4)
    latents, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    assert torch.equal(network(latents, labels), made(latents, labels))
    assert network.conditional
    assert network.keys == {5, -7}
    with pytest.raises(ConfigError, match=r"images of shape \(1, 16, 16\).*do not fit"):
        load_generator(str(path), (1, 16, 16), 4)


def test_soft_labels_are_accepted():
    network = build(Generator, "dcgan:latent=3,width=2").build((1, 8, 8), 4).eval()
    latents = torch.randn(2, 3)
    hard = torch.nn.functional.one_hot(torch.tensor([1, 2]), 4).float()
    assert torch.equal(network(latents, hard), network(latents, torch.tensor([1, 2])))
    assert not torch.equal(network(latents, torch.tensor([2, 2])), network(latents, torch.tensor([1, 2])))


OWN = """
from torch import nn, zeros
class Net(nn.Module):
    latent = {latent}
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.layer = nn.Linear(2, 30)
    def forward(self, latents):
        return self.layer(latents).{end}().view(-1, *self.shape){more}
def factory(shape):
    return Net(shape)
"""


def own(tmp_path, latent="2", end="sigmoid", more=""):
    path = tmp_path / f"own_{end}_{len(more)}_{latent}.py"
    path.write_text(OWN.format(latent=latent, end=end, more=more))
    return f"{path}:factory"


def test_own_factory(tmp_path):
    network = load_generator(own(tmp_path), SHAPE, 3)
    assert network(torch.zeros(2, 2), torch.zeros(2)).shape == (2, *SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"end": "tanh"}, r"images in \[0, 1\], got -.*tanh"),
        ({"more": "[..., :3]"}, r"images of shape \(1, 6, 5\), got \(1, 6, 3\)"),
        ({"latent": "None"}, "number `latent`, at least 1, got None"),
        ({"latent": "3"}, r"take latents \(N, 3\), got RuntimeError"),
    ],
)
def test_a_factory_that_does_not_fit_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_generator(own(tmp_path, **changes), SHAPE, 3)


def test_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no file\. Train one: gradveil train-generator"):
        load_generator(str(tmp_path / "none.safetensors"), SHAPE, 3)
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match=r"layers 0, 2 and 4 of a sequence, got other.*file.py:factory"):
        load_generator(str(tmp_path / "other.safetensors"), SHAPE, 3)
    (tmp_path / "cut.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="whole safetensors"):
        load_generator(str(tmp_path / "cut.safetensors"), SHAPE, 3)
    save_file(sequence().state_dict(), tmp_path / "g.safetensors")
    with pytest.raises(ConfigError, match=r"4\.weight"):
        load_generator(str(tmp_path / "g.safetensors"), (1, 8, 8), 3)
