"""Learned perceptual similarity on AlexNet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradveil.metrics.lpips import Lpips


@dataclass(frozen=True)
class LpipsAlex(Lpips):
    r"""LPIPS v0.1: weighted distance of the features of five layers of an AlexNet trained on ImageNet.

    .. math:: d(x, y) = \sum_l \frac{1}{H_l W_l} \sum_{h,w}
        \left\lVert \sqrt{w_l} \odot (\hat f^l_{hw}(x) - \hat f^l_{hw}(y)) \right\rVert_2^2

    with the features of layer l divided by their length at each position, and learned weights w_l of its channels.
    Images go in at [-1, 1], scaled as published; grey ones are repeated to three channels.

    Range: 0 (the same image) upwards, rarely above 1; lower is leakier.
    Edge cases: the trunk needs 31x31 pixels; images with a shorter side below that (MNIST's 28) are enlarged to it,
    bilinear and with their proportions. A guess that is not finite scores NaN. Missing weights raise
    `gradveil.metrics.MetricUnavailable`.
    Reference: Zhang et al. 2018, https://arxiv.org/abs/1801.03924, Section 3; weights and scale of
    https://github.com/richzhang/PerceptualSimilarity.
    Differs from the paper: small images are enlarged.

    Attributes:
        weights: a file with heads and trunk, by default weights/lpips_alex_v0.1.safetensors in the data root; or, when
            ``trunk`` is set, a file with the heads such as alex.pth of the package ``lpips``.
        trunk: a file with the trunk, such as torchvision's alexnet-owt-7be5be79.pth; empty if ``weights`` has it too.

    Relative paths are looked up in the working directory, then in the data root's folder ``weights``.

    Example:
        >>> import torch
        >>> images = torch.zeros(1, 3, 32, 32)
        >>> LpipsAlex(weights="/nowhere/alex.safetensors")(images, images)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradveil.metrics.base.MetricUnavailable: ... needs pretrained weights, and /nowhere/alex.safetensors is not ...
    """

    field: ClassVar[str] = "lpips"
    head: ClassVar[str] = "LPIPS"
    format: ClassVar[str] = "3"
    default_file: ClassVar[str] = "lpips_alex_v0.1.safetensors"
    public_files: ClassVar[tuple[str, str]] = ("alex.pth", "alexnet-owt-7be5be79.pth")
    smallest: ClassVar[int] = 31
    compared: ClassVar[Mapping[int, int]] = {1: 64, 4: 192, 7: 384, 9: 256, 11: 256}

    @staticmethod
    def layers() -> list[nn.Module]:
        """Five convolutions, each with ReLU; the first two are max-pooled."""
        return [
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(),
        ]
