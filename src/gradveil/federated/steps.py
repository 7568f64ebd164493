r"""One step of local training: what is done to a batch's gradient before the weights move, and how they move."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.federated.protocol import LocalSettings


@dataclass
class Stepper:
    r"""The optimiser of one client's round, on one vector of weights; its state starts at zero.

    ``sgd`` is that of `torch.optim.SGD`: d = g + weight_decay * w, v = momentum * v + d, w = w - lr * v. ``adam`` and
    ``adamw`` are those of `torch.optim.Adam` and `torch.optim.AdamW`, without amsgrad:

    .. math:: w \leftarrow w - \eta \frac{\hat m}{\sqrt{\hat v} + \epsilon}

    with the bias-corrected averages :math:`\hat m` of g and :math:`\hat v` of its square. Adam adds weight decay to g;
    AdamW multiplies w by :math:`1 - \eta \lambda` before the step.

    Attributes:
        how: the client's settings.
        lr: the learning rate.
    """

    how: LocalSettings
    lr: float
    _averages: list[Tensor] = field(default_factory=list)
    _steps: int = 0

    def step(self, weights: Tensor, gradient: Tensor) -> None:
        """Move the weights in place by one step along the gradient, which is clipped before."""
        self._steps += 1
        gradient = clipped(gradient, self.how.clip_norm)
        if self.how.weight_decay and self.how.optimiser != "adamw":
            gradient = gradient.add(weights, alpha=self.how.weight_decay)
        if self.how.is_adam:
            self._adam(weights, gradient)
        else:
            self._sgd(weights, gradient)

    def _sgd(self, weights: Tensor, gradient: Tensor) -> None:
        momentum = self.how.momentum
        if momentum:
            if self._averages:
                self._averages[0].mul_(momentum).add_(gradient)
            else:
                self._averages.append(gradient.clone())
            velocity = self._averages[0]
            gradient = gradient.add(velocity, alpha=momentum) if self.how.nesterov else velocity
        weights.sub_(gradient, alpha=self.lr)

    def _adam(self, weights: Tensor, gradient: Tensor) -> None:
        first, second = self.how.betas
        if not self._averages:
            self._averages += [torch.zeros_like(gradient), torch.zeros_like(gradient)]
        mean, square = self._averages
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if self.how.optimiser == "adamw":
            weights.mul_(1 - self.lr * self.how.weight_decay)
        root = (square / (1 - second**self._steps)).sqrt_().add_(self.how.eps)
        weights.addcdiv_(mean / (1 - first**self._steps), root, value=-self.lr)


def clipped(gradient: Tensor, norm: float) -> Tensor:
    """Return a gradient of at most this norm: a larger one is scaled down; 0 does not clip.

    Example:
        >>> clipped(torch.tensor([3.0, 4.0]), 1.0)
        tensor([0.6000, 0.8000])
    """
    if not norm:
        return gradient
    size: Tensor = gradient.norm().clamp_min(torch.finfo(gradient.dtype).tiny)
    return gradient * (norm / size).clamp(max=1.0)
