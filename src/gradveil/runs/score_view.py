"""What arrives at a server as a function of the private images, and its derivatives at the true ones."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradveil.attacks.parts.local_training import Replay, replay_of
from gradveil.attacks.parts.statistics import batch_norms
from gradveil.defences import Countermove
from gradveil.errors import ConfigError
from gradveil.networks.watch import inputs_of
from gradveil.randomness import stream
from gradveil.runs.cramer_rao import Leak, condensed, leak
from gradveil.threat import Observation
from gradveil.types import Batch, Tensors

MOST_NUMBERS = 10**9
"""Largest number of entries of a Jacobian: 8 GB."""
DRAWS = 256
"""Number of draws of a client's secret numbers, to estimate their variance."""
ROUNDING = 5e-7
"""Rounding error of a float32 gradient, in units of the tensor's root mean square; about the error measured here."""
TOGETHER = 16
"""Images whose gradients are differentiated in one pass; more do not fit the cache."""


@dataclass(frozen=True)
class View:
    """What an attacker who plays one countermove compares, as a function of the images and the client's secrets.

    Attributes:
        replay: the client's step, in float64.
        move: the countermove.
        wanted: the gradient that arrived, (1, ...) by name.
        labels: (B,).
        images: (B, C, H, W), the point at which derivatives are taken.
        secrets: values (numbers,) and variances of each module's output that the attacker does not know. The values are
            drawn as the client draws its own.
        statistics: the batch's mean and variance (1, channels) at each BatchNorm whose running statistics arrived with
            the gradient, by the buffer's name.
    """

    replay: Replay
    move: Countermove
    wanted: Tensors
    labels: Tensor
    images: Tensor
    secrets: Mapping[str, tuple[Tensor, Tensor]]
    statistics: Tensors = field(default_factory=dict)

    @staticmethod
    def of(seen: Observation, move: Countermove, private: Batch, seed: int) -> "View":
        """Return the view of one target, at its private images."""
        rng = stream(seed, "score")
        network = copy.deepcopy(seen.network).cpu().double()
        wanted = {name: tensor.cpu().double() for name, tensor in seen.mean_gradients.items()}
        replay = replace(replay_of(replace(seen, network=network), "once", rng), penalties=move.penalties)
        secrets = {}
        for name, draw in move.unknowns.items():
            drawn = draw(DRAWS, rng).cpu().double()
            secrets[name] = (drawn[0], drawn.var(0))
        images = private.images.cpu().double()
        return View(replay, move, wanted, private.labels.cpu(), images, secrets, _batch_statistics(seen))

    @property
    def point(self) -> Tensor:
        """The images and secrets as one vector."""
        return torch.cat([self.images.flatten(), *(value for value, _ in self.secrets.values())])

    def __call__(self, points: Tensor) -> dict[str, Tensor]:
        """Return what arrives (T, ...), by name, for T points, each a vector of images and secrets."""
        count = len(points)
        sizes = [self.images.numel(), *(len(value) for value, _ in self.secrets.values())]
        pixels, *others = torch.split(points, sizes, 1)
        outputs = {name: _repeated(value.double(), count) for name, value in self.move.outputs.items()}
        outputs |= dict(zip(self.secrets, others, strict=True))
        wanted = {name: _repeated(tensor, count) for name, tensor in self.wanted.items()}
        images = pixels.reshape(-1, *self.images.shape[1:])
        guess: Tensors = self.replay(images, _repeated(self.labels, count), wanted, outputs)
        if self.move.sent is not None:
            guess = self.move.sent(guess, wanted)
        guess = {**guess, **self._statistics_of(images, count)}
        return {name: tensor for name, tensor in guess.items() if self.move.weights.get(name, 1.0)}

    def _statistics_of(self, images: Tensor, count: int) -> dict[str, Tensor]:
        """Return the statistics (T, channels) that T batches of images would have in place of ``statistics``."""
        if not self.statistics:
            return {}
        network, found = self.replay.network, dict[str, Tensor]()
        with inputs_of(network, batch_norms(network)) as inputs:
            network(images)
        for name, tensor in inputs.items():
            grouped = tensor.reshape(count, -1, *tensor.shape[1:])  # (T, B, channels, ...)
            rest = [axis for axis in range(grouped.dim()) if axis not in (0, 2)]
            variance, mean = torch.var_mean(grouped, rest, correction=1)
            found |= {f"{name}.running_mean": mean, f"{name}.running_var": variance}
        return {name: found[name] for name in self.statistics}

    def leaks(self, priors: Mapping[str, Tensor], tell: Callable[[float], None]) -> dict[str, Leak]:
        """Return how much the view reveals about the images to attackers with different priors, by their names.

        A prior is that of one image: variances (d,) or a covariance (d, d), as `gradveil.runs.cramer_rao.leak` takes.
        """
        arrived = self(self.point[None])
        compared = self.wanted if self.move.look is None else self.move.look(self.wanted)
        compared = {**compared, **self.statistics}
        noise = torch.cat([self._noise(name, tensor.detach(), compared[name]) for name, tensor in arrived.items()])
        known = noise > 0
        found = condensed(self.jacobian(tell)[known], noise[known])
        varying = torch.cat([variance for _, variance in self.secrets.values()]) if self.secrets else None
        one = torch.ones(len(found), dtype=torch.float64)
        images = len(self.images)
        return {
            name: leak(found, one, prior.repeat(images) if prior.dim() == 1 else prior, varying)
            for name, prior in priors.items()
        }

    def jacobian(self, tell: Callable[[float], None]) -> Tensor:
        """Return the derivatives (numbers, point) of all that arrives by images and secrets.

        Several copies of the point pass the network together, and each gives another column at a time: a network has
        more weights than an image has pixels.
        """
        point = self.point
        values = sum(tensor.numel() for tensor in self(point[None]).values())
        if values * len(point) > MOST_NUMBERS:
            raise ConfigError(
                f"A score takes at most {MOST_NUMBERS:,} derivatives, got {values:,} numbers of an update times "
                f"{len(point):,} of its images. Use a smaller model, smaller images or fewer of them."
            )
        copies = min(max(1, TOGETHER // len(self.images)), len(point))
        points = point.repeat(copies, 1).requires_grad_()
        with torch.enable_grad():
            arrived = torch.cat([tensor.flatten(1) for tensor in self(points).values()], 1)
            pull = torch.zeros_like(arrived, requires_grad=True)
            (pulled,) = torch.autograd.grad(arrived, points, pull, create_graph=True)  # linear in pull
        columns = arrived.new_empty(len(point), values)
        for number, places in enumerate(torch.split(torch.arange(len(point)), copies)):
            own = pulled[torch.arange(len(places)), places].sum()
            (found,) = torch.autograd.grad(own, pull, retain_graph=True)
            columns[places] = found[: len(places)]
            if number % 8 == 0:
                tell(int(places[0]) / len(point))
        return columns.T

    def _noise(self, name: str, tensor: Tensor, compared: Tensor) -> Tensor:
        """Return the standard deviation of each number, (numbers,); 0 for a tensor of zeros, which reveals nothing.

        It is what the model leaves unexplained, but for secrets, which are not the client's own here. Laplace noise has
        twice the Fisher information of normal noise as large.
        """
        stated = math.hypot(self.move.noise.get(name, 0.0), ROUNDING * _size(tensor))
        size = stated if self.secrets else _size(compared - tensor)
        laplace = self.move.distance == "l1" and name in self.move.noise
        return torch.full((tensor.numel(),), size / math.sqrt(2) if laplace else size, dtype=torch.float64)


def _batch_statistics(seen: Observation) -> dict[str, Tensor]:
    """Return the statistics of a batch, (1, channels) by name, that follow from changed running statistics."""
    found = {}
    for name, layer in batch_norms(seen.network).items():
        for key in ("running_mean", "running_var"):
            change, before = seen.buffers.get(f"{name}.{key}"), getattr(layer, key)
            if seen.batch_norm == "average" and layer.momentum and change is not None and before is not None:
                found[f"{name}.{key}"] = (before + change / layer.momentum).cpu().double()
    return found


def _size(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))
