"""Normalisation, and networks from the user's own files."""

import pytest
import torch
from torch import nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.models import Normalisation, create_model, normalisation_of

OWN = """
import torch
from torch import nn
from dataclasses import dataclass
from gradveil.models import Model

def takes_both(shape, num_classes, width="4"):
    width = int(width)
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], width), nn.Linear(width, num_classes))

def takes_nothing():
    return nn.Flatten()

def needs_more(shape, depth):
    return nn.Flatten()

def breaks(num_classes):
    raise TypeError("no luck")

def forgets(shape):
    return "a network"

number = 3

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(4, num_classes)

    def forward(self, images):
        return self.head(images.mean((1, 2, 3))[:, None].expand(-1, 4))

@dataclass(frozen=True)
class Component(Model):
    width: int = 2

    def build(self, shape, num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], self.width), self.act())
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(OWN)
    return path


def test_own_factory_gets_the_arguments_it_accepts_and_settings_as_strings(own):
    network = create_model(f"{own}:takes_both:width=9", (1, 4, 4), 3, seed=0)
    assert [tuple(parameter.shape) for parameter in network.parameters()] == [(9, 16), (9,), (3, 9), (3,)]
    assert isinstance(create_model(f"{own}:takes_nothing", (1, 4, 4), 3, seed=0), nn.Flatten)


def test_own_class_is_seeded_and_normalised(own):
    before = torch.get_rng_state()
    one, two, other = (
        create_model(f"{own}:Net", (1, 4, 4), 3, seed, Normalisation((0.5,), (0.5,))) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.head.weight, two.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)
    torch.testing.assert_close(one(torch.full((1, 1, 4, 4), 0.5)), one.head.bias[None])


def test_own_model_subclass_is_a_component(own):
    network = create_model(f"{own}:Component:width=5,activation=tanh,init=uniform", (1, 4, 4), 3, seed=0)
    assert network[1].out_features == 5
    assert isinstance(network[2], nn.Tanh)
    assert network[1].weight.abs().max() > 0.3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_more", r"must be callable with \(shape\), got: missing a required argument: 'depth'"),
        ("takes_both:wdith=3", r"must be callable with \(shape, num_classes, wdith\), got: .*wdith"),
        ("takes_both:width=wide", r"failed when called with \(shape, num_classes, width\): ValueError.*as texts"),
        ("breaks", r"failed when called with \(num_classes\): TypeError: no luck"),
        ("forgets", r"must return a torch.nn.Module, got str"),
        ("number", r"must be a function or class that returns a torch.nn.Module, got 3"),
    ],
)
def test_wrong_factories_are_explained(own, name, message):
    with pytest.raises(ConfigError, match=message):
        create_model(f"{own}:{name}", (1, 4, 4), 3, seed=0)


def test_missing_names_and_files_are_explained(own, tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'takes_both'"):
        create_model(f"{own}:take_both", (1, 4, 4), 3, seed=0)
    with pytest.raises(ConfigError, match="There is no file"):
        create_model(f"{tmp_path}/none.py:net", (1, 4, 4), 3, seed=0)
    with pytest.raises(UnknownNameError, match=r"Unknown model 'lenet6'\. Did you mean 'lenet5'"):
        create_model("lenet6", (1, 28, 28), 3, seed=0)
    with pytest.raises(UnknownNameError, match=r"Model 'convnet' has no setting 'widht'\. Did you mean 'width'"):
        create_model("convnet:widht=3", (1, 28, 28), 3, seed=0)


def test_normalisation_is_applied_by_the_model_and_adds_no_parameters():
    normalisation = Normalisation((0.1, 0.2, 0.3), (0.5, 1.0, 2.0))
    plain = create_model("logistic", (3, 4, 4), 5, seed=0)
    network = create_model("logistic", (3, 4, 4), 5, seed=0, normalisation=normalisation)
    assert list(network.state_dict()) == list(plain.state_dict())
    images = torch.rand(2, 3, 4, 4)
    by_hand = torch.stack([(images[:, 0] - 0.1) / 0.5, images[:, 1] - 0.2, (images[:, 2] - 0.3) / 2], dim=1)
    torch.testing.assert_close(normalisation(images), by_hand)
    torch.testing.assert_close(network(images), plain(by_hand))
    assert normalisation_of(network) == normalisation
    assert normalisation_of(plain) is None


def test_normalisation_keeps_the_dtype_of_the_images():
    assert Normalisation((0.5,), (0.5,))(torch.ones(1, 1, 2, 2, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), (0.0,), "std must be more than 0, got 0"),
        ((0.5, 0.5), (0.5,), "one number per channel"),
        ((), (), "one number per channel"),
        ((float("nan"),), (1.0,), "mean must be a finite number, got nan"),
    ],
)
def test_wrong_normalisations_are_refused(mean, std, message):
    with pytest.raises(ConfigError, match=message):
        Normalisation(mean, std)


def test_normalisation_must_fit_the_channels():
    with pytest.raises(ConfigError, match="each of the 3 channels, got 2"):
        create_model("logistic", (3, 4, 4), 5, seed=0, normalisation=Normalisation((0, 0), (1, 1)))
