import torch
from torch import nn

from gradveil.attacks.parts.following import next_linear, relu_follows

SHAPE = (1, 2, 2)


def network(*after):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), *after).eval()


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, images):
        return self.last(torch.relu(self.first(images.flatten(1))))


def test_a_relu_is_found_as_a_layer_and_as_a_function():
    assert relu_follows(network(nn.ReLU(), nn.Linear(6, 3)), SHAPE, "1")
    assert relu_follows(Functional(), SHAPE, "first")


def test_another_activation_is_no_relu():
    for other in (nn.Sigmoid(), nn.LeakyReLU(), nn.BatchNorm1d(6)):
        assert not relu_follows(network(other, nn.ReLU(), nn.Linear(6, 3)), SHAPE, "1")


def test_the_next_linear_is_the_one_that_takes_the_relu():
    assert next_linear(network(nn.ReLU(), nn.Linear(6, 3)), SHAPE, "1") == "3"
    assert next_linear(Functional(), SHAPE, "first") == "last"
    assert next_linear(network(nn.ReLU(), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)), SHAPE, "1") == ""
