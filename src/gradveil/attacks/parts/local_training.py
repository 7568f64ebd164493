r"""The update that a guess would have caused: the client's local steps, simulated for many targets at once.

All results are mean gradients over the steps, :math:`(w_0 - w_K) / (\eta \sum_k c_k)`, where :math:`c_k` is the weight
of step k in the update (1 without momentum). For a single step this is the gradient.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.federated.protocol import LocalSettings
from gradveil.networks.grads import Loss, cross_entropy, example_gradients
from gradveil.networks.grouped import BatchNormOfGroups
from gradveil.networks.watch import watch
from gradveil.threat import Knowledge, Observation
from gradveil.threat.first_step import caps, saturated
from gradveil.types import Tensors

WAYS = ("unroll", "line", "once")


@dataclass(frozen=True)
class Replay:
    r"""An attacker's simulation of local training on B images. Their order and each step's labels are not known.

    ``unroll``: runs all steps and differentiates through them, with all that `LocalSettings` describes (momentum, Adam,
    weight decay, accumulation, clipping, label smoothing): exact except for the order of images, and for Dropout, whose
    masks are searched if there is a single step (`gradveil.attacks.parts.dropout`). ``line``: takes the gradient of
    step k at :math:`w_0 + k/K (w_K - w_0)`, on the straight line to the returned weights (the idea of SME, Zhu et al.
    2023), which needs no differentiation through steps. ``once``: takes the gradient of all images at :math:`w_0`,
    correct to first order in the learning rate and by far the fastest. Several steps of Adam are always unrolled: each
    depends on the ones before. A single one is compared as `gradveil.threat.first_step` says.

    Attributes:
        network: the broadcast network, with BatchNorm in the clients' mode.
        batch_size: B.
        way: unroll, line or once; no effect for a single step.
        how: the clients' settings; None for a single step of plain SGD.
        lr: the clients' learning rate.
        batches: the images of each step, in an order that the attacker draws; a step's batches are equal parts of it.
        penalties: terms of each example's loss in addition to cross-entropy, as functions of a module's output, by the
            module's name.
    """

    network: nn.Module
    batch_size: int
    way: str = "unroll"
    how: LocalSettings | None = None
    lr: float = 1.0
    batches: tuple[Tensor, ...] = ()
    penalties: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether one batched pass at the broadcast weights is enough."""
        how = self.how
        if how is None:
            return True
        if len(self.batches) == 1:
            return how.accumulate == 1 or not _mixes(self.network)
        alike = len({len(batch) for batch in self.batches}) == 1 and how.is_plain
        return self.way == "once" and alike and not _mixes(self.network)

    @property
    def mixes(self) -> bool:
        """Whether BatchNorm takes its statistics from the batch."""
        return _mixes(self.network)

    def __call__(
        self, images: Tensor, labels: Tensor, wanted: Tensors, outputs: Tensors | None = None
    ) -> dict[str, Tensor]:
        """Return the mean gradients (T, ...) of images (T * B, C, H, W) in [0, 1].

        ``labels`` are (T * B,) or (T * B, classes). ``wanted`` are the clients' mean gradients (T, ...), which give
        ``line`` its points. ``outputs`` (T, ...) replace the outputs of modules, by name.
        """
        if self.is_plain:
            with replaced_outputs(self.network, outputs or {}, self.batch_size), self._loss() as loss:
                found = example_gradients(
                    self.network, images, labels, group_size=self.batch_size, loss=loss, create_graph=True
                )
            return found if self.how is None else self._single(found)
        grouped = images.view(-1, self.batch_size, *images.shape[1:])
        grouped_labels = labels.view(-1, self.batch_size, *labels.shape[1:])
        each = torch.func.vmap(self._one, randomness="error")
        every: dict[str, Tensor] = each(grouped, grouped_labels, dict(wanted), dict(outputs or {}))
        return self._single(every) if len(self.batches) == 1 else every

    def _single(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what a client's only step makes of mean gradients (T, ...): scaled, clipped, decayed, saturated."""
        how = self.how or LocalSettings()
        if how.is_plain:
            return gradients
        (scale,) = how.step_scales(self.batch_size)
        found = torch.func.vmap(partial(self._changed, scale=scale))(gradients)
        found = found if how.optimiser == "adamw" else self._decayed(found, self._start)
        if how.is_adam:
            return saturated(found, caps(self.network, how, self.lr))
        return {name: value / scale for name, value in found.items()}

    def _changed(self, gradient: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Return one step's gradient for the loss's reduction, clipped."""
        how = self.how or LocalSettings()
        if scale != 1:
            gradient = {name: value * scale for name, value in gradient.items()}
        if not how.clip_norm:
            return gradient
        square = torch.stack([value.square().sum() for value in gradient.values()]).sum()
        factor = (how.clip_norm * (square + _TINY).rsqrt()).clamp(max=1.0)
        return {name: value * factor for name, value in gradient.items()}

    def _decayed(self, gradient: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
        decay = (self.how or LocalSettings()).weight_decay
        return {name: g + decay * weights[name] for name, g in gradient.items()} if decay else gradient

    @property
    def _start(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.network.named_parameters() if p.requires_grad}

    def _one(
        self, images: Tensor, labels: Tensor, wanted: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the mean gradient of one target's B images."""
        with replaced_outputs(self.network, outputs), self._loss() as each_loss:
            return self._played(images, labels, wanted, each_loss)

    @contextmanager
    def _loss(self) -> Iterator[Loss]:
        """Give a function for each example's loss after a forward pass: cross-entropy and the penalties."""
        seen: dict[str, Tensor] = {}
        smoothing = self.how.label_smoothing if self.how else 0.0

        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            total = cross_entropy(outputs, labels, smoothing)
            for name, penalty in self.penalties.items():
                total = total + penalty(seen[name])
            return total

        with watch(self.network, self.penalties, after=lambda call: seen.__setitem__(call.name, call.output)):
            yield loss

    def _played(self, images: Tensor, labels: Tensor, wanted: dict[str, Tensor], each_loss: Loss) -> dict[str, Tensor]:
        """Return the mean gradient over the steps; of a single step the gradient itself, before clipping and decay."""
        how, start = self.how or LocalSettings(), self._start

        def loss(weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
            return each_loss(torch.func.functional_call(self.network, weights, (images,)), labels).mean()

        def gradient(weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
            parts = torch.split(self.batches[step], how.batch_size or self.batch_size)
            each = [torch.func.grad(loss)(weights, images[some], labels[some]) for some in parts]
            return {name: sum(part[name] for part in each) / len(each) for name in weights}

        count = len(self.batches)
        if count == 1:
            return gradient(start, 0)
        shares, scales = how.step_weights(self.batch_size), how.step_scales(self.batch_size)
        length = sum(shares)

        def step_gradient(weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
            found = self._changed(gradient(weights, step), scales[step])
            return found if how.optimiser == "adamw" else self._decayed(found, weights)

        if self.way != "unroll" and not how.is_adam:
            reach = 0.0 if self.way == "once" else self.lr * length / count
            total = {name: torch.zeros_like(weight) for name, weight in start.items()}
            for step in range(count):
                point = {name: weight - reach * step * wanted[name] for name, weight in start.items()}
                share = shares[step] / scales[step]
                total = {name: total[name] + share * g for name, g in step_gradient(point, step).items()}
            return {name: value / length for name, value in total.items()}
        weights, moves = start, moving(how)
        for step in range(count):
            move = moves(step_gradient(weights, step))
            shrink = 1 - self.lr * how.weight_decay if how.optimiser == "adamw" else 1.0
            weights = {name: shrink * weight - self.lr * move[name] for name, weight in weights.items()}
        return {name: (weight - weights[name]) / (self.lr * length) for name, weight in start.items()}


def moving(how: LocalSettings) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function from each step's gradient to the step along which the weights move, differentiable."""
    first, second = how.betas
    averages: list[dict[str, Tensor]] = []
    steps = 0

    def sgd(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        before = averages.pop() if averages else {name: torch.zeros_like(g) for name, g in gradient.items()}
        velocity = {name: how.momentum * before[name] + g for name, g in gradient.items()}
        averages.append(velocity)
        return {n: g + how.momentum * velocity[n] for n, g in gradient.items()} if how.nesterov else velocity

    def adam(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal steps
        steps += 1
        zeros = {name: torch.zeros_like(g) for name, g in gradient.items()}
        mean, square = averages or (zeros, zeros)
        mean = {name: first * mean[name] + (1 - first) * g for name, g in gradient.items()}
        square = {name: second * square[name] + (1 - second) * g.square() for name, g in gradient.items()}
        averages[:] = [mean, square]
        return {
            name: m / (1 - first**steps) / ((square[name] / (1 - second**steps) + _TINY).sqrt() + how.eps)
            for name, m in mean.items()
        }

    return adam if how.is_adam else sgd


_TINY = 1e-24
"""Added below square roots, whose slope at zero is infinite."""


@contextmanager
def replaced_outputs(network: nn.Module, outputs: Tensors, times: int = 0) -> Iterator[None]:
    """Let the named modules return these outputs; each row is repeated ``times`` times if it is not 0."""
    values = {name: value.repeat_interleave(times, 0) if times else value for name, value in outputs.items()}
    with watch(network, values, after=lambda call: values[call.name]):
        yield


def replay_of(seen: Observation, way: str, rng: torch.Generator) -> Replay:
    """Return the simulation of these clients' training, from what is known about it.

    BatchNorm is simulated as the clients used it (`Observation.batch_norm`). In a single step each target is a batch of
    its own, so one pass over all targets suffices there too.
    """
    size = seen.num_examples
    stated = seen.knows(Knowledge.LOCAL_STEPS) or not seen.single_step
    how = seen.local_steps if stated else LocalSettings("fedsgd", batch_norm=seen.batch_norm, dropout=seen.dropout)
    pieces = how.accumulate > 1 and how.batch_norm != "freeze"  # each batch of a step has its own statistics
    batch = size if seen.single_step and not pieces else 0
    network = _written_out(seen.network, batch_statistics=how.batch_norm != "freeze", batch=batch)
    simple = seen.single_step and how.is_plain and how.accumulate == 1
    step = min(how.batch_size * how.accumulate or size, size) if how.algorithm == "fedavg" else size
    batches: list[Tensor] = []
    for _ in range(1 if seen.single_step else how.epochs):
        batches += torch.split(torch.randperm(size, generator=rng), step)
    return Replay(network, size, way, None if simple else how, seen.lr, tuple(batches))


def _mixes(network: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in network.modules())


def _written_out(network: nn.Module, *, batch_statistics: bool, batch: int) -> nn.Module:
    """Return a copy whose LayerNorm, and BatchNorm in training mode, are plain arithmetic, or the network without any.

    Under vmap, the second derivative of torch's own kernels is wrong by up to a few percent. ``batch`` images in a row
    are one client's batch; 0 means all.
    """
    layers = (nn.LayerNorm, _BatchNorm) if batch_statistics else (nn.LayerNorm,)
    if not any(isinstance(layer, layers) for layer in network.modules()):
        return network
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules(remove_duplicate=False)):
        if isinstance(layer, nn.LayerNorm):
            vars(layer)["forward"] = partial(_layer_norm, layer)
        elif isinstance(layer, _BatchNorm) and batch_statistics:
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, BatchNormOfGroups(layer, batch))
    return network


def _layer_norm(layer: nn.LayerNorm, inputs: Tensor) -> Tensor:
    axes = tuple(range(-len(layer.normalized_shape), 0))
    centred = inputs - inputs.mean(axes, keepdim=True)
    normal = centred * (centred.square().mean(axes, keepdim=True) + layer.eps).rsqrt()
    return _affine(normal, layer.weight, layer.bias)


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias
