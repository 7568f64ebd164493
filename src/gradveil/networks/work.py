"""How much work a network is: multiplications of one forward pass, counted once per network and image size."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradveil.networks.watch import LayerCall, watch

_counted: "WeakKeyDictionary[nn.Module, dict[torch.Size, int]]" = WeakKeyDictionary()


def work_per_example(network: nn.Module, images: Tensor) -> int:
    """Return the multiplications of Linear and Conv2d layers in a forward pass, per example of images (N, C, H, W).

    Example:
        >>> work_per_example(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.zeros(2, 1, 2, 2))
        12
    """
    known = _counted.setdefault(network, {})
    if images.shape[1:] not in known:
        known[images.shape[1:]] = _count(network, images)
    return known[images.shape[1:]]


def _count(network: nn.Module, images: Tensor) -> int:
    total = 0

    def add(call: LayerCall) -> None:
        nonlocal total
        channels = call.output.shape[1] if isinstance(call.layer, nn.Conv2d) else call.output.shape[-1]
        weight = call.layer.weight
        total += call.output[0].numel() // max(1, channels) * (weight.numel() if isinstance(weight, Tensor) else 0)

    layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    with watch(network, layers, after=add), torch.no_grad():
        network(images)
    return total
