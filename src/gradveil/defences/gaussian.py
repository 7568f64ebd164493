"""Gaussian noise on the update, without clipping: the usual baseline, often called DP although it is not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradveil.defences.base import Perturbation
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.grid import add_gaussian
from gradveil.secret_stream import SecretStream
from gradveil.types import Tensors
from gradveil.validate import in_range

_TINY = 1e-12


@dataclass(frozen=True)
class Gaussian(Perturbation):
    r"""Add independent Gaussian noise to every entry of the update.

    .. math:: \tilde u_i = u_i + \sigma z_i, \qquad z_i \sim N(0, 1)

    BatchNorm's running statistics (``Update.buffers``) are sent unchanged.

    Threat model: an honest-but-curious server that sees individual updates.
    Does not protect: against an attacker who uses the likelihood of the noise as its matching loss together with a
        prior on images, or who averages many updates of the same images. How much a given noise protects depends on
        the scale of the gradient.
    Guarantee: none. Nothing is clipped, so one image can change the update by any amount, which no fixed noise hides.
        Papers often call this differential privacy, but it is not; see ``dp-sgd``.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Section 5, with standard deviations from 1e-4
        to 1e-1; DCS2 uses 1e-2 (MNIST) and 1e-3 (CIFAR-10).
    Differs from the paper: adds noise to the update of a round by default; the paper adds it to gradients, which is
        ``where=gradient``. With a learning rate below 1, noise of the same strength hides more in the update.

    Attributes:
        where: ``update`` adds noise to the update once per round; ``gradient`` to the gradient of every local step.
        std: standard deviation of the noise.
        relative: whether ``std`` is in units of the root mean square of the whole update (all tensors together).
    """

    adds_noise: ClassVar[bool] = True

    std: float = 1e-2
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("std", self.std, 0, open_low=True)

    def perturb(self, tensors: Tensors, rng: SecretStream) -> dict[str, Tensor]:
        """Add noise to every tensor, in the order of the tensors."""
        std = self.std * root_mean_square(tensors) if self.relative else self.std
        return {name: add_gaussian(tensor, std, rng) for name, tensor in tensors.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``likelihood``: squared differences in units of the noise's standard deviation."""
        spread = 1.0 if self.where == "update" and self.relative else noise_spread(self.where, arrived.steps)
        return {
            "likelihood": Countermove(
                None, "l2", seen_noise(arrived.gradients, self.std, spread, relative=self.relative)
            )
        }


def root_mean_square(tensors: Tensors) -> float:
    """Return the root mean square of all entries of all tensors together, or 0 if there are no entries.

    Example:
        >>> import torch
        >>> root_mean_square({"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)})
        2.5
    """
    count = sum(tensor.numel() for tensor in tensors.values())
    total = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
    return math.sqrt(total / count) if count else 0.0


def noise_spread(where: str, steps: Sequence[float]) -> float:
    """Return the standard deviation, in the mean gradient of an update, of unit noise added to the update or gradients.

    ``steps`` are the lengths of the local steps; the update is minus their sum times the mean gradient.

    Example:
        >>> noise_spread("update", [0.5, 1.5]), noise_spread("gradient", [1.0] * 4)
        (0.5, 0.5)
    """
    whole = max(sum(steps), _TINY)
    return 1 / whole if where == "update" else math.hypot(*steps) / whole


def seen_noise(seen: Tensors, std: float, spread: float, *, relative: bool) -> dict[str, float]:
    """Return the standard deviation of the noise in the seen mean gradients, by tensor name; positive and finite.

    Relative noise of strength r is r times the root mean square (RMS) of the clean gradient, so the RMS of the noisy
    gradient is :math:`sqrt(1 + r^2)` times the clean one. The result is a mean over targets, without gradients of zero.
    """
    noise = std * spread
    if relative:
        targets = len(next(iter(seen.values()), ()))
        found = [root_mean_square({name: tensor[t] for name, tensor in seen.items()}) for t in range(targets)]
        found = [value for value in found if 0 < value < math.inf]
        noise *= sum(found) / len(found) / math.hypot(1, noise) if found else 0.0
    return dict.fromkeys(seen, min(max(noise, _TINY), 1 / _TINY))
