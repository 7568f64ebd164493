"""A small convolutional generator, conditioned on the class."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.generators.base import Generator, Latent
from gradveil.validate import in_range


def levels(shape: tuple[int, int, int]) -> int:
    """Return how often an image is halved until no side is longer than 8, at least once.

    Example:
        >>> levels((1, 28, 28)), levels((3, 64, 64)), levels((1, 4, 4))
        (2, 3, 1)
    """
    return max(1, math.ceil(math.log2(max(shape[1:]) / 8)))


@dataclass(frozen=True)
class Dcgan(Generator):
    """Transposed convolutions from a small map of many channels to the image, with BatchNorm and ReLU in between.

    Reference: Radford et al. 2016, https://arxiv.org/abs/1511.06434, Section 3.
    Differs from the paper: it has so few levels and channels that a CPU trains it in minutes; it is conditioned on the
    class, as a one-hot vector beside the latents; images of any size are cropped from the next larger size.

    Attributes:
        latent: length of the latent vector that an image is made from, beside its class.
        width: channels of the last hidden layer; each earlier layer has twice as many.
        conditional: whether it is conditioned on the class.
    """

    width: int = 16
    conditional: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("width", self.width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Latent:
        """Build the network, with as many levels as the image size needs."""
        return _Convolutional(self, shape, num_classes)


class _Convolutional(Latent):
    def __init__(self, how: Dcgan, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__(how.latent)
        self.conditional, self.shape, self.num_classes = how.conditional, shape, num_classes
        count = levels(shape)
        self.smallest = tuple(-(-side // 2**count) for side in shape[1:])
        channels = [how.width * 2**level for level in reversed(range(count))] + [shape[0]]
        first = channels[0] * 2
        self.first = nn.Linear(how.latent + num_classes * how.conditional, first * math.prod(self.smallest))
        self.norms, self.ups = nn.ModuleList(), nn.ModuleList()
        for inputs, outputs in zip([first, *channels[:-2]], channels[:-1], strict=True):
            self.norms.append(nn.BatchNorm2d(inputs))
            self.ups.append(nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1))
        self.norms.append(nn.BatchNorm2d(channels[-2]))
        self.last = nn.Conv2d(channels[-2], shape[0], 3, padding=1)

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.conditional:
            if labels is None:
                raise ValueError("a conditional generator needs labels")
            told = F.one_hot(labels, self.num_classes) if labels.dim() == 1 else labels
            latents = torch.cat([latents, told.to(latents)], 1)
        maps = self.first(latents).view(len(latents), -1, *self.smallest)
        for norm, up in zip(self.norms[:-1], self.ups, strict=True):
            maps = up(norm(maps).relu())
        images: Tensor = self.last(self.norms[-1](maps).relu()).sigmoid()
        return images[..., : self.shape[1], : self.shape[2]]
