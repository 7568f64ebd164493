import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.errors import ConfigError
from gradveil.networks.grads import example_gradients
from gradveil.networks.grouped import BatchNormOfGroups


@given(st.integers(1, 3), st.integers(2, 4), st.integers(1, 3), st.booleans())
@settings(deadline=None, max_examples=25)
def test_each_group_is_what_torch_makes_of_it_alone(groups, size, channels, affine):
    rng = torch.Generator().manual_seed(groups * 100 + size * 10 + channels)
    layer = nn.BatchNorm2d(channels, affine=affine).double()
    if affine:
        layer.weight.data = torch.rand(channels, generator=rng, dtype=torch.double)
        layer.bias.data = torch.rand(channels, generator=rng, dtype=torch.double)
    inputs = torch.randn(groups * size, channels, 3, 5, generator=rng, dtype=torch.double)
    found = BatchNormOfGroups(layer, size)(inputs)
    wanted = torch.cat([layer.train()(some) for some in torch.split(inputs, size)])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(BatchNormOfGroups(layer, 0)(inputs), layer(inputs))


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(72, 3)).double()


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_groups_equal_those_of_training_mode_one_group_at_a_time(size):
    rng = torch.Generator().manual_seed(1)
    images = torch.rand(6, 1, 8, 8, generator=rng, dtype=torch.double)
    labels = torch.arange(6) % 3
    layer = nn.BatchNorm2d(2)
    plain = network(layer).train()
    layer.weight.data = torch.tensor([0.5, 2.0], dtype=torch.double)
    ours = nn.Sequential(*plain)
    ours[1] = BatchNormOfGroups(layer, size)
    found = example_gradients(ours, images, labels, group_size=size)
    for group, (some, own) in enumerate(zip(torch.split(images, size), torch.split(labels, size), strict=True)):
        loss = nn.functional.cross_entropy(plain(some), own)
        for (name, _), wanted in zip(
            plain.named_parameters(), torch.autograd.grad(loss, [*plain.parameters()]), strict=True
        ):
            torch.testing.assert_close(found[name][group], wanted, rtol=1e-4, atol=1e-9)


def test_groups_of_another_size_are_refused():
    images, labels = torch.rand(4, 1, 8, 8, dtype=torch.double), torch.arange(4) % 3
    with pytest.raises(ConfigError, match="mixed"):
        example_gradients(network(BatchNormOfGroups(nn.BatchNorm2d(2), 4)), images, labels, group_size=2)
