"""Two LeNets: the sigmoid network that DLG attacks, and LeCun's LeNet-5."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradveil.models.base import Model
from gradveil.validate import in_range


@dataclass(frozen=True)
class LenetDlg(Model):
    """DLG's LeNet: 5x5 convolutions of 12 channels (strides 2, 2, 1), sigmoids, and one Linear on all features.

    The Linear sees 768 features for 3x32x32 images and 588 for 1x28x28. Nothing is pooled and the weights are large, so
    the gradient says a lot about the image: of the zoo this is the network that is easiest to invert.

    Reference: Zhu et al. 2019 (DLG), https://arxiv.org/abs/1906.08935, Section 4, and the authors' code.
    Differs from the paper: follows the code, with strides instead of pooling and every weight from U(-0.5, 0.5);
    ``convs=4,init=default`` is the LeNet that Soteria's code attacks with GS (https://arxiv.org/abs/2012.06043).

    Attributes:
        activation: as in `Model`; sigmoid, because second-order attacks need a twice differentiable network.
        init: as in `Model`; uniform, without which DLG fails (the gradient carries 10^5 times less of the image).
        convs: number of convolutions; the first two have stride 2, the others stride 1.
        width: channels of each convolution.
    """

    activation: str = "sigmoid"
    init: str = "uniform"
    convs: int = 3
    width: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("convs", self.convs, 1)
        in_range("width", self.width, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build convolution and activation ``convs`` times, then Linear to the classes."""
        channels, height, width = shape
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index in range(self.convs):
            stride = 2 if index < 2 else 1
            layers[f"conv{index + 1}"] = nn.Conv2d(channels, self.width, kernel_size=5, stride=stride, padding=2)
            layers[f"act{index + 1}"] = self.act()
            channels, height, width = self.width, -(-height // stride), -(-width // stride)
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(channels * height * width, num_classes)
        return nn.Sequential(layers)


@dataclass(frozen=True)
class Lenet5(Model):
    """LeNet-5: two 5x5 convolutions with max-pooling and three Linears (61,706 parameters on 1x28x28, 10 classes).

    A side under 32 pixels is padded by 2 before the first convolution, so 28x28 and 32x32 images both give 400
    features, as in the paper, whose 28x28 digits sit in a 32x32 frame; other sizes give what they give.

    Reference: LeCun et al. 1998, https://doi.org/10.1109/5.726791, Section II-B; the network that GRNN attacks
    (https://arxiv.org/abs/2105.00529) is ``lenet5:activation=sigmoid,init=uniform``.
    Differs from the paper: the modern form, with max-pooling instead of trained sub-sampling, full connections between
    the convolutions, a Linear output instead of radial basis functions, and ReLU by default.
    """

    smallest: ClassVar[int] = 12

    def build(self, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
        """Build convolution, activation and pooling twice, then three Linears."""
        channels, *sides = shape
        padding = [2 if side < 32 else 0 for side in sides]
        height, width = (((side + 2 * pad - 4) // 2 - 4) // 2 for side, pad in zip(sides, padding, strict=True))
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(channels, 6, kernel_size=5, padding=(padding[0], padding[1])),
                act1=self.act(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(6, 16, kernel_size=5),
                act2=self.act(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(16 * height * width, 120),
                act3=self.act(),
                fc2=nn.Linear(120, 84),
                act4=self.act(),
                fc3=nn.Linear(84, num_classes),
            )
        )
