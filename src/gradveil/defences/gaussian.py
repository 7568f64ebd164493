"""Gaussian noise on what is sent, without clipping: the usual baseline, often called DP though it is not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defences.base import Perturbation
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.types import Tensors
from gradveil.validate import in_range

_TINY = 1e-12


@dataclass(frozen=True)
class Gaussian(Perturbation):
    r"""Add independent Gaussian noise to every entry.

    .. math:: \tilde u_i = u_i + \sigma z_i, \qquad z_i \sim N(0, 1)

    BatchNorm's running statistics (``Update.buffers``) are sent as they are.

    Threat model: a curious server that sees single updates.
    Does not protect: against an attacker who weighs its match by the noise's likelihood and has a prior on images, or
        who averages many updates of the same images; how strong the noise is depends on the gradient's scale.
    Guarantee: none. Nothing is clipped, so one image can change the update by any amount and no noise hides it: this
        is not differential privacy, whatever papers call it; see ``dp-sgd``.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Section 5, standard deviations of 1e-4 to 1e-1; DCS2
        uses 1e-2 (MNIST) and 1e-3 (CIFAR-10).
    Differs from the paper: on the update of a round by default; ``where=gradient`` is the paper's. With a learning rate
        below 1 the same noise on the update is the stronger one.

    Attributes:
        where: ``update`` perturbs what is sent, once a round; ``gradient`` the gradient of every local step.
        std: standard deviation of the noise.
        relative: take ``std`` times the root mean square of the whole update (all tensors together).
    """

    std: float = 1e-2
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("std", self.std, 0, open_low=True)

    def perturb(self, tensors: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
        """Add noise, drawn tensor by tensor."""
        std = self.std * root_mean_square(tensors) if self.relative else self.std
        return {name: _noisy(tensor, std, rng) for name, tensor in tensors.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """The noise's likelihood: squared differences, by its standard deviation."""
        spread = 1.0 if self.where == "update" and self.relative else noise_spread(self.where, arrived.steps)
        return {
            "likelihood": Countermove(
                None, "l2", seen_noise(arrived.gradients, self.std, spread, relative=self.relative)
            )
        }


def _noisy(tensor: Tensor, std: float, rng: torch.Generator) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    noise = torch.randn(tensor.shape, generator=rng, dtype=wide).to(tensor.device)
    return (tensor.to(wide) + std * noise).to(tensor.dtype)


def root_mean_square(tensors: Tensors) -> float:
    """Of all entries of all tensors together; 0 if there are none.

    Example:
        >>> root_mean_square({"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)})
        2.5
    """
    count = sum(tensor.numel() for tensor in tensors.values())
    total = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
    return math.sqrt(total / count) if count else 0.0


def noise_spread(where: str, steps: Sequence[float]) -> float:
    """What noise of standard deviation 1 becomes in units of the mean gradient, over local steps of these lengths.

    Example:
        >>> noise_spread("update", [0.5, 1.5]), noise_spread("gradient", [1.0] * 4)
        (0.5, 0.5)
    """
    whole = max(sum(steps), _TINY)
    return 1 / whole if where == "update" else math.hypot(*steps) / whole


def seen_noise(seen: Tensors, std: float, spread: float, *, relative: bool) -> dict[str, float]:
    """Standard deviation of the noise in the mean gradients that were seen, by name; positive and finite.

    Relative noise is r times the gradient's root mean square, so the one seen is :math:`sqrt(1 + r^2)` times that; the
    mean over all targets counts, those of zero left out.
    """
    noise = std * spread
    if relative:
        targets = len(next(iter(seen.values()), ()))
        found = [root_mean_square({name: tensor[t] for name, tensor in seen.items()}) for t in range(targets)]
        found = [value for value in found if 0 < value < math.inf]
        noise *= sum(found) / len(found) / math.hypot(1, noise) if found else 0.0
    return dict.fromkeys(seen, min(max(noise, _TINY), 1 / _TINY))
