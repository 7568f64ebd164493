"""VGG with 16 layers, for small and for large images."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradveil.models.base import Model
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Vgg16(Model):
    """Thirteen 3x3 convolutions in five stages, each max-pooled by 2, and a head of one or three Linears.

    Any image size works: pooling rounds up, so a single row, column or pixel stays (28x28 goes 14, 7, 4, 2, 1).
    Parameter names are torchvision's (``features.0.weight``, ``classifier.6.weight``) with the full head.

    Reference: Simonyan and Zisserman 2015, https://arxiv.org/abs/1409.1556, Table 1, column D.
    Differs from the paper: BatchNorm and the small head are the defaults, as is common on CIFAR; pooling rounds up (no
    difference if the side divides by 32); no dropout by default, because it draws from torch's global generator.

    Attributes:
        batch_norm: BatchNorm after each convolution; the paper has none.
        head: ``small`` averages over the pixels left (one for images of up to 32x32, four at 64x64) and has one Linear;
            ``full`` is the paper's: 7x7 pixels by averaging (repeated when fewer are left) and three Linears.
        hidden: width of the two hidden Linears of the full head.
        dropout: share of the hidden features dropped in training, in the full head; the paper's is 0.5.
        width: channels of the first stage; the others have 2, 4, 8 and 8 times as many.
    """

    batch_norm: bool = True
    head: str = "small"
    hidden: int = 4096
    dropout: float = 0.0
    width: int = 64
    stages: ClassVar[tuple[tuple[int, int], ...]] = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
    """Number of convolutions and factor of the width, by stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("head", self.head, ("small", "full"))
        in_range("hidden", self.hidden, 1)
        in_range("dropout", self.dropout, 0, 1, open_high=True)
        in_range("width", self.width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build the stages of convolutions, then the head."""
        channels = shape[0]
        features: list[nn.Module] = []
        for count, factor in self.stages:
            for _ in range(count):
                features.append(nn.Conv2d(channels, factor * self.width, kernel_size=3, padding=1))
                if self.batch_norm:
                    features.append(nn.BatchNorm2d(factor * self.width))
                features.append(self.act())
                channels = factor * self.width
            features.append(nn.MaxPool2d(2, ceil_mode=True))
        side = 1 if self.head == "small" else 7
        return nn.Sequential(
            OrderedDict(
                features=nn.Sequential(*features),
                avgpool=nn.AdaptiveAvgPool2d(side),
                flatten=nn.Flatten(),
                classifier=self._head(channels * side * side, num_classes),
            )
        )

    def _head(self, features: int, num_classes: int) -> nn.Module:
        if self.head == "small":
            return nn.Linear(features, num_classes)
        return nn.Sequential(
            nn.Linear(features, self.hidden),
            self.act(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, self.hidden),
            self.act(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, num_classes),
        )
