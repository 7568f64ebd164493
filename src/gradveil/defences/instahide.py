"""InstaHide: mixtures of images whose pixels change sign at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.defences.base import Client
from gradveil.defences.mixup import Mixture, Mixup
from gradveil.errors import DefenceError
from gradveil.types import Batch
from gradveil.validate import in_range


@dataclass(frozen=True)
class Instahide(Mixup):
    r"""Mix each image with k - 1 others as `Mixup` does, and flip the sign of every pixel with a chance of one half.

    .. math:: \tilde x = \sigma \circ \sum_{j=1}^k \lambda_j x_j, \qquad \sigma_i \sim \{-1, 1\}, \qquad
        \tilde y = \sum_{j=1}^k \lambda_j y_j

    for pixels scaled to [-1, 1]. With ``pool=public`` two of the images are the client's, and k - 2 are public ones
    without a label.

    Threat model: a curious server that takes what it inverts from an update for a private image.
    Does not protect: against a server that collects many encodings of the same images (the decoder ``unmix``): their
        absolute values are as before the flips.
    Guarantee: none; the paper's conjecture of hardness was refuted by Carlini et al.
    Reference: Huang et al. 2020, https://arxiv.org/abs/2010.02772, Algorithms 1 and 2 (k of 4 and 6, cap 0.65).
    Differs from the paper: coefficients are Dirichlet(own, 1, ..., 1) as in GradAttack; encodings are drawn anew in
        every batch, where the paper draws partners once an epoch.

    Attributes:
        k: images in a mixture.
        pool: where the others come from: ``batch``, ``data`` (all of the client's), or ``public`` (``--aux``).
        cap: the largest coefficient.
        own: parameter of the Dirichlet distribution for the image itself; that of the others is 1.
        flip: chance that a pixel's sign flips.
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
        """Where others may come from."""
        return (*super().pools, "public")

    @property
    def num_private(self) -> int:
        """All are the client's own, or two."""
        return 2 if self.pool == "public" else self.k

    def hide(self, mixed: Tensor, rng: torch.Generator) -> Tensor:
        """Flip signs around mid-grey."""
        flips = torch.rand(mixed.shape, generator=rng).to(mixed) < self.flip
        return torch.where(flips, 1 - mixed, mixed)

    def mixture(self, batch: Batch, client: Client) -> Mixture:
        """As `Mixup`, filled up with public images that have no label."""
        mixture = super().mixture(batch, client)
        count = self.k - self.num_private
        if not count:
            return mixture
        public = client.aux
        if public is None or len(public) < count or public.images.shape[1:] != batch.images.shape[1:]:
            there = "none" if public is None else f"{len(public)} of shape {tuple(public.images.shape[1:])}"
            raise DefenceError(
                f"Defence 'instahide' with pool=public needs {count} public images of shape "
                f"{tuple(batch.images.shape[1:])} or more, got {there}. Give --aux, or lower k."
            )
        self.require_pixels(public.images)
        chosen = torch.rand(len(batch), len(public), generator=client.rng).argsort(1)[:, :count]
        theirs = public.images[chosen.to(public.images.device)].to(mixture.images)
        labels = mixture.labels.new_zeros(len(batch), count, mixture.labels.shape[2])
        marks = mixture.sensitive.new_zeros(len(batch), count)
        return Mixture(
            mixture.weights,
            torch.cat([mixture.images, theirs], 1),
            torch.cat([mixture.labels, labels], 1),
            torch.cat([mixture.sensitive, marks], 1),
        )
