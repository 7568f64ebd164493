"""InstaHide: train on mixtures of images whose pixels change sign at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.defences.base import Client
from gradveil.defences.mixup import Mixture, Mixup
from gradveil.errors import DefenceError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from gradveil.validate import in_range


@dataclass(frozen=True)
class Instahide(Mixup):
    r"""Mix each image with k - 1 others as `Mixup` does, then flip the sign of each pixel with probability ``flip``.

    .. math:: \tilde x = \sigma \circ \sum_{j=1}^k \lambda_j x_j, \qquad \sigma_i \sim \{-1, 1\}, \qquad
        \tilde y = \sum_{j=1}^k \lambda_j y_j

    for pixels scaled to [-1, 1]. With ``pool=public``, two of the images are the client's own and the other k - 2 are
    public images without a label.

    Threat model: an honest-but-curious server that takes the image it inverts from an update for a private one.
    Does not protect: against a server that collects many encodings of the same images (the decoder ``unmix``): flips
        do not change the absolute values of the mixtures.
    Guarantee: none; Carlini et al. refuted the paper's conjecture that decoding is hard.
    Reference: Huang et al. 2020, https://arxiv.org/abs/2010.02772, Algorithms 1 and 2 (k = 4 and 6, cap 0.65).
    Differs from the paper: coefficients come from Dirichlet(own, 1, ..., 1), as in GradAttack. Encodings are drawn anew
        for every batch; the paper draws partners once per epoch.

    Attributes:
        k: number of images in a mixture.
        pool: where the other images come from: ``batch``, ``data`` (all of the client's images), or ``public``
            (``--aux``).
        cap: largest coefficient that is allowed.
        own: parameter of the Dirichlet distribution for the image itself, a whole number; the others have 1.
        flip: probability that the sign of a pixel flips.
    """

    aux_labels: ClassVar[bool] = False

    flip: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("flip", self.flip, 0, 1)
        for name in ("uses_aux", "needs_aux"):
            object.__setattr__(self, name, self.pool == "public")

    @property
    def pools(self) -> tuple[str, ...]:
        """Return the values that ``pool`` may take."""
        return (*super().pools, "public")

    @property
    def num_private(self) -> int:
        """Return how many images of a mixture are the client's own: all k, or two with ``pool=public``."""
        return 2 if self.pool == "public" else self.k

    def hide(self, mixed: Tensor, rng: SecretStream) -> Tensor:
        """Flip signs around mid-grey, which is 0.5 for pixels in [0, 1]."""
        flips = rng.bernoulli(self.flip, mixed.shape).to(mixed.device)
        return torch.where(flips, 1 - mixed, mixed)

    def mixture(self, batch: Batch, client: Client) -> Mixture:
        """Draw mixtures as `Mixup` does, and fill them up to k with public images that have no label."""
        mixture = super().mixture(batch, client)
        count = self.k - self.num_private
        if not count:
            return mixture
        public = client.aux
        if public is None or len(public) < count or public.images.shape[1:] != batch.images.shape[1:]:
            there = "none" if public is None else f"{len(public)} of shape {tuple(public.images.shape[1:])}"
            raise DefenceError(
                f"Defence 'instahide' with pool=public needs at least {count} public images of shape "
                f"{tuple(batch.images.shape[1:])}, got {there}. Choose other public images (--aux), or lower k."
            )
        self.require_pixels(public.images)
        chosen = client.rng.uniform((len(batch), len(public)), torch.float64).argsort(1)[:, :count]
        theirs = public.images[chosen.to(public.images.device)].to(mixture.images)
        labels = mixture.labels.new_zeros(len(batch), count, mixture.labels.shape[2])
        marks = mixture.sensitive.new_zeros(len(batch), count)
        return Mixture(
            mixture.weights,
            torch.cat([mixture.images, theirs], 1),
            torch.cat([mixture.labels, labels], 1),
            torch.cat([mixture.sensitive, marks], 1),
        )
