"""Soteria: the gradient of a fully connected layer, as if its input had lost the features that matter to inversion."""

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
from gradveil.networks.grads import jacobian_row_norms, layer_inputs
from gradveil.networks.layers import few_channels
from gradveil.networks.watch import LayerCall, watch
from gradveil.randomness import global_stream
from gradveil.types import Batch, Tensors
from gradveil.validate import in_range, one_of

_MOST_NUMBERS, _MOST_IMAGES, _MOST_TOGETHER = 2**18, 8, 256
"""Of the Jacobian's products that are taken together: numbers of input, images, and products times images."""


@dataclass(frozen=True)
class Soteria(Defence):
    r"""Rebuild a Linear's weight gradient without the input features whose loss moves an inverted image farthest.

    .. math::
        s_i = \frac{|r_i|}{\|\nabla_X r_i\|_p}, \qquad
        r'_i = r_i \, \mathbb 1[\, s_i \text{ is not among the } \epsilon \text{ largest} \,], \qquad
        \nabla W = \frac 1N \sum_n \delta_n r'^{\,T}_n

    r is the layer's input for an image X and :math:`\delta_n` the gradient of image n's loss at the layer's output. The
    forward pass, the layer's bias and all other tensors stay as they are. A feature of value zero has the score 0; one
    that no pixel moves, but that is not zero, is pruned first; among equal scores the first are pruned.

    r and δ are those of a pass in the network's own mode, so that with nothing pruned the gradient is the one that came
    in. The Jacobian is that of an image's own r: BatchNorm's batch statistics are held fixed, Dropout is off. Active
    Dropout draws new masks for this pass, since those of the training step are gone. In a chain the weight that an
    earlier member left is replaced, all else that it did stays.

    Threat model: a curious server that sees single updates and matches them as they are.
    Does not protect: against an attacker who leaves the zeroed columns or the whole tensor out of the match, for the
        other tensors determine the image as well (Balunović et al. 2022, https://arxiv.org/abs/2111.04706); the labels,
        which the untouched bias gives away. With several images in a batch a column is zero only where all agree.
    Guarantee: none against attackers of gradients. `gradveil.defences.parts.certificate` computes, to first order, the
        bound of Theorem 1 on the distance of an image that was inverted from r' alone.
    Reference: Sun et al. 2021, https://arxiv.org/abs/2012.06043, Algorithms 1 and 2 with q = 0.
    Differs from the paper: the inverse of a row of the Jacobian in Algorithm 1 is read as one over its norm, as in the
        authors' code, which is ``scores=batch``. The default of ``prune`` is that of their GS demonstration; Table 2
        goes up to 0.4 against DLG and 0.8 against GS, and Figure 6 calls the image unrecognisable from 0.5 to 0.6 on.

    Attributes:
        layers: names of the Linears to protect, written a/b; none is the last one.
        prune: share of the features that is zeroed, rounded up.
        count: ε, the number of features that is zeroed, in place of ``prune``; 0 takes ``prune``.
        scores: ``example`` chooses for each image by itself; ``batch`` as the authors' code does: the features with the
            smallest sum over the batch of ∥∇r∥ / (r + 0.1), below the percentile of ``prune``, are zeroed for all
            images. There dead features (zero, and moved by no pixel) come first, which protects nothing; where more
            than that share is dead, nothing is zeroed at all, and with ``prune=1`` the last one is left.
        norm: p of the Jacobian's norm: 1, 2 or inf.
        probes: 0 takes the Jacobian's norms exactly, one backward pass a feature or one forward a pixel; else they are
            estimated by so many random forward-mode products, which is much faster: 64 rank well. Only with ``norm=2``.
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
            raise ConfigError(f"norm must be 1, 2 or inf, got {self.norm:g}.")
        in_range("probes", self.probes, 0)
        if self.probes and self.norm != 2:
            raise ConfigError(f"probes must be 0 unless norm is 2, got {self.probes} with norm={self.norm:g}.")
        if len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"layers must differ from each other, got {'/'.join(self.layers)}.")

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Replace the weight gradient of each protected layer; an empty batch has nothing to hide."""
        if not len(batch):
            return gradient
        network = copy.deepcopy(client.model)  # the pass moves BatchNorm's statistics
        names = self.layers or _last_linear(network)
        _check_layers(network, names, gradient)
        with global_stream(int(torch.randint(2**62, (), generator=client.rng)), "soteria"):
            seen = _training_pass(network, names, batch)
        norms = self._row_norms(network, names, batch.images, [look.inputs.shape[1] for look in seen], client.rng)
        rebuilt = {}
        for name, look, own in zip(names, seen, norms, strict=True):
            kept = look.inputs.masked_fill(self._pruned(name, look.inputs, own), 0.0)  # (N, features)
            rebuilt[f"{name}.weight"] = (look.downstream.T @ kept).to(gradient[f"{name}.weight"])
        return {**gradient, **rebuilt}

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """The layers must be there, with as many features as are zeroed."""
        try:
            names = self.layers or _last_linear(network)
            _check_layers(network, names, dict(network.named_parameters()))
            for name in names:
                self._check_count(name, network.get_parameter(f"{name}.weight").shape[1])
        except DefenceError as error:
            raise ConfigError(str(error)) from error

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Leave the whole weight out of the match, or the columns that came as zeros.

        Without ``layers`` the weight is taken to be the last matrix of the update. Columns are zero where all images of
        a batch agree, so they serve for single images, and for networks that have no other weight.
        """
        matrices = [name for name, tensor in arrived.gradients.items() if tensor.dim() == 3]  # (T, out, in)
        named = [f"{name}.weight" for name in self.layers] or matrices[-1:]
        weights = {name: 0.0 for name in named if name in arrived.gradients}
        layer, columns = Countermove(weights=weights), Countermove(_surviving_columns, passes_noise=True)
        if any(tensor.dim() > 2 and name not in weights for name, tensor in arrived.gradients.items()):
            return {"layer": layer, "columns": columns}
        return {"columns": columns, "layer": layer}

    def certificate(self, network: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor | None:
        """Theorem 1 at the first protected layer: to first order, and for an attacker who inverts r' alone."""
        model = copy.deepcopy(network).eval()
        name = (self.layers or _last_linear(model))[0]
        _check_layers(model, [name], dict(model.named_parameters()))
        with torch.no_grad():
            inputs = layer_inputs(model, [name], batch.images)[0]
        norms = self._row_norms(model, [name], batch.images, [inputs.shape[1]], rng)[0]
        return certificate(model, name, batch.images, self._pruned(name, inputs, norms), rng=rng)

    def _row_norms(
        self, network: nn.Module, names: Sequence[str], images: Tensor, sizes: list[int], rng: torch.Generator
    ) -> list[Tensor]:
        """For each layer the norms (N, features) of its input's Jacobian; some images and products at a time."""

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
        """(N, features) which features to zero."""
        if not bool(inputs.isfinite().all() and norms.isfinite().all()):
            raise DefenceError(
                f"Defence 'soteria' can rank finite features only, got others at layer {name!r}. "
                "Lower the learning rate."
            )
        self._check_count(name, inputs.shape[1])
        if self.scores == "batch":
            return self._pruned_for_all(inputs, norms).expand_as(inputs)
        number = self.count or math.ceil(round(self.prune * inputs.shape[1], 6))
        return _first(feature_scores(inputs, norms).argsort(dim=1, descending=True, stable=True), number)

    def _check_count(self, name: str, features: int) -> None:
        if self.count > features:
            raise DefenceError(
                f"Defence 'soteria' can zero at most the {features} features of layer {name!r}, "
                f"got count={self.count}. Lower count, or set prune."
            )

    def _pruned_for_all(self, inputs: Tensor, norms: Tensor) -> Tensor:
        """(1, features) by the authors' score, which is large for what is kept."""
        shifted = inputs + 0.1
        tiny = torch.finfo(shifted.dtype).eps
        score = (norms / shifted.where(shifted != 0, tiny)).sum(0, keepdim=True)
        if self.count:
            return _first(score.abs().argsort(dim=1, stable=True), self.count)
        return score.abs() < score.quantile(self.prune)


def feature_scores(inputs: Tensor, norms: Tensor) -> Tensor:
    """Each feature's size by its slope, :math:`|r_i| / ∥∇r_i∥`: 0 where r is zero, else infinite where the slope is.

    Example:
        >>> feature_scores(torch.tensor([[-3.0, 0.0, 2.0]]), torch.tensor([[2.0, 0.0, 0.0]]))
        tensor([[1.5000, 0.0000,    inf]])
    """
    return torch.where(inputs == 0, torch.zeros_like(inputs), inputs.abs() / norms)


def _first(order: Tensor, number: int) -> Tensor:
    """(N, features) true at the first ``number`` indices of each row."""
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, :number], True)


def _surviving_columns(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """The guess without the columns of matrices that are zero in what was seen of the same target."""
    return {
        name: tensor * (seen[name] != 0).any(1, keepdim=True) if tensor.dim() == 3 else tensor
        for name, tensor in guess.items()
    }


def _last_linear(network: nn.Module) -> tuple[str, ...]:
    names = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise DefenceError(
            "Defence 'soteria' prunes the input of a fully connected layer, but this network has no nn.Linear. "
            "Use a model that ends in one (all of `gradveil list models` do), or another defence."
        )
    return (names[-1],)


def _check_layers(network: nn.Module, names: Sequence[str], gradient: Tensors) -> None:
    known = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    for name in names:
        if name not in known:
            raise DefenceError(
                f"Defence 'soteria' protects layers of type nn.Linear, got {name!r}. "
                f"Set layers to some of: {', '.join(known) or 'none, for this network has no such layer'}."
            )
        if f"{name}.weight" not in gradient:
            raise DefenceError(
                f"Defence 'soteria' rebuilds the gradient of {name}.weight, but it is not trained under this name "
                "(frozen, shared with another layer, or parametrised). Set layers to another nn.Linear."
            )


class _Look(NamedTuple):
    """What a layer was given, (N, features), and the gradient of the mean loss by its output, (N, out)."""

    inputs: Tensor
    downstream: Tensor


def _training_pass(network: nn.Module, names: Sequence[str], batch: Batch) -> list[_Look]:
    """Look at the layers in a pass like the one that gave the gradient; leaves the network with that pass frozen."""
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
    """Fix BatchNorm at the given mean and variance; nothing is dropped or drawn."""
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
            "Flatten or pool before it, or set layers to another nn.Linear."
        )
    weight = network.get_parameter(f"{name}.weight")
    downstream, whole = torch.autograd.grad(loss, [output, weight], retain_graph=True, materialize_grads=True)
    if float((downstream.T @ inputs - whole).norm()) > 1e-2 * float(whole.norm()) + 1e-6:
        raise DefenceError(
            f"Defence 'soteria' needs a layer whose weight is used nowhere else, got {name!r}. "
            "Set layers to another nn.Linear."
        )
    return _Look(inputs, downstream)
