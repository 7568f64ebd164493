"""Laws that every model of the zoo must keep; the registry finds the models."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.models import Model, create_model
from gradveil.models.base import ACTIVATIONS
from gradveil.models.trunk import FeatureNetwork
from gradveil.registry import build, components

ZOO = components("models")
SMALL = {
    "convnet": "convnet:width=4",
    "frozen": "frozen:network=mlp:hidden=400",
    "densenet121": "densenet121:growth=4",
    "mlp": "mlp:hidden=16/8",
    "resnet18": "resnet18:width=4",
    "resnet20": "resnet20:width=4",
    "resnet32": "resnet32:width=4",
    "resnet34": "resnet34:width=4",
    "vgg16": "vgg16:width=4",
}
"""Narrower versions of the same networks, for tests that do not depend on the width."""
HEADS = ("frozen", "patches")
"""Models with a frozen trunk."""


def small(name, **settings):
    spec = SMALL.get(name, name)
    extra = ",".join(f"{key}={value}" for key, value in settings.items())
    return spec + ("," if ":" in spec else ":") * bool(extra) + extra


def images(shape, count=2):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


def test_zoo_is_complete():
    named = "convnet densenet121 frozen lenet-dlg lenet5 logistic mlp patches resnet18 resnet20 resnet32 resnet34 vgg16"
    assert set(named.split()) <= ZOO.keys()


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (2, 33, 45)], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_defaults_give_finite_logits_for_any_shape(name, shape):
    network = create_model(name, shape, num_classes=7, seed=0).eval()
    if isinstance(network, FeatureNetwork):  # its head begins at zero
        nn.init.eye_(network.head.weight.data)
    with torch.no_grad():
        logits = network(images(shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    assert not torch.equal(logits[0], logits[1]), "the logits do not depend on the image"


@pytest.mark.parametrize("name", ZOO)
def test_smallest_image_works_and_one_pixel_less_is_refused(name):
    smallest = ZOO[name].smallest
    network = create_model(small(name), (1, smallest, smallest + 1), 3, seed=0).eval()
    assert network(images((1, smallest, smallest + 1))).shape == (2, 3)
    with pytest.raises(ConfigError, match=rf"'{name}' must be at least {smallest}x{smallest}, got \d+x{smallest - 1}"):
        create_model(small(name), (1, smallest + 1, smallest - 1), 3, seed=0)


@pytest.mark.parametrize("name", ZOO)
def test_training_reaches_every_parameter(name):
    network = create_model(small(name, activation="softplus"), (3, 28, 28), 5, seed=0)  # so that no unit is dead
    network.train()(images((3, 28, 28), count=3)).logsumexp(1).sum().backward()
    assert [key for key, parameter in network.named_parameters() if parameter.grad is None] == []
    network.zero_grad()
    network.eval()(images((3, 28, 28), count=3)).logsumexp(1).sum().backward()
    dead = [key for key, parameter in network.named_parameters() if not parameter.grad.any()]
    assert dead == []


@pytest.mark.parametrize("name", ZOO)
def test_gradient_of_the_gradient_exists(name):
    """Every attack by gradient matching differentiates the gradient with respect to the image."""
    network = create_model(small(name, activation="softplus"), (1, 28, 28), 5, seed=0).eval()
    image = images((1, 28, 28), count=1).requires_grad_()
    loss = nn.functional.cross_entropy(network(image), torch.tensor([2]))
    gradient = torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(sum(part.square().sum() for part in gradient), image)
    assert second.isfinite().all()
    assert second.any()


@pytest.mark.parametrize("name", ZOO)
def test_same_seed_same_bits_and_global_generator_untouched(name):
    before = torch.get_rng_state()
    one, two, other = (create_model(small(name), (1, 28, 28), 4, seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], two[key]) for key in one)
    drawn = name not in HEADS  # a head begins at zero, and its trunk is the same for everybody
    assert any(not torch.equal(one[key], other[key]) for key in one) == drawn


@pytest.mark.parametrize("name", ZOO)
def test_uniform_init_fills_plus_minus_half(name):
    network = create_model(small(name, init="uniform"), (1, 28, 28), 4, seed=0)
    for parameter in network.parameters():
        assert parameter.abs().max() <= 0.5
    everything = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert everything.std() == pytest.approx(1 / 12**0.5, rel=0.05)
    assert everything.abs().max() > 0.49
    assert network.eval()(images((1, 28, 28))).isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ZOO)
def test_every_activation_is_used_out_of_place_and_once_per_module(name, activation):
    network = create_model(small(name, activation=activation), (1, 14, 14), 4, seed=0).eval()
    wanted = type(ACTIVATIONS[activation]())
    kinds = tuple(type(make()) for make in ACTIVATIONS.values())
    found = [module for module in network.modules() if isinstance(module, kinds)]
    assert {type(module) for module in found} == ({wanted} if name not in ("logistic", "patches") else set())
    assert not any(getattr(module, "inplace", False) for module in found)
    calls = []
    for module in found:
        module.register_forward_hook(lambda module, inputs, output: calls.append(module))
    logits = network(images((1, 14, 14)))
    assert logits.isfinite().all()
    assert sorted(map(id, calls)) == sorted(map(id, found)), "each activation module must be used exactly once"


@pytest.mark.parametrize("name", ZOO)
def test_spec_builds_the_same_component_again(name):
    model = build(Model, name)
    assert model.spec == name
    changed = dataclasses.replace(build(Model, small(name)), activation="elu")
    assert build(Model, changed.spec) == changed
    assert "activation=elu" in changed.spec


@pytest.mark.parametrize("name", ZOO)
def test_docstring_names_reference_and_every_setting(name):
    text = ZOO[name].__doc__
    assert re.search(r"^    Reference: .+ (19|20)\d\d.*https://", text, re.MULTILINE)
    assert "Differs from the paper:" in text
    inherited = {field.name for field in dataclasses.fields(Model)}
    for field in dataclasses.fields(ZOO[name]):
        assert field.name in inherited or re.search(rf"^        {field.name}: ", text, re.MULTILINE), field.name


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("setting", ["activation", "init"])
def test_unknown_choices_are_refused_when_built(name, setting):
    with pytest.raises(UnknownNameError, match=f"Unknown {setting} 'sigmoyd'"):
        build(Model, f"{name}:{setting}=sigmoyd")


@pytest.mark.parametrize(
    "spec",
    [
        "lenet-dlg:convs=0",
        "lenet-dlg:width=0",
        "convnet:width=0",
        "mlp:hidden=20/0",
        "resnet20:width=-1",
        "resnet20:shortcut=C",
        "resnet18:width=0",
        "resnet34:stem=5x5",
        "vgg16:head=none",
        "vgg16:dropout=1",
        "vgg16:hidden=0",
        "vgg16:width=0",
        "densenet121:growth=0",
        "densenet121:stem=1x1",
    ],
)
def test_settings_out_of_range_are_refused_when_built(spec):
    setting = re.search(r":(\w+)=", spec)[1]
    with pytest.raises(ConfigError, match=rf"^(Unknown )?{setting}"):
        build(Model, spec)


def test_impossible_shapes_are_refused():
    with pytest.raises(ConfigError, match="num_classes must be at least 1, got 0"):
        create_model("mlp", (1, 8, 8), 0, seed=0)
    with pytest.raises(ConfigError, match="channels must be at least 1, got 0"):
        create_model("mlp", (0, 8, 8), 2, seed=0)


@pytest.mark.parametrize("name", ZOO)
def test_group_norm_takes_the_place_of_batch_norm(name):
    network = create_model(small(name, norm="group"), (1, 28, 28), 4, seed=0)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in network.modules())
    assert network.train()(images((1, 28, 28), count=1)).isfinite().all(), "a single image is enough"
