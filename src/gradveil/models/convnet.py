"""The ConvNet that Inverting Gradients, Soteria and DCS2 attack and defend."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradveil.models.base import Model
from gradveil.validate import in_range


@dataclass(frozen=True)
class Convnet(Model):
    """Eight 3x3 convolutions with BatchNorm, two max-poolings by 3 and one Linear (2,904,970 parameters on CIFAR-10).

    The Linear sees 36 x ``width`` features for 32x32 and 28x28 images: 2,304 at the default width.

    Reference: Geiping et al. 2020 (GS, "Inverting Gradients"), https://arxiv.org/abs/2003.14053, and the authors' code;
    also the network of Soteria (https://arxiv.org/abs/2012.06043), and of DCS2 with ``width=32``.
    Differs from the paper: 8 convolutions, as in the network that the authors ran; their code lists 9, but two of them
    under one key, so that one replaces the other.

    Attributes:
        width: channels of the first convolution; the others have 2, 2, 4, 4, 4, 4 and 4 times as many.
    """

    width: int = 64
    smallest: ClassVar[int] = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("width", self.width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build eight convolutions with BatchNorm and activation, pooled after the sixth and eighth, and a Linear."""
        channels, height, width = shape
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, factor in enumerate((1, 2, 2, 4, 4, 4, 4, 4), start=1):
            layers[f"conv{index}"] = nn.Conv2d(channels, factor * self.width, kernel_size=3, padding=1)
            layers[f"bn{index}"] = nn.BatchNorm2d(factor * self.width)
            layers[f"act{index}"] = self.act()
            channels = factor * self.width
            if index in (6, 8):
                layers[f"pool{index}"] = nn.MaxPool2d(3)
                height, width = height // 3, width // 3
        layers["flatten"] = nn.Flatten()
        layers["linear"] = nn.Linear(channels * height * width, num_classes)
        return nn.Sequential(layers)
