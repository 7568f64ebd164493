"""Laplace noise on what is sent, without clipping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.defences.base import Perturbation
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import noise_spread, root_mean_square, seen_noise
from gradveil.types import Tensors
from gradveil.validate import in_range


@dataclass(frozen=True)
class Laplace(Perturbation):
    r"""Add independent Laplace noise to every entry.

    .. math:: \tilde u_i = u_i + b z_i, \qquad p(z) = \tfrac12 e^{-|z|}

    Its standard deviation is :math:`\sqrt 2\, b`. BatchNorm's running statistics (``Update.buffers``) are sent as they
    are.

    Threat model: a curious server that sees single updates.
    Does not protect: against an attacker who weighs its match by the noise's likelihood and has a prior on images, or
        who averages many updates of the same images; how strong the noise is depends on the gradient's scale.
    Guarantee: none. Nothing is clipped, so one image can change the update by any amount and no noise hides it: this
        is not differential privacy, whatever papers call it; see ``dp-sgd``.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Section 5, scales of 1e-4 to 1e-1; Soteria's released
        code uses 1e-1 for its baseline.
    Differs from the paper: on the update of a round by default; ``where=gradient`` is the paper's. With a learning rate
        below 1 the same noise on the update is the stronger one.

    Attributes:
        where: ``update`` perturbs what is sent, once a round; ``gradient`` the gradient of every local step.
        scale: b of the noise.
        relative: take ``scale`` times the root mean square of the whole update (all tensors together).
    """

    scale: float = 1e-2
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("scale", self.scale, 0, open_low=True)

    def perturb(self, tensors: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
        """Add noise, drawn tensor by tensor."""
        scale = self.scale * root_mean_square(tensors) if self.relative else self.scale
        return {name: _noisy(tensor, scale, rng) for name, tensor in tensors.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """The noise's likelihood: absolute differences, by its standard deviation."""
        spread = 1.0 if self.where == "update" and self.relative else noise_spread(self.where, arrived.steps)
        noise = seen_noise(arrived.gradients, math.sqrt(2) * self.scale, spread, relative=self.relative)
        return {"likelihood": Countermove(None, "l1", noise)}


def _noisy(tensor: Tensor, scale: float, rng: torch.Generator) -> Tensor:
    """A Laplace variable is the difference of two exponential ones, which are never infinite."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    plus = torch.empty(tensor.shape, dtype=wide).exponential_(generator=rng)
    minus = torch.empty(tensor.shape, dtype=wide).exponential_(generator=rng)
    return (tensor.to(wide) + scale * (plus - minus).to(tensor.device)).to(tensor.dtype)
