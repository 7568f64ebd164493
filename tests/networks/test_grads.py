import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.networks.grads import example_gradients, gradients_and_outputs, layer_inputs
from gradveil.networks.watch import watch
from gradveil.registry import components


def naive(network, images, labels, group_size=1):
    """Return gradients by a plain loop, one backward pass per group."""
    wanted = [p for p in network.parameters() if p.requires_grad]
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    rows = []
    for start in range(0, len(images), group_size):
        part = slice(start, start + group_size)
        loss = F.cross_entropy(network(images[part]), labels[part])
        found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        rows.append([g if g is not None else torch.zeros_like(p) for g, p in zip(found, wanted, strict=True)])
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def assert_equal(network, images, labels, group_size=1, tolerance=1e-9):
    fast = example_gradients(network, images, labels, group_size=group_size)
    slow = naive(network, images, labels, group_size)
    assert list(fast) == list(slow)
    for name, expected in slow.items():
        scale = max(1.0, expected.abs().max().item())
        assert (fast[name] - expected).abs().max().item() <= tolerance * scale, name


SMALL = {
    "convnet": "convnet:width=2", "resnet18": "resnet18:width=2", "resnet34": "resnet34:width=2",
    "vgg16": "vgg16:width=2", "densenet121": "densenet121:growth=2",
}  # fmt: skip


def build(name, shape=(3, 12, 12), classes=4):
    network = create_model(SMALL.get(name, name), shape, classes, seed=0).double().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that change the output
            torch.manual_seed(1)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


@pytest.mark.parametrize("name", list(components("models")))
def test_equals_a_naive_loop_on_every_model_of_the_zoo(name):
    torch.manual_seed(0)
    network = build(name, (3, 16, 16))
    images, labels = torch.rand(4, 3, 16, 16).double(), torch.tensor([0, 3, 3, 1])
    assert_equal(network, images, labels)
    assert_equal(network, images, labels, group_size=2)


@settings(deadline=None, max_examples=25)
@given(
    channels=st.sampled_from([2, 4]), out=st.sampled_from([2, 4, 6]), kernel=st.integers(1, 3),
    stride=st.integers(1, 3), padding=st.sampled_from([0, 1, 2, "same", "valid"]), dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(), mode=st.sampled_from(["zeros", "reflect", "circular"]), size=st.integers(7, 9),
)  # fmt: skip
def test_convolutions_of_any_shape(  # noqa: PLR0913 - one argument per setting of a convolution
    channels, out, kernel, stride, padding, dilation, groups, bias, mode, size
):
    if padding == "same":
        stride, kernel = 1, 3  # an even kernel makes torch warn
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, bias, mode)
    network = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    images = torch.rand(3, channels, size, size + 1).double()
    network(images)
    assert_equal(network, images, torch.tensor([0, 1, 2]))


class Scale(nn.Module):
    """A layer that has no rule for per-example gradients."""

    def __init__(self, size):
        super().__init__()
        self.factor = nn.Parameter(torch.rand(size))

    def forward(self, x):
        return torch.sin(x * self.factor)


class Wrapped(nn.Module):
    """A network with a parameter besides its children: only vmap over the whole network reaches it."""

    def __init__(self):
        super().__init__()
        self.body, self.gain = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.body(x.flatten(1)) * self.gain


def tied():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, first, nn.Linear(6, 3))


NETWORKS = {
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3)
    ),
    "layer norm": lambda: nn.Sequential(nn.Flatten(1, 2), nn.LayerNorm((2, 3)), nn.Flatten(), nn.Linear(6, 3)),
    "linear on positions": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ),
    "layer of the user's": lambda: nn.Sequential(nn.Flatten(), Scale(6), nn.Linear(6, 3)),
    "parameter beside children": Wrapped,
    "tied and used twice": tied,
    "in place": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "batch norm 1d": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "prelu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 3)),
    "frozen layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_other_layers(name):
    torch.manual_seed(0)
    network = NETWORKS[name]().double().eval()
    images = torch.randn(4, 1, 2, 3).double()
    assert_equal(network, images, torch.tensor([0, 1, 2, 2]))
    assert_equal(network, images, torch.tensor([0, 1, 2, 2]), group_size=4)


@pytest.mark.parametrize("network", ["lenet-dlg", "convnet:width=2,activation=sigmoid", "lenet5:activation=sigmoid"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_the_result_can_be_differentiated_again(network, group_size):
    torch.manual_seed(0)
    network = build(network, (2, 14, 14), 4)
    soft = torch.rand(4, 4).double().softmax(1)
    results = []
    for gradients in (
        lambda x, y: example_gradients(network, x, y, group_size=group_size, create_graph=True),
        lambda x, y: naive(network, x, y, group_size),
    ):
        images = torch.rand(4, 2, 14, 14, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
        labels = soft.clone().requires_grad_()
        total = sum((g.square() * (i + 1)).sum() for i, g in enumerate(gradients(images, labels).values()))
        results.append(torch.autograd.grad(total, [images, labels]))
    for fast, slow in zip(*results, strict=True):
        assert (fast - slow).abs().max() <= 1e-9 * max(1.0, slow.abs().max().item())
        assert fast.abs().max() > 0


def test_the_network_is_left_unchanged():
    network = build("lenet-dlg")
    before = copy.deepcopy(network.state_dict())
    images = torch.rand(2, 3, 12, 12).double()
    gradients = example_gradients(network, images, torch.tensor([0, 1]))
    assert all(p.grad is None for p in network.parameters())
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert not any(layer._forward_hooks for layer in network.modules())
    assert not any(g.requires_grad for g in gradients.values())


def test_batch_norm_in_training_mode_is_refused():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(6, 3))
    with pytest.raises(ConfigError, match="evaluation mode"):
        example_gradients(network, torch.rand(2, 1, 2, 3), torch.tensor([0, 1]))


def test_group_size_must_divide():
    with pytest.raises(ConfigError, match="group_size"):
        example_gradients(nn.Flatten(), torch.rand(3, 1, 2, 3), torch.zeros(3).long(), group_size=2)


@pytest.mark.parametrize("spec", ["lenet-dlg", "mlp:hidden=7"])
def test_gradients_and_outputs_agree_with_autograd(spec):
    network, images = build(spec, (1, 8, 8), 5), torch.rand(3, 1, 8, 8).double().requires_grad_()
    labels = torch.tensor([0, 4, 2])
    for _ in range(2):  # the first call also compares gradients with autograd's
        gradients, outputs = gradients_and_outputs(network, images, labels)
        expected = example_gradients(network, images, labels)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
        assert torch.allclose(outputs, network(images))
        slope = torch.autograd.grad(outputs.square().sum(), images)[0]
        assert torch.allclose(slope, torch.autograd.grad(network(images).square().sum(), images)[0])


def test_layer_inputs_are_the_inputs_of_the_layers():
    network = build("mlp:hidden=7", (1, 3, 3), 5)
    images = torch.rand(2, 1, 3, 3).double()
    last, first = layer_inputs(network, ["linear", "linear1"], images)
    assert torch.equal(first, images.flatten(1))
    assert torch.equal(network.linear(last), network(images))
    assert not any(layer._forward_pre_hooks for layer in network.modules())
    with pytest.raises(ConfigError, match="'1' must be used once in a forward pass, got 2"):
        layer_inputs(tied(), ["1"], torch.rand(2, 1, 2, 3))


class _Standardised(nn.Conv2d):
    def forward(self, images):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return torch.nn.functional.conv2d(images, weight, self.bias)


class _Behind(nn.Module):
    """A network that uses a layer's weight a second time, outside the layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 5), nn.Linear(64, 3)

    def forward(self, images):
        hidden = self.first(images.flatten(1)).tanh()
        return self.last(nn.functional.linear(hidden, self.first.weight.t()))


class _Hooked(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))
        self[1].register_forward_hook(lambda layer, inputs, output: 2 * output)


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(_Standardised(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)),
        _Behind(),
        _Hooked(),
        nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 3))),
    ],
)
def test_unusual_networks_still_get_correct_gradients(network):
    network = network.double()
    images, labels = torch.rand(4, 1, 8, 8, dtype=torch.double), torch.tensor([0, 1, 2, 0])
    found = example_gradients(network, images, labels)
    for index in range(4):
        loss = nn.functional.cross_entropy(network(images[index : index + 1]), labels[index : index + 1])
        theirs = torch.autograd.grad(loss, list(network.parameters()))
        for (name, _), gradient in zip(network.named_parameters(), theirs, strict=True):
            torch.testing.assert_close(found[name][index], gradient)


@pytest.mark.parametrize("spec", ["lenet-dlg", "resnet20:width=4"])
def test_groups_that_are_played_one_by_one_give_the_same_gradients_and_derivatives(spec, monkeypatch):
    network, images = build(spec, (3, 12, 12), 4), torch.rand(6, 3, 12, 12).double().requires_grad_()
    labels = torch.tensor([0, 1, 2, 3, 0, 1])

    def slopes():
        gradients = example_gradients(network, images, labels, group_size=3, create_graph=True)
        loss = sum(gradient.square().sum() for gradient in gradients.values())
        return gradients, torch.autograd.grad(loss, images)[0]

    together, slope = slopes()
    monkeypatch.setattr("gradveil.networks.grads._LOOPED", 0)
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr("gradveil.networks.grads._by_layers", lambda *given: calls.append(given))
        alone, other = slopes()
    assert not calls
    assert all(torch.allclose(alone[name], together[name], atol=1e-9) for name in together)
    assert torch.allclose(slope, other, atol=1e-9)


def test_groups_stay_together_if_somebody_watches_the_layers(monkeypatch):
    network, images = build("lenet-dlg", (3, 12, 12), 4), torch.rand(4, 3, 12, 12).double()
    monkeypatch.setattr("gradveil.networks.grads._LOOPED", 0)
    sizes = []
    with watch(network, after=lambda call: sizes.append(len(call.output))):
        example_gradients(network, images, torch.tensor([0, 1, 2, 3]), group_size=2)
    assert set(sizes) == {4}
