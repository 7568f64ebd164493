"""Networks without convolutions: the multi-layer perceptron and its simplest case, softmax regression."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from gradveil.models.base import Model
from gradveil.validate import in_range


@dataclass(frozen=True)
class Mlp(Model):
    """Fully connected layers on the flattened image; the default is FedAvg's "2NN" (199,210 parameters on MNIST).

    Its first layer has a bias, so one image can be read off its gradient exactly: (dL/dW)_i / (dL/db)_i.

    Reference: McMahan et al. 2017, https://arxiv.org/abs/1602.05629, Section 3 (the MNIST 2NN).
    Differs from the paper: nothing in the network.

    Attributes:
        hidden: widths of the hidden layers, written ``hidden=200/200`` in a spec; empty for softmax regression.
    """

    hidden: tuple[int, ...] = (200, 200)

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.hidden:
            in_range("hidden", width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build Flatten, then Linear and activation per hidden width, then Linear to the classes."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        inputs = math.prod(shape)
        for index, width in enumerate(self.hidden, start=1):
            layers[f"linear{index}"] = nn.Linear(inputs, width)
            layers[f"act{index}"] = self.act()
            inputs = width
        layers["linear"] = nn.Linear(inputs, num_classes)
        return nn.Sequential(layers)


@dataclass(frozen=True)
class Logistic(Model):
    """Softmax regression: one Linear on the flattened image (7,850 parameters on MNIST); a convex problem.

    There is no hidden layer, so the ``activation`` setting changes nothing.

    Reference: Li et al. 2020 (FedProx), https://arxiv.org/abs/1812.06127, Section 5 (the convex MNIST task).
    Differs from the paper: nothing in the network.
    """

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build Flatten, then Linear to the classes."""
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(math.prod(shape), num_classes)))
