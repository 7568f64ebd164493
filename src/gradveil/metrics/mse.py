"""Mean squared error."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradveil.metrics.base import Metric


@dataclass(frozen=True)
class Mse(Metric):
    r"""Mean squared difference over the channels and pixels of an image in [0, 1].

    .. math:: \mathrm{MSE}(x, y) = \frac{1}{CHW} \sum_{c,h,w} (x_{chw} - y_{chw})^2

    Range: 0 (the same image) to 1; lower is leakier.
    Edge cases: a guess that is not finite scores NaN.
    Reference: Zhu et al. 2019 (DLG), https://arxiv.org/abs/1906.08935.
    Differs from the paper: always on clamped images in [0, 1], never on normalised ones.

    Example:
        >>> import torch
        >>> truth = torch.zeros(2, 1, 1, 2)
        >>> guess = torch.tensor([[[[0.0, 0.0]]], [[[0.6, 0.8]]]], dtype=torch.float64)
        >>> Mse()(truth, guess)
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """

    higher_is_leakier: ClassVar[bool] = False
    head: ClassVar[str] = "MSE"
    format: ClassVar[str] = "5"

    def measure(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Average over all axes but the first."""
        return (truth - guess).square().flatten(1).mean(1)
