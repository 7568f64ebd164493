"""Residual networks of basic blocks: the small ones for CIFAR (20, 32 layers) and the ImageNet ones (18, 34)."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.models.base import Model, PixelMean
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Resnet20(Model):
    """CIFAR ResNet of 20 layers: a 3x3 stem, three stages of three basic blocks, 269,722 parameters on CIFAR-10.

    Parameter names are those of the widely shared CIFAR weights (``layer1.0.conv1.weight``, ``linear.weight``).

    Reference: He et al. 2016, https://arxiv.org/abs/1512.03385, Section 4.2.
    Differs from the paper: starts from PyTorch's default weights, not He's.

    Attributes:
        shortcut: if a stage changes the shape, ``A`` drops every other pixel and adds channels of zeros (no
            parameters, the paper's choice on CIFAR), ``B`` is a 1x1 convolution with BatchNorm.
        width: channels of the first stage; the others have 2 and 4 times as many.
    """

    shortcut: str = "A"
    width: int = 16
    blocks: ClassVar[tuple[int, ...]] = (3, 3, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("shortcut", self.shortcut, ("A", "B"))
        in_range("width", self.width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build stem, stages, average over the pixels, Linear to the classes."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(shape[0], self.width, kernel_size=3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(self.width),
            act1=self.act(),
        )
        features = _add_stages(layers, self.width, self.blocks, self.act, self.shortcut)
        layers.update(avgpool=PixelMean(), linear=nn.Linear(features, num_classes))
        return nn.Sequential(layers)


@dataclass(frozen=True)
class Resnet32(Resnet20):
    """CIFAR ResNet of 32 layers: as `Resnet20` with five blocks per stage, 464,154 parameters on CIFAR-10.

    Reference: He et al. 2016, https://arxiv.org/abs/1512.03385, Section 4.2.
    Differs from the paper: starts from PyTorch's default weights, not He's.

    Attributes:
        shortcut: ``A`` (no parameters) or ``B`` (1x1 convolution with BatchNorm), as in `Resnet20`.
        width: channels of the first stage; the others have 2 and 4 times as many.
    """

    blocks: ClassVar[tuple[int, ...]] = (5, 5, 5)


@dataclass(frozen=True)
class Resnet18(Model):
    """ResNet of 18 layers: four stages of two basic blocks, 11,689,512 parameters with the 7x7 stem and 1,000 classes.

    Parameter names are torchvision's (``layer2.0.downsample.0.weight``, ``fc.weight``), so weights saved from it load.

    Reference: He et al. 2016, https://arxiv.org/abs/1512.03385, Table 1; GRNN's sigmoid ResNet-18
    (https://arxiv.org/abs/2105.00529) is ``resnet18:activation=sigmoid,init=uniform``.
    Differs from the paper: the default stem is the 3x3 one that small images need; starts from PyTorch's default
    weights, not He's; 1x1 convolutions if a stage changes the shape (the paper's option B), as in torchvision.

    Attributes:
        stem: ``3x3`` keeps every pixel; ``7x7`` has stride 2 and a max-pooling, as in the paper.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
    """

    stem: str = "3x3"
    width: int = 64
    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("stem", self.stem, ("3x3", "7x7"))
        in_range("width", self.width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build stem, stages, average over the pixels, Linear to the classes."""
        kernel, stride = (3, 1) if self.stem == "3x3" else (7, 2)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(shape[0], self.width, kernel, stride=stride, padding=kernel // 2, bias=False),
            bn1=nn.BatchNorm2d(self.width),
            act1=self.act(),
        )
        if self.stem == "7x7":
            layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        features = _add_stages(layers, self.width, self.blocks, self.act, shortcut="B")
        layers.update(avgpool=PixelMean(), fc=nn.Linear(features, num_classes))
        return nn.Sequential(layers)


@dataclass(frozen=True)
class Resnet34(Resnet18):
    """ResNet of 34 layers: as `Resnet18` with 3, 4, 6 and 3 blocks; 21,797,672 parameters (7x7 stem, 1,000 classes).

    Reference: He et al. 2016, https://arxiv.org/abs/1512.03385, Table 1.
    Differs from the paper: the default stem is the 3x3 one that small images need; starts from PyTorch's default
    weights, not He's; 1x1 convolutions if a stage changes the shape (the paper's option B), as in torchvision.

    Attributes:
        stem: ``3x3`` keeps every pixel; ``7x7`` has stride 2 and a max-pooling, as in the paper.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
    """

    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


def _add_stages(
    layers: OrderedDict[str, nn.Module],
    width: int,
    blocks: tuple[int, ...],
    act: Callable[[], nn.Module],
    shortcut: str,
) -> int:
    """Add ``layer1``, ``layer2``, ... and return the last one's channels; each but the first halves the image."""
    inputs = width
    for stage, count in enumerate(blocks):
        outputs = width * 2**stage
        strides = [1 if stage == 0 else 2] + [1] * (count - 1)
        members = []
        for stride in strides:
            members.append(_BasicBlock(inputs, outputs, stride, act, shortcut))
            inputs = outputs
        layers[f"layer{stage + 1}"] = nn.Sequential(*members)
    return inputs


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to a shortcut; activations are modules that can be watched."""

    def __init__(self, inputs: int, outputs: int, stride: int, act: Callable[[], nn.Module], shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.act1 = act()
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.downsample = (
                _Subsample(outputs - inputs, stride) if shortcut == "A" else _project(inputs, outputs, stride)
            )
        self.act2 = act()

    def forward(self, images: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(images)))))
        result: Tensor = self.act2(residual + self.downsample(images))
        return result


class _Subsample(nn.Module):
    """He's option A: keep one pixel in ``stride`` each way, and add ``extra`` channels of zeros around."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra, self.stride = extra, stride

    def forward(self, images: Tensor) -> Tensor:
        before = self.extra // 2
        return F.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before))


def _project(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return He's option B: a 1x1 convolution with BatchNorm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
