"""Soteria: compute the gradient of a fully connected layer as if the features that inversion needs most were zero."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.defences.base import Client, Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.certificate import certificate
from gradveil.errors import ConfigError, DefenceError
from gradveil.networks.grads import layer_inputs
from gradveil.networks.jacobians import jacobian_row_norms
from gradveil.networks.layers import few_channels
from gradveil.networks.watch import LayerCall, watch
from gradveil.randomness import global_stream
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Tensors
from gradveil.validate import in_range, one_of

_MOST_NUMBERS, _MOST_IMAGES, _MOST_TOGETHER = 2**18, 8, 256
"""Limits on the Jacobian products computed together: input numbers, images, and products times images."""


@dataclass(frozen=True)
class Soteria(Defence):
    r"""Remove the input features of a linear layer that help inversion most from the gradient of its weight.

    .. math::
        s_i = \frac{|r_i|}{\|\nabla_X r_i\|_p}, \qquad
        r'_i = r_i \, \mathbb 1[\, s_i \text{ is not among the } \epsilon \text{ largest} \,], \qquad
        \nabla W = \frac 1N \sum_n \delta_n r'^{\,T}_n

    Here r is the layer's input (its features) for an image X, N is the batch size, and :math:`\delta_n` is the gradient
    of the loss of image n with respect to the layer's output. The forward pass, the gradient of the layer's bias and
    all other gradients do not change. A feature that is zero has the score 0. A feature that is not zero, but does not
    depend on any pixel, is pruned first. Among equal scores the first features are pruned.

    r and δ come from a forward and backward pass in the network's current mode, so pruning nothing gives the original
    gradient. For the Jacobian of each image, BatchNorm's batch statistics are held fixed and Dropout is off. If Dropout
    is active, this pass draws new masks, since those of the training step are not kept. In a chain, this replaces the
    weight gradient of earlier defences, and keeps their other tensors.

    Threat model: an honest-but-curious server that sees individual updates and matches all of their entries.
    Does not protect: against an attacker who leaves the zero columns or the whole tensor out of the match, since the
        other tensors determine the image as well (Balunović et al. 2022, https://arxiv.org/abs/2111.04706); or labels,
        which the gradient of the bias reveals. In a batch of several images, a column is zero only if its feature is
        pruned for all of them.
    Guarantee: none against attacks on gradients. `gradveil.defences.parts.certificate` computes, to first order, the
        bound of Theorem 1 on the distance between an image and its reconstruction from r' alone.
    Reference: Sun et al. 2021, https://arxiv.org/abs/2012.06043, Algorithms 1 and 2 with q = 0.
    Differs from the paper: we read the inverse of a row of the Jacobian in Algorithm 1 as one over its norm, as the
        authors' code does; ``scores=batch`` is that code. The default of ``prune`` is that of the authors' GS demo.
        Table 2 goes up to 0.4 against DLG and 0.8 against GS, and Figure 6 calls images unrecognisable from 0.5 to 0.6.

    Attributes:
        layers: names of the ``nn.Linear`` layers to protect, joined by ``/``; if empty, the last one.
        prune: share of the features to set to zero, rounded up.
        count: ε, the number of features to set to zero; 0 uses ``prune`` instead.
        scores: ``example`` chooses features for each image separately. ``batch`` is the authors' code: it chooses the
            same features for all images, those whose sum over the batch of ∥∇r∥ / (r + 0.1) is below the percentile
            given by ``prune``. It chooses dead features first (zero, with zero gradients, for all images), which
            protects nothing. If more than that share is dead, it sets nothing to zero; with ``prune=1`` it keeps one
            feature.
        norm: p, the order of the norm of the Jacobian: 1, 2 or inf.
        probes: 0 computes the norms of the Jacobian exactly, by one backward pass per feature or one forward pass per
            pixel. Otherwise the number of random forward-mode products that estimate them, which is much faster; 64
            rank features well. Only with ``norm=2``.
    """

    layers: tuple[str, ...] = ()
    prune: float = 0.6
    count: int = 0
    scores: str = "example"
    norm: float = 2.0
    probes: int = 0

    def __post_init__(self) -> None:
        in_range("prune", self.prune, 0, 1)
        in_range("count", self.count, 0)
        one_of("scores", self.scores, ["example", "batch"])
        if self.norm not in (1, 2, math.inf):
            raise ConfigError(f"norm must be 1, 2 or inf, got {self.norm:g}. Try norm=2.")
        in_range("probes", self.probes, 0)
        if self.probes and self.norm != 2:
            raise ConfigError(
                f"probes must be 0 unless norm is 2, got {self.probes} with norm={self.norm:g}. Set probes=0 or norm=2."
            )
        if len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"layers must differ from each other, got {'/'.join(self.layers)}. Name each layer once.")

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Replace the weight gradient of each protected layer; that of an empty batch does not change."""
        if not len(batch):
            return gradient
        network = copy.deepcopy(client.model)  # the forward pass changes BatchNorm's statistics
        names = self.layers or _last_linear(network)
        _check_layers(network, names, gradient)
        with global_stream(client.rng.seed(), "soteria"):
            seen = _training_pass(network, names, batch)
        norms = self._row_norms(network, names, batch.images, [look.inputs.shape[1] for look in seen], client.rng)
        rebuilt = {}
        for name, look, own in zip(names, seen, norms, strict=True):
            kept = look.inputs.masked_fill(self._pruned(name, look.inputs, own), 0.0)  # (N, features)
            rebuilt[f"{name}.weight"] = (look.downstream.T @ kept).to(gradient[f"{name}.weight"])
        return {**gradient, **rebuilt}

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` unless the network has the layers, and these have at least ``count`` features."""
        try:
            names = self.layers or _last_linear(network)
            _check_layers(network, names, dict(network.named_parameters()))
            for name in names:
                self._check_count(name, network.get_parameter(f"{name}.weight").shape[1])
        except DefenceError as error:
            raise ConfigError(str(error)) from error

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``layer``, which leaves the whole weight out of the match, and ``columns``, its zero columns only.

        If ``layers`` is empty, the weight is taken to be the last matrix of the update. A column is zero only if all
        images of a batch agree, so ``columns`` suits single images. It comes first if the network has no other weight.
        """
        matrices = [name for name, tensor in arrived.gradients.items() if tensor.dim() == 3]  # (T, out, in)
        named = [f"{name}.weight" for name in self.layers] or matrices[-1:]
        weights = {name: 0.0 for name in named if name in arrived.gradients}
        layer, columns = Countermove(weights=weights), Countermove(_surviving_columns, passes_noise=True)
        if any(tensor.dim() > 2 and name not in weights for name, tensor in arrived.gradients.items()):
            return {"layer": layer, "columns": columns}
        return {"columns": columns, "layer": layer}

    def certificate(self, network: nn.Module, batch: Batch, rng: SecretStream) -> Tensor | None:
        """Return the bound of Theorem 1 at the first protected layer, to first order, for an attacker with r' alone."""
        model = copy.deepcopy(network).eval()
        name = (self.layers or _last_linear(model))[0]
        _check_layers(model, [name], dict(model.named_parameters()))
        with torch.no_grad():
            inputs = layer_inputs(model, [name], batch.images)[0]
        norms = self._row_norms(model, [name], batch.images, [inputs.shape[1]], rng)[0]
        return certificate(model, name, batch.images, self._pruned(name, inputs, norms), rng=rng)

    def _row_norms(
        self, network: nn.Module, names: Sequence[str], images: Tensor, sizes: list[int], rng: SecretStream
    ) -> list[Tensor]:
        """Return the row norms (N, features) of the Jacobian of each layer's input, computed in chunks."""

        def features(some: Tensor) -> Tensor:
            return torch.cat(layer_inputs(network, names, some), 1)

        together = max(1, min(_MOST_TOGETHER, _MOST_NUMBERS // max(1, images[0].numel())))
        block = min(len(images), _MOST_IMAGES, together)
        probes = self.probes if self.probes < sum(sizes) else 0
        forward = few_channels(network) and images[0].numel() <= 2 * sum(sizes)  # 2.5 times as fast on lenet-dlg
        norms = [
            jacobian_row_norms(
                features, some, order=self.norm, probes=probes, rng=rng, chunk=together // block, forward=forward
            )
            for some in torch.split(images, block)
        ]
        return list(torch.split(torch.cat(norms), sizes, 1))

    def _pruned(self, name: str, inputs: Tensor, norms: Tensor) -> Tensor:
        """Return the mask (N, features) of features to set to zero."""
        if not bool(inputs.isfinite().all() and norms.isfinite().all()):
            raise DefenceError(
                f"Defence 'soteria' can rank finite features only, got NaN or infinity at layer {name!r}. "
                "Lower the learning rate (--lr)."
            )
        self._check_count(name, inputs.shape[1])
        if self.scores == "batch":
            return self._pruned_for_all(inputs, norms).expand_as(inputs)
        number = self.count or math.ceil(round(self.prune * inputs.shape[1], 6))
        return _first(feature_scores(inputs, norms).argsort(dim=1, descending=True, stable=True), number)

    def _check_count(self, name: str, features: int) -> None:
        if self.count > features:
            raise DefenceError(
                f"Defence 'soteria' can set at most the {features} features of layer {name!r} to zero, "
                f"got count={self.count}. Lower count, or set prune."
            )

    def _pruned_for_all(self, inputs: Tensor, norms: Tensor) -> Tensor:
        """Return the mask (1, features) by the authors' score, which is large for features to keep."""
        shifted = inputs + 0.1
        tiny = torch.finfo(shifted.dtype).eps
        score = (norms / shifted.where(shifted != 0, tiny)).sum(0, keepdim=True)
        if self.count:
            return _first(score.abs().argsort(dim=1, stable=True), self.count)
        return score.abs() < score.quantile(self.prune)


def feature_scores(inputs: Tensor, norms: Tensor) -> Tensor:
    """Return the scores :math:`|r_i| / ∥∇r_i∥`: 0 if r is zero, and infinite if only the gradient is zero.

    Example:
        >>> feature_scores(torch.tensor([[-3.0, 0.0, 2.0]]), torch.tensor([[2.0, 0.0, 0.0]]))
        tensor([[1.5000, 0.0000,    inf]])
    """
    return torch.where(inputs == 0, torch.zeros_like(inputs), inputs.abs() / norms)


def _first(order: Tensor, number: int) -> Tensor:
    """Return a mask (N, features) that is true at the first ``number`` indices in each row of ``order``."""
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, :number], True)


def _surviving_columns(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Return the guess with zeros in all columns of matrices that are zero in the seen gradient of the same target."""
    return {
        name: tensor * (seen[name] != 0).any(1, keepdim=True) if tensor.dim() == 3 else tensor
        for name, tensor in guess.items()
    }


def _last_linear(network: nn.Module) -> tuple[str, ...]:
    names = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise DefenceError(
            "Defence 'soteria' prunes the input of a fully connected layer, but this network has no nn.Linear. "
            "Use a model that ends in one (--model; all of `gradveil list models` do), or another defence."
        )
    return (names[-1],)


def _check_layers(network: nn.Module, names: Sequence[str], gradient: Tensors) -> None:
    known = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    for name in names:
        if name not in known:
            raise DefenceError(
                f"Defence 'soteria' protects layers of type nn.Linear, got {name!r}. "
                f"Set layers to some of: {', '.join(known) or 'none, as this network has no such layer'}."
            )
        if f"{name}.weight" not in gradient:
            raise DefenceError(
                f"Defence 'soteria' rebuilds the gradient of {name}.weight, but it is not trained under this name "
                "(frozen, shared with another layer, or parametrised). Set layers to another nn.Linear."
            )


class _Look(NamedTuple):
    """A layer's inputs (N, features), and the gradient of the mean loss with respect to its output (N, out)."""

    inputs: Tensor
    downstream: Tensor


def _training_pass(network: nn.Module, names: Sequence[str], batch: Batch) -> list[_Look]:
    """Record the layers' inputs and output gradients in a training pass; leave the network frozen in that state."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    statistics: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}

    def keep(call: LayerCall) -> Tensor:
        calls[call.name].append((call.inputs[0].detach().clone(), call.output))
        output: Tensor = call.output.clone()  # the next layer may change it in place
        return output

    mixing = {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    }

    def measure(call: LayerCall) -> None:
        rest = [axis for axis in range(call.inputs[0].dim()) if axis != 1]
        variance, mean = torch.var_mean(call.inputs[0].detach(), rest, correction=0)
        statistics[mixing[call.name]] = mean, variance

    with watch(network, names, after=keep), watch(network, mixing, before=measure), torch.enable_grad():
        loss = F.cross_entropy(network(batch.images), batch.labels)
    looks = [_look(network, name, calls[name], loss) for name in names]
    _freeze(network, statistics)
    return looks


def _freeze(network: nn.Module, statistics: Mapping[_BatchNorm, tuple[Tensor, Tensor]]) -> None:
    """Fix BatchNorm at the given mean and variance, and put the network in evaluation mode."""
    for layer, (mean, variance) in statistics.items():
        layer.running_mean, layer.running_var = mean, variance
    network.eval()


def _look(network: nn.Module, name: str, calls: list[tuple[Tensor, Tensor]], loss: Tensor) -> _Look:
    if len(calls) != 1:
        raise DefenceError(
            f"Defence 'soteria' needs a layer that is used once in a forward pass, got {len(calls)} uses of {name!r}. "
            "Set layers to another nn.Linear."
        )
    inputs, output = calls[0]
    if inputs.dim() != 2:
        raise DefenceError(
            f"Defence 'soteria' needs a layer with an input (images, features), got {tuple(inputs.shape)} at {name!r}. "
            "Flatten or pool its input, or set layers to another nn.Linear."
        )
    weight = network.get_parameter(f"{name}.weight")
    downstream, whole = torch.autograd.grad(loss, [output, weight], retain_graph=True, materialize_grads=True)
    if float((downstream.T @ inputs - whole).norm()) > 1e-2 * float(whole.norm()) + 1e-6:
        raise DefenceError(
            f"Defence 'soteria' needs a layer whose weight is used nowhere else, got {name!r}. "
            "Set layers to another nn.Linear."
        )
    return _Look(inputs, downstream)
