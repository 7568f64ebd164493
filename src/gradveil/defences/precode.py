"""PRECODE: a variational bottleneck before the last layer, so that gradients come from randomly drawn features."""

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.defences.base import Client, Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import ConfigError
from gradveil.networks.calls import calls_on_blank, traced_calls
from gradveil.networks.grads import layer_inputs
from gradveil.randomness import global_stream
from gradveil.secret_stream import SecretStream, layer_stream
from gradveil.types import Batch, Tensors
from gradveil.validate import in_range

_NAME = "precode"


@dataclass(frozen=True)
class Precode(Defence):
    r"""Insert a variational bottleneck before the last fully connected layer, and add its KL divergence to the loss.

    With r the d features before the last layer, the last layer gets r' in place of r:

    .. math::
        (\mu, \rho) = W_e r + b_e, \qquad \sigma = \operatorname{softplus}(\rho), \qquad
        z = \mu + \sigma \odot \epsilon, \quad \epsilon \sim N(0, I), \qquad r' = W_d z + b_d

    .. math:: \ell = \ell_{CE} + \frac{\beta}{\ln 2} \cdot \frac 1N \sum_n
        \frac 12 \sum_k \left( \mu_k^2 + \sigma_k^2 - 1 - 2 \ln \sigma_k \right)

    The bottleneck is shared and aggregated like all other layers. In evaluation mode :math:`z = \mu`. The second term
    of the loss does not depend on ε, so its gradient is computed in a separate pass.

    Threat model: an honest-but-curious server that matches whole gradients.
    Does not protect: a single image against a server that computes ε from the bottleneck's own gradients, by two
        divisions; against a server that leaves the bottleneck and all later layers out of the match, or that optimises
        ε together with the image; or a network that begins with a fully connected layer, since dividing the gradients
        of that layer gives the image exactly, whatever layers follow (the attack ``linear``).
    Guarantee: none.
    Reference: Scheliga et al. 2022, https://arxiv.org/abs/2108.04725, Section 3. Published attacks: Balunovic et al.
        2022, https://arxiv.org/abs/2111.04706, and Scheliga et al. 2022, https://arxiv.org/abs/2208.04767; computing ε
        by divisions is our own.
    Differs from the paper: nothing is drawn in evaluation mode, so that test accuracies, and the gradients of an
        attacker who simulates the client, are reproducible. The second term costs a second forward and backward pass.

    Attributes:
        size: K, the number of dimensions of z.
        beta: weight of the Kullback-Leibler (KL) term.
    """

    size: int = 256
    beta: float = 1e-3

    def __post_init__(self) -> None:
        in_range("size", self.size, 1)
        in_range("beta", self.beta, 0)

    def on_model(self, model: nn.Module, rng: SecretStream) -> nn.Module:
        """Insert the bottleneck before the last Linear called, or the last one defined if tracing fails."""
        model = copy.deepcopy(model)
        linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name}
        if not linears:
            raise ConfigError(
                "Defence 'precode' goes before the last fully connected layer, but this network has no nn.Linear. "
                "Use a model that ends in one (--model; all of `gradveil list models` do), or another defence."
            )
        if any(isinstance(layer, Bottleneck) for layer in model.modules()):
            raise ConfigError(
                "Defence 'precode' adds one bottleneck, but this network already has one. Use it only once in a chain."
            )
        called = [str(node.target) for node in traced_calls(model) if node.target in linears]
        name = (called or list(linears))[-1]
        last = linears[name]
        with global_stream(rng.seed(), _NAME):
            bottleneck = Bottleneck(last.in_features, self.size).to(last.weight)
        parent, _, own = name.rpartition(".")
        block = nn.Sequential(OrderedDict([(_NAME, bottleneck), ("linear", last)])).train(model.training)
        setattr(model.get_submodule(parent), own, block)
        return model

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` unless the layer after the bottleneck alone gives the network's result."""
        calls = calls_on_blank(network, shape)
        (bottleneck,) = (name for name, layer in network.named_modules() if isinstance(layer, Bottleneck))
        name = bottleneck.removesuffix(_NAME) + "linear"
        last = [call.made for call in calls.layers if call.name == name]
        steps = calls.steps(last[0] if last else None)
        met = [call.name for call in calls.layers if call.made in steps and _is_weighted(call.layer)]
        if met != [name]:
            others = ", ".join(repr(other) for other in met[-3:])
            raise ConfigError(
                f"Defence 'precode' goes before {name!r}, which alone must give the network's result, got it from "
                f"{others or 'no layer'}. Let the network end in one nn.Linear, called once, or use another defence."
            )

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Add the gradient of the KL term."""
        if not self.beta or not len(batch):  # Poisson sampling may draw an empty batch
            return gradient
        network = copy.deepcopy(client.model)  # so that BatchNorm does not count the batch twice
        ((name, bottleneck),) = ((n, layer) for n, layer in network.named_modules() if isinstance(layer, Bottleneck))
        parameters = {name: p for name, p in network.named_parameters() if name in gradient}
        with torch.enable_grad(), global_stream(0, _NAME):
            (features,) = layer_inputs(network, [f"{name}.encoder"], batch.images)
            term = self.beta * divergence(bottleneck.encoder(features)).mean()
            found = torch.autograd.grad(term, list(parameters.values()), allow_unused=True)
        added = {name: slope for name, slope in zip(parameters, found, strict=True) if slope is not None}
        return {name: tensor + added[name] if name in added else tensor for name, tensor in gradient.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``solved`` and ``joint`` for a single image and step, and ``omit`` for any number.

        ``solved`` computes ε from the gradients, ``joint`` optimises ε together with the image, and ``omit`` leaves the
        bottleneck and all later layers out of the match. All of them include the KL term. ``solved`` gives each tensor
        the same weight, so that the gradients of convolutions count beside the larger ones of the bottleneck.
        """
        names = list(arrived.gradients)
        first = next((number for number, name in enumerate(names) if _NAME in name.split(".")), len(names))
        block = names[first].split(f"{_NAME}.")[0] + _NAME if first < len(names) else ""
        penalties = {f"{block}.encoder": partial(_weighted_divergence, self.beta)} if block and self.beta else {}
        omit = Countermove(weights=dict.fromkeys(names[first:], 0.0), penalties=penalties)
        if (
            arrived.batch_size * arrived.clients > 1 or len(arrived.steps) > 1 or not block
        ):  # each image and step has its own draw
            return {"omit": omit}
        joint = Countermove(unknowns={f"{block}.noise": self._draws}, penalties=penalties)
        if arrived.network is None:
            return {"joint": joint, "omit": omit}
        drawn = _drawn(arrived.network.get_submodule(block), block, arrived.gradients)
        solved = Countermove(outputs={f"{block}.noise": drawn}, weights=arrived.even_weights, penalties=penalties)
        return {"solved": solved, "joint": joint, "omit": omit}

    def _draws(self, rows: int, rng: torch.Generator) -> Tensor:
        return torch.randn(rows, self.size, generator=rng)


class Bottleneck(nn.Module):
    """An encoder to mean and standard deviation, a random draw, and a decoder back to the same number of features."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(features, 2 * size), nn.Linear(size, features)
        self.noise = Noise()

    def forward(self, features: Tensor) -> Tensor:
        """Map features (N, d) to features (N, d)."""
        mean, spread = self.encoder(features).chunk(2, -1)
        result: Tensor = self.decoder(mean + F.softplus(spread) * self.noise(mean))
        return result


class Noise(nn.Module):
    """Standard normal noise in training mode, from `layer_stream`; zeros otherwise."""

    def forward(self, like: Tensor) -> Tensor:
        """Return noise of the shape of ``like``."""
        return layer_stream().normal(like.shape, like.dtype).to(like) if self.training else torch.zeros_like(like)


def divergence(encoded: Tensor) -> Tensor:
    """Return the KL divergence (N,) from the standard normal, in bits, of encoder outputs (N, 2 size).

    Example:
        >>> raw = math.log(math.e - 1)  # softplus(raw) = 1
        >>> divergence(torch.tensor([[0.0, raw], [2.0, raw]])).round(decimals=3)
        tensor([0.0000, 2.8850])
    """
    mean, raw = encoded.chunk(2, -1)
    spread = F.softplus(raw)
    return (mean.square() + spread.square() - 1 - 2 * spread.log()).sum(-1) / (2 * math.log(2))


def _is_weighted(layer: nn.Module) -> bool:
    """Return whether a layer has parameters and no child layers."""
    return not any(layer.children()) and next(layer.parameters(), None) is not None


def _drawn(bottleneck: nn.Module, name: str, gradients: Tensors) -> Tensor:
    r"""Return the noise ε (T, size) that each client drew for its only image.

    The gradients of a Linear's weight and bias are :math:`\delta x^T` and :math:`\delta`, so dividing them gives the
    inputs of encoder and decoder, r and z. Then :math:`\epsilon = (z - \mu(r)) / \sigma(r)`. The KL term changes the
    encoder's :math:`\delta`, but not its input.
    """
    features, mixed = (_input(gradients, f"{name}.{layer}") for layer in ("encoder", "decoder"))
    encoded: Tensor = bottleneck.get_submodule("encoder")(features)
    mean, raw = encoded.detach().chunk(2, -1)
    return ((mixed - mean) / F.softplus(raw)).nan_to_num()


def _input(gradients: Tensors, name: str) -> Tensor:
    """Return the input (T, features) of a Linear for a single image, by least squares over its outputs."""
    weight, bias = gradients[f"{name}.weight"], gradients[f"{name}.bias"]
    return torch.einsum("toi,to->ti", weight, bias) / bias.square().sum(1, keepdim=True)


def _weighted_divergence(beta: float, encoded: Tensor) -> Tensor:
    return beta * divergence(encoded)
