"""Differentially private SGD: clip per-example gradients and add Gaussian noise in every local step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.defences.base import Client
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.accounting import Budget, Releases, epsilon
from gradveil.defences.parts.clipped import (
    BELOW,
    augmented,
    clipped_sum,
    refuse_mixing_layers,
)
from gradveil.defences.parts.grid import gaussian_steps, grid_of
from gradveil.defences.parts.per_example import PerExample, noise_countermoves
from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Tensors, Update
from gradveil.validate import in_range, one_of

_BATCH_SIZE, _NUM_EXAMPLES = "batch_size", "num_examples"


@dataclass(frozen=True)
class DpSgd(PerExample):
    r"""Clip each per-example gradient, sum them, add Gaussian noise, and divide by the expected batch size.

    .. math::
        \tilde g = \frac 1B \Big( \sum_{i \in S} g_i \min(1, C / \|g_i\|_2) + N(0, \sigma^2 C^2 I) \Big)

    This replaces the gradient of every local step. With ``poisson`` sampling, each image of the client is in the batch
    S with probability q = B / (number of images), independently of the others. S may be empty; then the step is pure
    noise. The norm is that of all trained parameters together. The update states the expected number of images, since
    the true number is private.

    Large batches pay, since the noise is added once per batch: ``--batch-size 2048`` needs no more memory than 64
    images, which pass the network at a time. A start from weights that were trained on public data (``--weights``)
    costs no privacy. Networks with BatchNorm train with GroupNorm instead (``resnet20:norm=group``).

    Threat model: an honest-but-curious server that sees all updates of a client, knows the model and all images but
        one, and wants to know whether that one was used in training.
    Does not protect: properties that many images of a client share (its class distribution, a person in many images);
        the number of a client's images, which is assumed to be public; the share of clipped gradients, which a
        simulation writes into its rows (a real site keeps it unless its node config allows ``reports``). Noise does not
        cover the running statistics of BatchNorm (``Update.buffers``), so a layer that tracks them is refused.
    Guarantee: (ε, δ)-differential privacy for each image of a client (neighbours add or remove one image) over all of
        its rounds: ``accounting.epsilon`` with q and σ. With ``shuffle`` no amplification by sampling is claimed: the
        Gaussian mechanism is composed once for each use of an image, and "removing" an image means replacing it by one
        with zero gradient. Batches and noise come from a cipher, `Client.rng`. Clipped gradients and noise are whole
        steps of a grid with exact sums, so attacks on floating-point noise do not apply; ``parts.grid`` says why, and
        which tiny terms ε leaves out. A network that mixes the images of a batch is refused: there clipping would
        not bound the effect of an image. No error depends on pixels: a gradient that is not finite counts as zero.
    Reference: Abadi et al. 2016, https://arxiv.org/abs/1607.00133, Algorithm 1; De et al. 2022,
        https://arxiv.org/abs/2204.13650, Section 3 (GroupNorm, large batches, ``augment``).
    Differs from the paper: if the last batch of an epoch is smaller, its q is smaller too; the accountant rounds it up
        to that of the other batches. Momentum and weight decay act on the protected gradient. In a chain this defence
        must come before all others that change gradients, since it does not use the gradient that they return.

    Attributes:
        clip: C, the bound on the norm of a per-example gradient.
        noise: σ, the standard deviation of the noise in units of ``clip``; 0 only clips, without any guarantee.
        sampling: ``poisson`` replaces each batch by a random sample of all images; ``shuffle`` uses the given batches.
        delta: δ of the guarantee; it should be below 1 / (number of images).
        accountant: ``rdp``, or ``prv``, which is tighter and slower.
        augment: copies of each image, shifted at random, whose mean gradient is clipped; it costs no privacy. 1 takes
            the image itself.
        flip: whether copies are also mirrored at random, left to right; not for digits.
    """

    reports: ClassVar[Mapping[str, str]] = {
        "dp_sgd_clipped": "share of per-example gradients that were clipped; without noise, so not covered by ε",
    }

    clip: float = 1.0
    noise: float = 1.0
    sampling: str = "poisson"
    delta: float = 1e-5
    accountant: str = "rdp"
    augment: int = 1
    flip: bool = False

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0, open_low=True)
        in_range("noise", self.noise, 0)
        one_of("sampling", self.sampling, ["poisson", "shuffle"])
        in_range("delta", self.delta, 0, 1, open_low=True, open_high=True)
        one_of("accountant", self.accountant, ["rdp", "prv"])
        in_range("augment", self.augment, 1, 64)
        if self.flip and self.augment == 1:
            raise ConfigError("flip mirrors copies of images, got it with augment = 1. Raise augment, or drop flip.")

    @property
    def needs_gradient(self) -> bool:
        """Return False: per-example gradients are computed instead, some images at a time."""
        return False

    @property
    def draws_own_batch(self) -> bool:
        """Return whether batches are Poisson samples of all images."""
        return self.sampling == "poisson"

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Replace the batch by a Poisson sample of the client's images, which may be empty."""
        if self.sampling == "shuffle":
            return batch
        client.state[_BATCH_SIZE] = torch.tensor(len(batch))
        client.state[_NUM_EXAMPLES] = client.state.get(_NUM_EXAMPLES, torch.tensor(0)) + len(batch)
        drawn = client.rng.bernoulli(len(batch) / len(client.data), (len(client.data),))
        return client.data[drawn.to(client.data.images.device)]

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Compute per-example gradients of the batch, and return their clipped and noisy mean."""
        refuse_mixing_layers(self.name, client.model)
        bound = self.clip * BELOW if self.noise else self.clip
        grid, seen = self._grid if self.noise else 0.0, batch
        if self.augment > 1:
            seen = augmented(batch, self.augment, self.flip, client.rng.fork("augment", client.round))
        total, share = clipped_sum(client.model, seen, gradient, bound, grid, self.clip, self.augment)
        client.report("dp_sgd_clipped", share, weight=len(batch))
        expected = int(client.state.get(_BATCH_SIZE, torch.tensor(len(batch))))
        noisy = {name: self._noisy(tensor, client.rng) / max(expected, 1) for name, tensor in total.items()}
        return {name: tensor.to(gradient[name].dtype) for name, tensor in noisy.items()}

    def on_update(self, update: Update, client: Client) -> Update:
        """Raise `DefenceError` if buffers changed or the network mixes images; state the expected number of images."""
        update = super().on_update(update, client)
        client.state.pop(_BATCH_SIZE, None)
        expected = client.state.pop(_NUM_EXAMPLES, None)
        return update if expected is None else replace(update, num_examples=min(int(expected), len(client.data)))

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``likelihood`` (of the noise) and ``direction`` (cosine), or ``again`` (clipping) without noise.

        All of them clip the gradient of the guess; a mean of clipped gradients has a norm of at most ``clip`` too.
        """
        if self.noise == 0:
            return {"again": Countermove(partial(clip_rows, bound=self.clip))}
        return noise_countermoves(self.clip, self.noise * self.clip / arrived.batch_size, arrived)

    def budget(self, releases: Releases) -> Budget | None:
        """Return the budget by the accountant, or None if there is no noise.

        It is never below that of one of the updates: ``prv`` alone can be, by its rounding, if budgets are tiny.
        """
        if self.noise == 0:
            return None
        poisson = self.sampling == "poisson"
        rate = min(1.0, releases.batch_size / releases.num_examples) if poisson else 1.0
        steps = releases.steps if poisson else releases.uses
        one, whole = (
            epsilon(self.noise, rate, count, self.delta, self.accountant)
            for count in (steps // max(releases.rounds, 1), steps)
        )
        return Budget(max(one, whole), self.delta)

    def _noisy(self, steps: Tensor, rng: SecretStream) -> Tensor:
        """Add the noise to a sum in steps, and return the result in the unit of gradients."""
        noise = gaussian_steps(steps, self.noise * self.clip, self._grid, rng) if self.noise else 0.0
        return (steps + noise) * self._grid

    @property
    def _grid(self) -> float:
        """Return the step of the grid on which gradients are added; without noise there is none, and gradients stay."""
        return grid_of(self.noise * self.clip, bound=self.clip) if self.noise else 1.0
