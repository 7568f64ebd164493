"""A canary's gradient: a network that answers an image with a gradient chosen beforehand, and random directions."""

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.randomness import stream
from gradveil.types import Batch

_PIXELS = 8
"""Pixels by which a canary's image is recognised; they are random numbers, which no stored image has."""


class CanaryNetwork(nn.Module):
    """A network with the parameters of another, whose loss has a given gradient for each canary's image.

    All images have the label 0. The loss of a canary's image has minus the canary's gradient, whatever the weights are,
    so that a step of SGD moves along it; the loss of any other image has a gradient of zero.
    """

    def __init__(self, like: nn.Module, gradients: Tensor, shape: tuple[int, int, int], seed: int) -> None:
        super().__init__()
        copied = copy.deepcopy(like)
        for name, child in copied.named_children():
            self.add_module(name, child)
        for name, parameter in copied.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in copied.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        first = next(self.parameters())
        drawn = torch.rand(len(gradients), *shape, generator=stream(seed, "canaries", "images"))
        self._images = drawn.to(first)  # (K, C, H, W)
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        pieces = torch.split(gradients.to(first), [p.numel() for p in trained.values()], 1)
        self._slopes = {name: 2 * piece for name, piece in zip(trained, pieces, strict=True)}  # the loss has -1/2 of it

    def data(self, count: int, *, one: bool) -> Batch:
        """Return a client's images: all of them the ``one`` canary, or all canaries and blank images."""
        blank = self._images.new_zeros(max(0, count - len(self._images)), *self._images.shape[1:])
        images = self._images[:1].expand(count, -1, -1, -1) if one else torch.cat([self._images, blank])
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        return Batch(images, labels, labels.bool())

    def forward(self, images: Tensor) -> Tensor:
        """Return two logits per image: all zero, with the gradient that the image is to have."""
        seen, known = (some.flatten(1)[:, :_PIXELS] for some in (images, self._images))
        own = (seen[:, None] == known).all(2).to(known)  # (N, K)
        parameters = dict(self.named_parameters())
        each = [slope @ parameters[name].flatten() for name, slope in self._slopes.items()]
        products = torch.stack(each).sum(0)  # (K,)
        change = products - products.detach()
        return F.pad((own @ change)[:, None], (0, 1))


def random_directions(count: int, parts: Mapping[str, int], seed: int) -> Tensor:
    """Draw random directions (K, entries) of norm 1, with the same norm in each layer.

    A defence that clips layer by layer then scales a canary as a whole.

    Args:
        count: K.
        parts: the number of entries of each parameter, by name; a layer is the parameters of one module.
        seed: of the training.
    """
    drawn = torch.randn(count, sum(parts.values()), generator=stream(seed, "canaries", "directions"))
    layer = _layer_of(parts)
    squares = drawn.new_zeros(count, int(layer.max()) + 1).index_add(1, layer, drawn.square())  # (K, layers)
    return drawn * (squares * squares.shape[1]).rsqrt()[:, layer]


def spread_along(rests: Tensor, taken: Tensor, parts: Mapping[str, int]) -> float:
    """Return the standard deviation of the projection of vectors of noise onto one more random direction.

    A direction is uniform in each layer, where it has the same share of its norm, so no draws are needed.

    Args:
        rests: (N, entries), the vectors, without their parts along the directions of canaries.
        taken: (N, entries), the share of each entry's variance that these parts had.
        parts: the number of entries of each parameter, by name.
    """
    layer = _layer_of(parts)
    layers = int(layer.max()) + 1
    squares, left = (
        values.new_zeros(len(values), layers).index_add(1, layer, values) for values in (rests.square(), 1 - taken)
    )
    return math.sqrt(float((squares / left.clamp_min(1e-6)).mean()))


def _layer_of(parts: Mapping[str, int]) -> Tensor:
    """Return the number of the layer, from 0, that each entry belongs to, (entries,)."""
    modules = [name.rpartition(".")[0] for name in parts]
    numbers = {module: number for number, module in enumerate(dict.fromkeys(modules))}
    return torch.tensor([numbers[module] for module in modules]).repeat_interleave(torch.tensor([*parts.values()]))
