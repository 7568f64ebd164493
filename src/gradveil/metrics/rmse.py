"""Root mean squared error."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradveil.metrics.base import Metric
from gradveil.metrics.mse import Mse


@dataclass(frozen=True)
class Rmse(Metric):
    r"""Square root of the mean squared error of an image in [0, 1], under its true name.

    .. math:: \mathrm{RMSE}(x, y) = \sqrt{\mathrm{MSE}(x, y)}

    Some papers call this number MSE (FedKL's code, on 0-255: 255 times ours); it allows comparisons with them.

    Range: 0 (the same image) to 1; lower is leakier.
    Edge cases: a guess that is not finite scores NaN.
    Reference: the "MSE" of Ren et al. 2023 (FedKL), https://arxiv.org/abs/2305.04095, as their code computes it.
    Differs from the paper: the name, and the scale [0, 1] in place of [0, 255].

    Example:
        >>> import torch
        >>> Rmse()(torch.zeros(1, 1, 1, 2), torch.tensor([[[[0.6, 0.8]]]]))  # the root of (0.36 + 0.64) / 2
        tensor([0.7071], dtype=torch.float64)
    """

    higher_is_leakier: ClassVar[bool] = False
    head: ClassVar[str] = "RMSE"
    format: ClassVar[str] = "5"

    def measure(self, truth: Tensor, guess: Tensor) -> Tensor:
        """Return the square root of each image's `Mse`."""
        return Mse().measure(truth, guess).sqrt()
