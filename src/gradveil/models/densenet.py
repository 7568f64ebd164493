"""DenseNet with 121 layers."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.models.base import Model, PixelMean
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Densenet121(Model):
    """DenseNet-BC: every layer sees the features of all before it; 7,978,856 parameters (7x7 stem, 1,000 classes).

    Four blocks of 6, 12, 24 and 16 layers; the transition between two of them halves channels and image. Parameter
    names are torchvision's (``features.denseblock1.denselayer1.conv1.weight``, ``classifier.weight``).

    Reference: Huang et al. 2017, https://arxiv.org/abs/1608.06993, Table 1.
    Differs from the paper: the default stem is the 3x3 one that small images need; pooling between the blocks rounds up
    (the same if the side divides evenly), so any image size works; starts from PyTorch's default weights, not He's.

    Attributes:
        stem: ``3x3`` keeps every pixel; ``7x7`` has stride 2 and a max-pooling, as in the paper.
        growth: channels that each layer adds; the stem has twice as many.
    """

    stem: str = "3x3"
    growth: int = 32
    blocks: ClassVar[tuple[int, ...]] = (6, 12, 24, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("stem", self.stem, ("3x3", "7x7"))
        in_range("growth", self.growth, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build stem, dense blocks with transitions between them, average over the pixels, Linear to the classes."""
        kernel, stride = (3, 1) if self.stem == "3x3" else (7, 2)
        channels = 2 * self.growth
        features: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(shape[0], channels, kernel, stride=stride, padding=kernel // 2, bias=False),
            norm0=nn.BatchNorm2d(channels),
            act0=self.act(),
        )
        if self.stem == "7x7":
            features["pool0"] = nn.MaxPool2d(3, stride=2, padding=1)
        for number, count in enumerate(self.blocks, start=1):
            if number > 1:
                features[f"transition{number - 1}"] = _transition(channels, channels // 2, self.act)
                channels //= 2
            features[f"denseblock{number}"] = nn.Sequential(
                OrderedDict(
                    (f"denselayer{layer + 1}", _DenseLayer(channels + layer * self.growth, self.growth, self.act))
                    for layer in range(count)
                )
            )
            channels += count * self.growth
        features["norm5"] = nn.BatchNorm2d(channels)
        return nn.Sequential(
            OrderedDict(
                features=nn.Sequential(features),
                act=self.act(),
                avgpool=PixelMean(),
                classifier=nn.Linear(channels, num_classes),
            )
        )


class _DenseLayer(nn.Module):
    """BatchNorm, activation, 1x1 convolution to 4 x growth, the same with 3x3 to growth, appended to the input."""

    def __init__(self, channels: int, growth: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.act1 = act()
        self.conv1 = nn.Conv2d(channels, 4 * growth, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.act2 = act()
        self.conv2 = nn.Conv2d(4 * growth, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        bottleneck = self.conv1(self.act1(self.norm1(features)))
        return torch.cat([features, self.conv2(self.act2(self.norm2(bottleneck)))], dim=1)


def _transition(inputs: int, outputs: int, act: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(inputs),
            act=act(),
            conv=nn.Conv2d(inputs, outputs, kernel_size=1, bias=False),
            pool=nn.AvgPool2d(2, ceil_mode=True),
        )
    )
