"""The Linear layer whose gradient gives a batch away: the first on images, or the first on features."""

from typing import NamedTuple

import torch
from torch import nn

from gradveil.attacks.parts.analytic import first_linear
from gradveil.attacks.parts.exact_batches import ReluLayer
from gradveil.attacks.parts.following import next_linear, relu_follows
from gradveil.errors import ConfigError
from gradveil.networks.watch import record


class AttackedLayer(NamedTuple):
    """The Linear layer that is attacked.

    Attributes:
        name: its name.
        shape: (C, H, W) if its input is the image, (D,) if convolutions or other layers come first.
        layer: its weight and bias.
        relu: whether a ReLU follows.
        after: the name of the Linear layer after the ReLU, or "".
    """

    name: str
    shape: tuple[int, ...]
    layer: ReluLayer
    relu: bool
    after: str

    @property
    def on_images(self) -> bool:
        """Whether the layer sees the image itself."""
        return len(self.shape) == 3


def attacked_layer(network: nn.Module, shape: tuple[int, int, int]) -> AttackedLayer:
    """Return the layer to attack: the first on the image itself, or the first on features.

    Raises:
        ConfigError: if there is none.
    """
    try:
        name, seen = first_linear(network, shape), tuple[int, ...](shape)
    except ConfigError as error:
        name, seen = first_on_features(network, shape), ()
        if not name:
            raise ConfigError(
                "The network must have a Linear layer with bias that sees one vector per image, got none. "
                "Use --attacks gs."
            ) from error
    linear = network.get_submodule(name)
    layer = ReluLayer(*(linear.get_parameter(key).detach().double().cpu() for key in ("weight", "bias")))
    relu = relu_follows(network, shape, name)
    return AttackedLayer(
        name, seen or (layer.weight.shape[1],), layer, relu, next_linear(network, shape, name) if relu else ""
    )


def first_on_features(network: nn.Module, shape: tuple[int, int, int]) -> str:
    """Return the name of the first Linear layer with bias that sees one vector per image, once, or "" if none does."""
    names = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    training, like = network.training, next(network.parameters())
    with torch.no_grad(), record(network, names) as calls:
        network.eval()(torch.zeros(2, *shape).to(like))
        network.train(training)
    order = [call.name for call in calls]
    fits = (call for call in calls if call.inputs[0].dim() == 2 and len(call.inputs[0]) == 2)
    return next((call.name for call in fits if call.layer.bias is not None and order.count(call.name) == 1), "")
