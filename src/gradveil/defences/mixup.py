"""Mixup: train on mixtures of several images and of their labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.defences.base import Client, Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import ConfigError, DefenceError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from gradveil.validate import in_range, one_of

_TRIES = 1000
"""Number of draws of the coefficients after which the cap counts as too low."""


class Mixture(NamedTuple):
    """The parts of N mixtures of k images each.

    Attributes:
        weights: (N, k) coefficients, that of the image itself first; rows sum to one.
        images: (N, k, C, H, W), the image itself first.
        labels: (N, k, classes) probabilities.
        sensitive: (N, k) whether each image is marked sensitive.
    """

    weights: Tensor
    images: Tensor
    labels: Tensor
    sensitive: Tensor


@dataclass(frozen=True)
class Mixup(Defence):
    r"""Replace each image by a random mixture with k - 1 others, and its label by the same mixture of their labels.

    .. math:: \tilde x = \sum_{j=1}^k \lambda_j x_j, \qquad \tilde y = \sum_{j=1}^k \lambda_j y_j, \qquad
        \lambda \sim \mathrm{Dirichlet}(\mathit{own}, 1, \dots, 1), \quad \max_j \lambda_j \le \mathit{cap}

    :math:`x_1` is the image itself. Partners and coefficients are drawn anew for every batch. If a coefficient is
    above the cap, all coefficients of that mixture are drawn again.

    Threat model: an honest-but-curious server that takes the image it inverts from an update for a private one.
    Does not protect: against a server that collects many mixtures of the same images, finds out which of them share an
        image, and solves a linear system for the images (the decoder ``unmix``).
    Guarantee: none.
    Reference: Zhang et al. 2018, https://arxiv.org/abs/1710.09412; as a defence: Huang et al. 2021 (GradAttack),
        https://arxiv.org/abs/2112.00059, with k = 4 and k = 6.
    Differs from the paper: Zhang et al. mix two images and draw the coefficient from a Beta distribution; the Dirichlet
        distribution and the cap are those of GradAttack. If a batch has fewer than k images, partners come from all of
        the client's images.

    Attributes:
        k: number of images in a mixture.
        pool: where the other images come from: ``batch``, or ``data`` for all of the client's images.
        cap: largest coefficient that is allowed.
        own: parameter of the Dirichlet distribution for the image itself, a whole number; the others have 1.
    """

    hides_images: ClassVar[bool] = True

    k: int = 4
    pool: str = "batch"
    cap: float = 0.65
    own: int = 3

    def __post_init__(self) -> None:
        in_range("k", self.k, 2)
        one_of("pool", self.pool, self.pools)
        in_range("own", self.own, 1)
        in_range("cap", self.cap, 0, 1, open_low=True)
        if self.cap * self.k <= 1:
            raise ConfigError(
                f"cap must be more than 1/k, the mean coefficient, got {self.cap} with k={self.k}. Raise cap or k."
            )
        object.__setattr__(self, "fewest_images", self.num_private)

    @property
    def pools(self) -> tuple[str, ...]:
        """Return the values that ``pool`` may take."""
        return ("batch", "data")

    @property
    def num_private(self) -> int:
        """Return how many images of a mixture are the client's own."""
        return self.k

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Replace each image by a mixture."""
        mixture = self.mixture(batch, client)
        mixed = torch.einsum("nk,nk...->n...", mixture.weights, mixture.images)
        labels = torch.einsum("nk,nkc->nc", mixture.weights, mixture.labels)
        labels = labels / labels.sum(1, keepdim=True)  # public images of InstaHide have no label
        return Batch(self.hide(mixed, client.rng), labels, mixture.sensitive.any(1))

    def hide(self, mixed: Tensor, rng: SecretStream) -> Tensor:
        """Change the finished mixtures (N, C, H, W); here they stay unchanged."""
        return mixed

    def mixture(self, batch: Batch, client: Client) -> Mixture:
        """Draw coefficients and partners for each image of a batch."""
        images, rng = batch.images, client.rng
        self.require_pixels(images)
        weights = coefficients(len(batch), self.k, self.own, self.cap, rng).to(images)
        others = self._private_partners(batch, client)
        owners = [batch.images[:, None], others.images]
        classes = _num_classes(batch, client)
        labels = [one_hot(some, classes).to(images) for some in (batch.labels[:, None], others.labels)]
        marks = [batch.sensitive[:, None], others.sensitive]
        return Mixture(weights, torch.cat(owners, 1), torch.cat(labels, 1), torch.cat(marks, 1))

    def _private_partners(self, batch: Batch, client: Client) -> Batch:
        """Draw ``num_private`` - 1 other images of the client per image of the batch: (N, num_private - 1, ...)."""
        wanted = self.num_private - 1
        pool = batch if self.pool != "data" and len(batch) > wanted else client.data
        if len(pool) <= wanted:
            raise DefenceError(
                f"Defence {self.name!r} mixes {self.num_private} of a client's images, got a client with {len(pool)}. "
                "Lower k, or give clients more images (in an audit: --images). If an earlier defence in the chain "
                "replaces batches, use larger batches (--batch-size)."
            )
        order = client.rng.uniform((len(batch), len(pool)), torch.float64).argsort(1)[:, : wanted + 1]
        order = order.to(pool.images.device)
        same = pool.images[order].flatten(2).eq(batch.images.flatten(1)[:, None]).all(2)  # (N, k): an image drew itself
        chosen = order.gather(1, same.long().argsort(dim=1, stable=True))[:, :wanted]
        return pool[chosen]

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``unmix``, which finds the mixtures that share images and solves for the images."""
        return {"unmix": Countermove(soft_labels=True, decode=("unmix",))}


def coefficients(count: int, k: int, own: int, cap: float, rng: SecretStream) -> Tensor:
    """Draw (count, k) coefficients from Dirichlet(own, 1, ..., 1), and draw rows again that exceed the cap.

    Raise `DefenceError` if a row still exceeds the cap after many draws.

    Example:
        >>> coefficients(100, 4, 3, 0.65, SecretStream(0)).max() <= 0.65
        tensor(True)
    """
    drawn = torch.empty(count, k)
    open_ = torch.arange(count)
    for _ in range(_TRIES):
        parts = rng.exponential((len(open_), own + k - 1))  # n of them sum to a Gamma(n) draw
        gammas = torch.cat([parts[:, :own].sum(1, keepdim=True), parts[:, own:]], 1)
        drawn[open_] = gammas / gammas.sum(1, keepdim=True)
        open_ = open_[(drawn[open_] > cap).any(1)]
        if not len(open_):
            return drawn
    raise DefenceError(
        f"The coefficients of {k} mixed images must be at most cap={cap:g}, but {_TRIES} draws with own={own} all "
        "exceeded it. Raise cap, or lower own."
    )


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Turn class labels (...,) into probabilities (..., classes); return floating-point (soft) labels unchanged."""
    return labels if labels.is_floating_point() else F.one_hot(labels, num_classes)


def _num_classes(batch: Batch, client: Client) -> int:
    """Return the number of classes of the client's model, without changing the training mode of its layers."""
    if batch.labels.dim() == 2:
        return batch.labels.shape[1]
    modes = {layer: layer.training for layer in client.model.modules()}
    try:
        client.model.eval()
        with torch.no_grad():
            return int(client.model(batch.images[:1]).shape[1])
    finally:
        for layer, training in modes.items():
            layer.training = training
