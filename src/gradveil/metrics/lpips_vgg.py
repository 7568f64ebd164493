"""Learned perceptual similarity on VGG16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradveil.metrics.lpips import Lpips


@dataclass(frozen=True)
class LpipsVgg(Lpips):
    r"""LPIPS v0.1: weighted distance of the features of five layers of a VGG16 trained on ImageNet.

    .. math:: d(x, y) = \sum_l \frac{1}{H_l W_l} \sum_{h,w}
        \left\lVert \sqrt{w_l} \odot (\hat f^l_{hw}(x) - \hat f^l_{hw}(y)) \right\rVert_2^2

    with the features of layer l (the last ReLU of each stage) divided by their length at each position, and learned
    weights w_l of its channels. Images go in at [-1, 1], scaled as published; grey ones are repeated to three channels.

    Range: 0 (the same image) upwards, rarely above 1; lower is leakier.
    Edge cases: the trunk needs 16x16 pixels; images with a shorter side below that are enlarged to it, bilinear and
    with their proportions. A guess that is not finite scores NaN. Missing weights raise
    `gradveil.metrics.MetricUnavailable`.
    Reference: Zhang et al. 2018, https://arxiv.org/abs/1801.03924, Section 3; weights and scale of
    https://github.com/richzhang/PerceptualSimilarity.
    Differs from the paper: small images are enlarged.

    Attributes:
        weights: a file with heads and trunk, by default weights/lpips_vgg_v0.1.safetensors in the data root; or, when
            ``trunk`` is set, a file with the heads such as vgg.pth of the package ``lpips``.
        trunk: a file with the trunk, such as torchvision's vgg16-397923af.pth; empty if ``weights`` has it too.

    Relative paths are looked up in the working directory, then in the data root's folder ``weights``.

    Example:
        >>> LpipsVgg(weights="vgg.pth", trunk="vgg16-397923af.pth").spec
        'lpips-vgg:weights=vgg.pth,trunk=vgg16-397923af.pth'
    """

    head: ClassVar[str] = "LPIPS, VGG"
    format: ClassVar[str] = "3"
    default_file: ClassVar[str] = "lpips_vgg_v0.1.safetensors"
    public_files: ClassVar[tuple[str, str]] = ("vgg.pth", "vgg16-397923af.pth")
    smallest: ClassVar[int] = 16
    compared: ClassVar[Mapping[int, int]] = {3: 64, 8: 128, 15: 256, 22: 512, 29: 512}

    @staticmethod
    def layers() -> list[nn.Module]:
        """Thirteen 3x3 convolutions in five stages, max-pooled by 2 in between."""
        layers: list[nn.Module] = []
        channels = 3
        for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            if layers:
                layers.append(nn.MaxPool2d(2))
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
                channels = width
        return layers
