"""Peak signal-to-noise ratio."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradveil.metrics.base import Metric
from gradveil.metrics.mse import Mse

CAP = 100.0
"""Score of an exact image in dB: that of an MSE of 1e-10, far below what an 8-bit picture can show."""


@dataclass(frozen=True)
class Psnr(Metric):
    r"""Peak signal-to-noise ratio in dB, peak 1, from each image's own MSE, capped at 100 dB.

    .. math:: \mathrm{PSNR}(x, y) = \min(100,\; -10 \log_{10} \mathrm{MSE}(x, y))

    The PSNR of a batch is the mean of its images' PSNRs, which differs from the PSNR of its mean MSE.

    Range: 0 to 100 dB; higher is leakier.
    Edge cases: an exact image, whose MSE is 0, scores 100 dB, so that means stay finite; a guess that is not finite
    scores NaN, so an infinite value never occurs.
    Reference: Geiping et al. 2020 (Inverting Gradients), https://arxiv.org/abs/2003.14053.
    Differs from the paper: the cap; and images are de-normalised first, instead of scaling the MSE afterwards.

    Example:
        >>> import torch
        >>> truth, guess = torch.zeros(3, 1, 4, 4), torch.zeros(3, 1, 4, 4)
        >>> guess[1], guess[2] = 0.1, 1.0
        >>> Psnr()(truth, guess)
        tensor([100.0000,  20.0000,   0.0000], dtype=torch.float64)
    """

    higher_is_leakier: ClassVar[bool] = True
    head: ClassVar[str] = "PSNR, dB"
    format: ClassVar[str] = "2"

    def measure(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Return one over `Mse` in decibels."""
        return (10 * Mse().measure(truth, guess).reciprocal().log10()).clamp(max=CAP)
