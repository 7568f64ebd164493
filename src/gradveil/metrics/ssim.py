"""Structural similarity."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.metrics.base import Metric

WINDOW, SIGMA = 11, 1.5
C1, C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class Ssim(Metric):
    r"""Structural similarity with an 11x11 Gaussian window of standard deviation 1.5 and data range 1.

    .. math:: \mathrm{SSIM} = \operatorname{mean}_{c,h,w}
        \frac{(2 \mu_x \mu_y + C_1)(2 \sigma_{xy} + C_2)}{(\mu_x^2 + \mu_y^2 + C_1)(\sigma_x^2 + \sigma_y^2 + C_2)}

    with the window's weighted means, variances and covariance, C1 = 0.01², C2 = 0.03², over all channels and all
    positions where the whole window lies in the image. Equal to scikit-image's ``structural_similarity`` with
    ``gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1``.

    Range: above -1, up to 1 (the same image); higher is leakier.
    Edge cases: if the shorter side is below 11 pixels, the window is the largest odd square that fits, with the same
    standard deviation and weights that sum to 1 (7x7 for an 8x20 image; one pixel compares brightness alone).
    scikit-image refuses these images. A guess that is not finite scores NaN.
    Reference: Wang et al. 2004, https://doi.org/10.1109/TIP.2003.819861, Section III.
    Differs from the paper: channels are measured separately and averaged; the paper has grey images only.

    Example:
        >>> black, white = torch.zeros(1, 1, 16, 16), torch.ones(1, 1, 16, 16)
        >>> Ssim()(black, black).item()
        1.0
        >>> round(Ssim()(black, white).item(), 8) == round(1e-4 / (1 + 1e-4), 8)
        True
    """

    higher_is_leakier: ClassVar[bool] = True
    head: ClassVar[str] = "SSIM"
    format: ClassVar[str] = "3"

    def measure(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Average the local similarity over channels and positions."""
        height, width = truth.shape[2:]
        x, y = truth.reshape(-1, 1, height, width), guess.reshape(-1, 1, height, width)
        window = gaussian_window(min(WINDOW, (min(height, width) - 1) // 2 * 2 + 1)).to(truth)
        mean_x, mean_y, square_x, square_y, product = (_blur(part, window) for part in (x, y, x * x, y * y, x * y))
        variance_x, variance_y = square_x - mean_x * mean_x, square_y - mean_y * mean_y
        covariance = product - mean_x * mean_y
        brightness = (2 * mean_x * mean_y + C1) / (mean_x * mean_x + mean_y * mean_y + C1)
        structure = (2 * covariance + C2) / (variance_x + variance_y + C2)
        return (brightness * structure).reshape(len(truth), -1).mean(1)


def gaussian_window(size: int) -> Tensor:
    """Return the weights of a Gaussian at ``size`` (odd) points around 0, which sum to 1: one axis of the window.

    Example:
        >>> gaussian_window(3)
        tensor([0.3078, 0.3844, 0.3078], dtype=torch.float64)
    """
    points = torch.arange(size, dtype=torch.float64) - size // 2
    weights = torch.exp(-(points**2) / (2 * SIGMA**2))
    return weights / weights.sum()


def _blur(images: Tensor, window: Tensor) -> Tensor:
    """Return the weighted mean at each position where the window fits; images are (N, 1, H, W)."""
    return F.conv2d(F.conv2d(images, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
