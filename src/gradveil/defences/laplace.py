"""Laplace noise on the update, without clipping."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradveil.defences.base import Perturbation
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import noise_spread, root_mean_square, seen_noise
from gradveil.defences.parts.grid import add_laplace
from gradveil.secret_stream import SecretStream
from gradveil.types import Tensors
from gradveil.validate import in_range


@dataclass(frozen=True)
class Laplace(Perturbation):
    r"""Add independent Laplace noise to every entry of the update.

    .. math:: \tilde u_i = u_i + b z_i, \qquad p(z) = \tfrac12 e^{-|z|}

    The noise has standard deviation :math:`\sqrt 2\, b`. BatchNorm's running statistics (``Update.buffers``) are sent
    unchanged.

    Threat model: an honest-but-curious server that sees individual updates.
    Does not protect: against an attacker who uses the likelihood of the noise as its matching loss together with a
        prior on images, or who averages many updates of the same images. How much a given noise protects depends on
        the scale of the gradient.
    Guarantee: none. Nothing is clipped, so one image can change the update by any amount, which no fixed noise hides.
        Papers often call this differential privacy, but it is not; see ``dp-sgd``.
    Reference: Zhu et al. 2019, https://arxiv.org/abs/1906.08935, Section 5, with scales from 1e-4 to 1e-1;
        Soteria's released code uses 1e-1 for its baseline.
    Differs from the paper: adds noise to the update of a round by default; the paper adds it to gradients, which is
        ``where=gradient``. With a learning rate below 1, noise of the same strength hides more in the update.

    Attributes:
        where: ``update`` adds noise to the update once per round; ``gradient`` to the gradient of every local step.
        scale: b, the scale of the noise.
        relative: whether ``scale`` is in units of the root mean square of the whole update (all tensors together).
    """

    adds_noise: ClassVar[bool] = True

    scale: float = 1e-2
    relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("scale", self.scale, 0, open_low=True)

    def perturb(self, tensors: Tensors, rng: SecretStream) -> dict[str, Tensor]:
        """Add noise to every tensor, in the order of the tensors."""
        scale = self.scale * root_mean_square(tensors) if self.relative else self.scale
        return {name: add_laplace(tensor, scale, rng) for name, tensor in tensors.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``likelihood``: absolute differences in units of the noise's standard deviation."""
        spread = 1.0 if self.where == "update" and self.relative else noise_spread(self.where, arrived.steps)
        noise = seen_noise(arrived.gradients, math.sqrt(2) * self.scale, spread, relative=self.relative)
        return {"likelihood": Countermove(None, "l1", noise)}
