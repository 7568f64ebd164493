"""Veil: full-batch private training of what is not frozen, with exact accounting over all rounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.defences.base import Client, Rehearse, Server
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.accounting import Budget, Releases, epsilon, poisson_noise
from gradveil.defences.parts.clipped import (
    BELOW,
    clipped_sum,
    head_sum,
    refuse_mixing_layers,
)
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.defences.parts.grid import gaussian_steps, grid_of, in_steps
from gradveil.defences.parts.per_example import PerExample, noise_countermoves
from gradveil.errors import ConfigError, DefenceError
from gradveil.models.trunk import FeatureNetwork
from gradveil.types import Batch, Tensors, Update
from gradveil.validate import in_range, one_of

MOMENTUM = 0.9
REACH, SIGNAL = 80.0, 0.2
"""Constants of the rate, chosen on SVHN and PneumoniaMNIST: how far a head's weights travel, in units of a clipped
gradient, and the share of its bound that the mean of clipped gradients typically keeps."""

TRIED: Mapping[str, tuple[float, ...]] = {"boost": (1 / 3, 3.0), "clip": (1 / 3, 3.0), "rounds": (0.5, 0.25)}
"""What ``tune=public`` tries beside the given values, as factors on them."""


@dataclass(frozen=True)
class Veil(PerExample):
    r"""Sum the clipped gradients of all images of a client, add Gaussian noise, and let the server take the step.

    .. math::
        \tilde g_k = \frac 1{n_k} \Big( \sum_{i=1}^{n_k} g_i \min(1, C / \|g_i\|_2) + N(0, \sigma^2 C^2 I) \Big),
        \qquad \sigma = \frac{\sqrt T}\mu

    There is one step in each of T rounds, on all images, so that no noise is wasted on small batches. With
    ``at=sum`` each client adds only :math:`1 / \sqrt K` of the noise, and the sum of K clients has all of it. It is
    meant for a linear head on frozen public features (models ``patches`` and ``frozen``): few parameters to hide, and
    per-example clipping in closed form. Any other network without statistics over the batch works too, at a higher
    price. On a head, the server takes steps with momentum 0.9 and, after the last round, the mean of the second half
    of the weights. Its rate follows a rule:

    .. math:: \text{rate} = \frac{80}{C \sqrt{T \, (0.2^2 + s^2)}}, \qquad s = \frac{\sigma \sqrt{d K'}}{n}

    with d entries, n images of all clients, and :math:`K'` full shares of noise in the sum (K, or 1 with ``at=sum``).
    Other networks take plain steps of ``--lr``. Clients play FedSGD with all images whatever the protocol says.

    With ``tune=public``, clip, rounds and a factor on the rule's rate are chosen by rehearsals: the same federation
    trains on four fifths of the public images (``--aux``), with as much noise per image, and is scored on the rest.
    Private images have no part in it, so that it costs no privacy.

    Threat model: a server that may alter the model in any way, sees all updates (``at=sum``: only their sums) of all
        rounds, knows all images but one, and wants anything about that one.
    Does not protect: what many images of a client share; the number of a client's images, which is public; the share of
        clipped gradients, which a simulation reports. ``at=sum`` is honest only if the sums are really secure: if a
        server sees single updates, mu becomes mu times the square root of K; if only h of K clients add their noise,
        mu times the square root of K / h. Frozen parts must be made of public data.
    Guarantee: mu-Gaussian differential privacy over ALL rounds for each image (neighbours add or remove one), or with
        ``unit=client`` for all images of a client at once (its contributions are there, or zero): exact composition,
        ``parts.gaussian_dp``. With ``share`` below 1, batches are Poisson samples, and (ε, δ) is that of the same mu,
        by the accountant. Sums are exact on a grid (``parts.grid``); with ``at=sum`` the noise is a sum of K rounded
        normals, which differs from a rounded normal by about one part in a million, not counted. After T rounds a
        client sends nothing more.
    Reference: Dong, Roth and Su 2019, https://arxiv.org/abs/1905.02383 (composition); Tramer and Boneh 2021,
        https://arxiv.org/abs/2011.11660 (private heads on fixed features); Kairouz et al. 2021,
        https://arxiv.org/abs/2102.06387 (noise shared under secure aggregation).
    Differs from the paper: full batches in place of sampled ones; rounded Gaussian noise in place of a discrete
        Gaussian; the rate follows a rule whose two constants were chosen on SVHN and PneumoniaMNIST, not on the sets
        that we report. The default clip is that of a prototype on MNIST.

    Attributes:
        mu: the guarantee of the whole training; 1, 2 and 3 are ε = 4.4, 10 and 17 at δ = 1e-5.
        clip: C, the bound on the norm of a contribution: a gradient of one image, or with ``unit=client`` of a client.
        at: ``client``, each adds all of the noise itself; ``sum``, the noise is shared, under secure aggregation.
        unit: ``image`` or ``client``: whose presence is hidden.
        share: each image takes part in a step with this probability; 1 uses all images in every step.
        clients: with ``at=sum``, the number of clients whose noise adds up to all of it: a round with fewer is not
            used. 0 takes all clients of a round, so that none may drop out.
        rounds: T, the number of rounds that mu covers; 0 is that of the training.
        rate: the server's rate, in place of the rule; 0 is the rule.
        boost: factor on the rule's rate.
        tune: ``rule`` takes clip, rounds and boost as given; ``public`` chooses them on public images with labels,
            which a simulation does before it trains; ``chosen`` says that this was done.
        delta: δ at which ε is stated.
    """

    aux_labels: ClassVar[bool] = False
    reports: ClassVar[Mapping[str, str]] = {
        "veil_clipped": "share of contributions that were clipped; without noise, so not covered by μ",
    }

    mu: float = 1.0
    clip: float = 0.3
    at: str = "client"
    unit: str = "image"
    share: float = 1.0
    clients: int = 0
    rounds: int = 0
    rate: float = 0.0
    boost: float = 1.0
    tune: str = "rule"
    delta: float = 1e-5

    def __post_init__(self) -> None:
        in_range("mu", self.mu, 0, open_low=True)
        in_range("clip", self.clip, 0, open_low=True)
        one_of("at", self.at, ["client", "sum"])
        one_of("unit", self.unit, ["image", "client"])
        in_range("share", self.share, 0, 1, open_low=True)
        in_range("clients", self.clients, 0)
        in_range("rounds", self.rounds, 0)
        in_range("rate", self.rate, 0)
        in_range("boost", self.boost, 0, open_low=True)
        one_of("tune", self.tune, ["rule", "public", "chosen"])
        in_range("delta", self.delta, 0, 1, open_low=True, open_high=True)
        if self.unit == "client" and self.share < 1:
            raise ConfigError(f"share must be 1 with unit=client, which hides all images at once, got {self.share:g}.")
        if self.tune == "public" and self.rate:
            raise ConfigError(
                f"rate must be 0 with tune=public, which chooses it, got {self.rate:g}. Drop one of them."
            )
        object.__setattr__(self, "uses_aux", self.tune != "rule")
        object.__setattr__(self, "needs_aux", self.tune == "public")

    def training(self, settings: TrainSettings) -> TrainSettings:
        """Return the settings with one step per round, and weights by which contributions count alike."""
        weighting = "uniform" if self.unit == "client" else "size"
        if settings.algorithm == "fedavg":
            settings = replace(settings, algorithm="fedsgd", batch_size=0)
        if self.tune == "chosen" and 0 < self.rounds < settings.rounds:
            saved = tuple(number for number in settings.save_rounds if number <= self.rounds)
            settings = replace(settings, rounds=self.rounds, save_rounds=saved)
        return replace(settings, weighting=weighting)

    @property
    def rehearses(self) -> bool:
        """Return whether clip, rounds and rate are still to be chosen on public images."""
        return self.tune == "public"

    def tuned(self, rehearse: Rehearse, rounds: int, images: float) -> "Veil":
        """Return the defence with the clip, rounds and boost that did best in rehearsals with as much noise per image.

        One setting after the other: each is varied by its factors in `TRIED`, and the best value is kept. Rounds that
        the user stated stay.
        """
        if not self.rehearses:
            return self
        images = images if self.unit == "image" else 1.0
        best = replace(self, tune="chosen", rounds=self.rounds or rounds)

        def score(one: "Veil") -> tuple[float, float]:
            return rehearse(replace(one, mu=one.mu * images))

        highest = score(best)
        for name, factors in TRIED.items():
            if name == "rounds" and self.rounds:
                continue
            start = getattr(best, name)
            for factor in factors:
                value = max(1, round(start * factor)) if name == "rounds" else start * factor
                other = replace(best, **{name: value})
                if (found := score(other)) > highest:
                    best, highest = other, found
        return best

    def planned(self, settings: TrainSettings) -> "Veil":
        """Return the defence with the training's rounds and clients. Raise `ConfigError` if mu would not hold in it."""
        if self.tune == "public":
            raise ConfigError(
                f"tune=public is settled by a simulation before it trains, got {self.spec!r} elsewhere. Run gradveil "
                "train with it once, and use the defence in the settings.toml of that run."
            )
        if self.rounds and self.rounds < settings.rounds:
            raise ConfigError(
                f"rounds of {self.spec!r} must be at least those of the training ({settings.rounds}), for which mu is "
                f"to hold, got {self.rounds}. Raise it, drop it, or lower --rounds."
            )
        there = settings.num_sampled
        if self.at == "sum":
            if settings.aggregation != "secure":
                raise ConfigError(
                    "at=sum must run under secure aggregation, since single updates have too little noise, got "
                    f"aggregation {settings.aggregation!r}. Add --aggregation secure, or use at=client."
                )
            if there < max(2, self.clients):
                raise ConfigError(
                    f"at=sum needs the clients whose noise adds up ({max(2, self.clients)} or more) in every round, "
                    f"got {there}. Raise --clients or --sampled, or lower clients in {self.spec!r}."
                )
            if settings.sampling != "uniform":
                raise ConfigError(
                    f"at=sum needs clients that count once in a sum, got sampling {settings.sampling!r}. "
                    "Use --sampling uniform."
                )
        return replace(self, rounds=self.rounds or settings.rounds, clients=self.clients or there)

    @property
    def fewest_clients(self) -> int:
        """Return the number of clients that a sum needs to have all of the noise, or 0 if each adds all of it."""
        return max(1, self.clients) if self.at == "sum" else 0

    @property
    def needs_gradient(self) -> bool:
        """Return whether the plain gradient is clipped: that of a client, not those of images."""
        return self.unit == "client"

    @property
    def draws_own_batch(self) -> bool:
        """Return True: a step uses all images of the client, or a Poisson sample of them."""
        return True

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Return all images of the client, or a Poisson sample of them, which may be empty."""
        if self.share == 1:
            return client.data
        drawn = client.rng.bernoulli(self.share, (len(client.data),))
        return client.data[drawn.to(client.data.images.device)]

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Return the noisy mean of clipped gradients, or with ``unit=client`` the noisy, clipped gradient."""
        if self.rounds and client.round > self.rounds:
            raise DefenceError(
                f"Defence {self.spec!r} covers {self.rounds} rounds, got round {client.round}: the privacy budget is "
                "spent. Plan more with rounds=, which adds noise to each."
            )
        std = self._std
        grid = grid_of(std, bound=self.clip)
        count = 1.0 if self.unit == "client" else max(self.share * len(client.data), 1.0)
        steps, clipped = self._steps(client.model, batch, gradient, grid)
        client.report("veil_clipped", clipped)
        noisy = {name: (t + gaussian_steps(t, std, grid, client.rng)) * grid / count for name, t in steps.items()}
        return {name: tensor.to(gradient[name].dtype) for name, tensor in noisy.items()}

    def contributions(self, network: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the sum of the images' clipped gradients, before noise: what someone who knows them can subtract."""
        grid = grid_of(self._std, bound=self.clip)
        trained = {name: tensor.detach() for name, tensor in network.named_parameters() if tensor.requires_grad}
        steps, _ = replace(self, unit="image")._steps(network, batch, trained, grid)
        return {name: tensor * grid for name, tensor in steps.items()}

    def _steps(
        self, network: nn.Module, batch: Batch, gradient: Tensors, grid: float
    ) -> tuple[dict[str, Tensor], float]:
        """Return the clipped sum in steps of the grid, and the share of contributions that were clipped."""
        bound = self.clip * BELOW
        if self.unit == "client":
            return _clipped_whole(gradient, bound, grid)
        refuse_mixing_layers(self.name, network)
        if isinstance(network, FeatureNetwork) and list(gradient) == ["head.weight"]:
            total, clipped = head_sum(network, batch, bound, grid)
            return {"head.weight": total}, clipped
        return clipped_sum(network, batch, gradient, bound, grid, self.clip)

    def on_update(self, update: Update, client: Client) -> Update:
        """Raise `DefenceError` if buffers changed or the network mixes images; state the number of all images."""
        return replace(super().on_update(update, client), num_examples=len(client.data))

    def on_aggregate(self, total: Update, server: Server) -> Update:
        """Take the server's step: momentum, the rule's rate, and at the end the mean of the second half's weights."""
        if not self.rate and not isinstance(server.model, FeatureNetwork):
            return total
        entries = sum(tensor.numel() for tensor in total.tensors.values())
        rate, now = self.rate or self.rule(total.num_examples, entries), dict(server.model.named_parameters())
        moved = {}
        for name, change in total.tensors.items():
            kept = server.state.get(f"veil.velocity.{name}", torch.zeros_like(change))
            server.state[f"veil.velocity.{name}"] = velocity = MOMENTUM * kept + change / server.lr
            step = rate * velocity
            if 2 * server.round > self.rounds > 0:
                ahead = now[name].detach().to(step) + step
                server.state[f"veil.sum.{name}"] = whole = server.state.get(f"veil.sum.{name}", 0 * ahead) + ahead
                if server.round == self.rounds:
                    step = whole / (self.rounds - self.rounds // 2) - now[name].detach().to(step)
            moved[name] = step
        return replace(total, tensors=moved)

    def rule(self, images: int, entries: int) -> float:
        """Return the server's rate for a sum over ``images`` images and a head of ``entries`` entries.

        Example:
            >>> veil = Veil(mu=2, rounds=60, clients=10)
            >>> round(veil.rule(4000, 27010), 1), round(replace(veil, at="sum").rule(4000, 27010), 1)
            (63.6, 134.7)
        """
        contributions = images * self.share if self.unit == "image" else max(self.clients, 1)
        shares = 1 if self.at == "sum" else max(self.clients, 1)
        noise = self.noise_multiplier * math.sqrt(entries * shares) / max(contributions, 1)
        return self.boost * REACH / (self.clip * math.sqrt(max(self.rounds, 1)) * math.hypot(SIGNAL, noise))

    @property
    def noise_multiplier(self) -> float:
        """Return σ, the standard deviation of all of the noise in units of ``clip``."""
        rounds = max(self.rounds, 1)
        if self.share == 1:
            return math.sqrt(rounds) / self.mu
        return poisson_noise(epsilon_of(self.mu, self.delta), self.share, rounds, self.delta)

    @property
    def _std(self) -> float:
        """Return the standard deviation of the noise that one client adds."""
        if self.at == "client":
            return self.noise_multiplier * self.clip
        if not self.clients:
            raise DefenceError("Defence 'veil' with at=sum must know how many clients share the noise; set clients=.")
        return self.noise_multiplier * self.clip / math.sqrt(self.clients)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``likelihood``, in units of the noise, and ``direction`` (cosine); both clip the guess's gradient."""
        known = self if self.at == "client" or self.clients else replace(self, clients=arrived.clients)
        count = self.share * arrived.batch_size if self.unit == "image" else 1.0
        std = known._std / max(count, 1.0)  # of one client; a mean of several has less
        return noise_countermoves(self.clip, std, arrived)

    def budget(self, releases: Releases) -> Budget:
        """Return what the released steps cost: exact for full batches, else by the accountant."""
        if self.share == 1:
            mu = math.sqrt(releases.steps) / self.noise_multiplier
            return Budget(epsilon_of(mu, self.delta), self.delta, mu)
        return Budget(epsilon(self.noise_multiplier, self.share, releases.steps, self.delta), self.delta)


def _clipped_whole(gradient: Tensors, bound: float, grid: float) -> tuple[dict[str, Tensor], float]:
    """Return a gradient scaled to a norm of at most ``bound``, in steps, and whether it was clipped, as 0 or 1.

    A gradient with NaN or infinity counts as zero.
    """
    norm = math.hypot(*(float(tensor.double().norm()) for tensor in gradient.values()))
    if not math.isfinite(norm):
        return {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in gradient.items()}, 1.0
    factor = min(1.0, bound / norm) if norm else 1.0
    return {name: in_steps(tensor.double() * factor, grid) for name, tensor in gradient.items()}, float(factor < 1)
