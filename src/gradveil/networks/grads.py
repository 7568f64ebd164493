"""Per-example parameter gradients, fast and differentiable again; attacks and defences build on them.

All examples share the weights, so one batched forward and one batched backward suffice: the layers' inputs and the
gradients of their outputs are captured, and each layer's weight gradient is a small product of the two
(Goodfellow 2015, https://arxiv.org/abs/1510.01799; convolutions by patches, as Opacus does). With
``create_graph=True`` the result can be differentiated once more, which gradient matching needs.

Layers with a rule of their own: Linear, Conv2d, BatchNorm (evaluation mode, or `BatchNormOfGroups`), GroupNorm,
LayerNorm. Any other layer uses `torch.func.vmap` over its own backward. So does the whole network if some parameters
are not reached through their layers, or if the gradients do not add up to autograd's (a weight is used outside its
layer). This is checked once per network.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import ConfigError
from gradveil.networks.grouped import BatchNormOfGroups
from gradveil.networks.layers import layer_gradient, own_parameters, small_convolutions
from gradveil.networks.watch import LayerCall, watch
from gradveil.secret_stream import SecretStream

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs (N, classes) and labels; returns one loss per example, (N,)."""


def cross_entropy(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return each example's cross-entropy; labels are classes (N,) or probabilities (N, classes).

    ``smoothing`` is the share of each label that is spread evenly over all classes.
    """
    return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)


def example_gradients(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    group_size: int = 1,
    loss: Loss = cross_entropy,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Return the gradient of each group's mean loss, by parameter name.

    Args:
        network: in evaluation mode if it has BatchNorm, which would mix the examples otherwise; or with each BatchNorm
            replaced by a `BatchNormOfGroups` of the same group size.
        images: (N, C, H, W).
        labels: (N,) or (N, classes).
        group_size: examples per group, a divisor of N; 1 gives per-example gradients.
        loss: returns one loss per example.
        create_graph: whether the result can be differentiated with respect to images and labels.

    Returns:
        A tensor (N / group_size, shape of the parameter) for each parameter that requires a gradient.
    """
    gradients, _ = _gradients(network, images, labels, group_size, loss, create_graph)
    return gradients if create_graph else {name: tensor.detach() for name, tensor in gradients.items()}


def gradients_and_outputs(network: nn.Module, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return per-example gradients of the cross-entropy and the network's outputs (N, classes), by one forward pass.

    Both can be differentiated with respect to images and labels.
    """
    gradients, outputs = _gradients(network, images, labels, 1, cross_entropy, create_graph=True)
    return gradients, network(images) if outputs is None else outputs


def _gradients(
    network: nn.Module, images: Tensor, labels: Tensor, group_size: int, loss: Loss, create_graph: bool
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the gradients, and the outputs if the forward pass gave them, else None."""
    if len(images) % group_size:
        raise ConfigError(f"group_size must divide the {len(images)} examples, got {group_size}. Choose a divisor.")
    refuse_mixing_layers(network, group_size)
    wanted = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    gradients, met = None, list[Tensor]()

    def met_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        met.append(outputs)
        return loss(outputs, labels)

    if _by_layers_holds.get(network, True):
        gradients = _by_layers(network, images, labels, group_size, met_loss, create_graph, wanted)
    if gradients is not None and network not in _by_layers_holds and get_proxy_mode() is None:
        _by_layers_holds[network] = _adds_up(network, images, labels, group_size, loss, gradients, wanted)
        gradients = gradients if _by_layers_holds[network] else None
    if gradients is None:
        return _by_vmap(network, images, labels, group_size, loss, wanted), None
    return gradients, met[-1]


_by_layers_holds: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()
"""Whether a network's gradients by layers agreed with autograd's, for networks that were compared."""


def _adds_up(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    group_size: int,
    loss: Loss,
    gradients: dict[str, Tensor],
    wanted: dict[str, nn.Parameter],
) -> bool:
    """Return whether a weighted sum over groups equals autograd's; a weight used outside its layer breaks this."""
    groups = len(images) // group_size
    weights = torch.linspace(0.5, 1.5, groups, dtype=images.dtype, device=images.device)
    with torch.enable_grad():
        losses = loss(network(images.detach()), labels.detach()).view(groups, group_size).mean(1)
        plain = torch.autograd.grad((losses * weights).sum(), list(wanted.values()), allow_unused=True)
    for (name, parameter), theirs in zip(wanted.items(), plain, strict=True):
        ours = torch.einsum("g,g...->...", weights, gradients[name].detach())
        theirs = torch.zeros_like(parameter) if theirs is None else theirs
        if float((ours - theirs).norm()) > 1e-2 * float(theirs.norm()) + 1e-6 * float(parameter.numel()) ** 0.5:
            return False
    return True


def _by_layers(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    group_size: int,
    loss: Loss,
    create_graph: bool,
    wanted: dict[str, nn.Parameter],
) -> dict[str, Tensor] | None:
    """Compute gradients from captured inputs and output gradients, or return None if a layer misses a parameter."""
    layers = {name: layer for name, layer in network.named_modules() if own_parameters(layer)}
    if any(own_parameters(layer) and list(layer.children()) for layer in layers.values()):
        return None
    calls, downstream = _run(
        network, layers, lambda outputs: loss(outputs, labels).sum() / group_size, images, create_graph
    )
    if calls is None or any(len(call.inputs) != 1 or len(call.inputs[0]) != len(images) for call in calls):
        return None
    found: dict[str, Tensor] = {}
    for call, gradient in zip(calls, downstream, strict=True):
        prefix = f"{call.name}." if call.name else ""
        own = {} if gradient is None else layer_gradient(layers[call.name], call.inputs[0], gradient)
        for key, value in own.items():
            grouped = _grouped(value, group_size).sum(1) if group_size > 1 else value
            full = prefix + key
            found[full] = found[full] + grouped if full in found else grouped  # a layer may be used twice
    aliases = {full: name for name, parameter in wanted.items() for full in found if _same(network, full, parameter)}
    if set(aliases.values()) != set(wanted):
        return None
    gradients: dict[str, Tensor] = {}
    for full, name in aliases.items():  # tied parameters: the sum over all their names
        gradients[name] = gradients[name] + found[full] if name in gradients else found[full]
    return {name: gradients[name] for name in wanted}


def _by_vmap(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    group_size: int,
    loss: Loss,
    wanted: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Compute each group's gradient of the whole network under vmap: slow, but general."""

    def group_loss(parameters: dict[str, Tensor], group: Tensor, group_labels: Tensor) -> Tensor:
        return loss(torch.func.functional_call(network, parameters, (group,)), group_labels).mean()

    each = torch.func.vmap(torch.func.grad(group_loss), in_dims=(None, 0, 0), randomness="error")
    result: dict[str, Tensor] = each(dict(wanted), _grouped(images, group_size), _grouped(labels, group_size))
    return result


def _grouped(tensor: Tensor, group_size: int) -> Tensor:
    return tensor.reshape(-1, group_size, *tensor.shape[1:])


@dataclass(frozen=True)
class _Call:
    """One call of a layer in the forward pass; ``version`` shows whether the output was changed in place later."""

    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    version: int


def _run(
    network: nn.Module,
    layers: dict[str, nn.Module],
    total: Callable[[Tensor], Tensor],
    images: Tensor,
    create_graph: bool,
    *,
    copy: bool = False,
) -> tuple[list[_Call] | None, tuple[Tensor | None, ...]]:
    """Run forward and backward; return all calls of the layers, and the gradient of ``total`` by their outputs."""
    calls: list[_Call] = []
    odd: list[str] = []

    def capture(call: LayerCall) -> Tensor | None:
        if not isinstance(call.output, Tensor):
            odd.append(call.name)  # a recurrent layer returns a tuple
            return None
        calls.append(_Call(call.name, call.inputs, call.output, call.output._version))
        return call.output.clone() if copy else None

    fast = small_convolutions(network) if images.requires_grad else nullcontext()
    with watch(network, layers, after=capture), torch.enable_grad(), fast:
        value = total(network(images))
    if odd or not calls:  # a network may use its weights without calling their layers
        return None, ()
    if not copy and any(call.output._version != call.version for call in calls):
        return _run(network, layers, total, images, create_graph, copy=True)
    outputs = [call.output for call in calls]
    return calls, torch.autograd.grad(value, outputs, create_graph=create_graph, allow_unused=True)


def _same(network: nn.Module, full: str, parameter: nn.Parameter) -> bool:
    owner, _, key = full.rpartition(".")
    return getattr(network.get_submodule(owner), key) is parameter


def refuse_mixing_layers(network: nn.Module, group_size: int = 1) -> None:
    """Raise ConfigError if BatchNorm makes an example's output depend on those of other groups."""
    for name, layer in network.named_modules():
        if isinstance(layer, BatchNormOfGroups) and layer.size == group_size:
            continue
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise ConfigError(
                f"Per-example gradients need BatchNorm in evaluation mode with running statistics, got {name!r} in "
                "training mode, where examples are mixed. Call network.eval(), or use GroupNorm."
            )


def batched_vjp(outputs: Tensor, inputs: Tensor, cotangents: Tensor, *, chunk: int = 64) -> Tensor:
    """Compute vector-Jacobian products for many cotangents at once.

    Args:
        outputs: any shape, computed from ``inputs``.
        inputs: the tensor to differentiate by.
        cotangents: (K, shape of outputs).
        chunk: how many are computed together.

    Returns:
        (K, shape of inputs).
    """
    pieces = [
        torch.autograd.grad(outputs, inputs, part, retain_graph=True, is_grads_batched=True)[0]
        for part in torch.split(cotangents, chunk)
    ]
    return torch.cat(pieces) if pieces else inputs.new_zeros(0, *inputs.shape)


def batched_jvp(function: Callable[[Tensor], Tensor], inputs: Tensor, tangents: Tensor, *, chunk: int = 16) -> Tensor:
    """Compute Jacobian-vector products (K, outputs) in forward mode for many tangents (K, shape of inputs)."""
    inputs = inputs.contiguous()  # forward mode refuses expanded memory

    def one(tangent: Tensor) -> Tensor:
        product: Tensor = torch.func.jvp(function, (inputs,), (tangent,))[1]
        return product

    result: Tensor = torch.func.vmap(one, chunk_size=chunk)(tangents)
    return result


def layer_inputs(network: nn.Module, names: Sequence[str], images: Tensor) -> list[Tensor]:
    """Return the input of each named layer in a forward pass on the images, one tensor per name; differentiable.

    Each layer must be called exactly once in a forward pass, with one tensor.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(call: LayerCall) -> None:
        found[call.name].append(call.inputs[0].clone())  # it may be changed in place later

    with watch(network, found, before=keep):
        network(images)
    for name, calls in found.items():
        if len(calls) != 1:
            raise ConfigError(
                f"Layer {name!r} must be used once in a forward pass, got {len(calls)} uses. Choose another."
            )
    return [found[name][0] for name in names]


def jacobian_row_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    *,
    order: float = 2.0,
    probes: int = 0,
    rng: SecretStream | None = None,
    chunk: int = 64,
    forward: bool = False,
) -> Tensor:
    r"""Return the norm :math:`\|\partial f_i(x_n) / \partial x_n\|_p` for each example n and feature i, (N, features).

    The norms are exact by batched backward passes, one per feature, or with ``forward`` by forward-mode passes, one
    per entry of the input. With ``probes`` the Euclidean norm is estimated for all features at once, by forward-mode
    products with Gaussian v, since :math:`E[(Jv)_i^2] = \|J_i\|_2^2`. The estimate's relative standard deviation
    is about :math:`1 / \sqrt{2\,\text{probes}}`.

    Args:
        function: maps (N, ...) to (N, features), each example independently.
        inputs: (N, ...).
        order: p of the norm; infinity is allowed.
        probes: number of random probes; 0 computes exact norms.
        rng: random stream, needed for probes; the draws that decide what is hidden stay secret.
        chunk: products computed together.
        forward: whether to compute exact norms by forward-mode passes, if the network supports them.
    """
    if probes:
        return _estimated_row_norms(function, inputs.detach(), order, probes, rng, chunk)
    leaf = inputs.detach().requires_grad_()
    with torch.enable_grad():
        features = function(leaf)  # (N, features)
    if forward:
        with suppress(RuntimeError):  # a layer may support backward mode only
            return _forward_row_norms(function, inputs.detach(), order, chunk)
    norms = []
    for some in torch.split(torch.arange(features.shape[1], device=features.device), chunk):
        rows = F.one_hot(some, features.shape[1]).to(features)  # (chunk, features)
        products = batched_vjp(features, leaf, rows.unsqueeze(1).expand(-1, len(features), -1), chunk=chunk)
        norms.append(torch.linalg.vector_norm(products.flatten(2), order, dim=2))
    return torch.cat(norms).T.detach()


def _forward_row_norms(function: Callable[[Tensor], Tensor], inputs: Tensor, order: float, chunk: int) -> Tensor:
    size = inputs[0].numel()
    columns: list[Tensor] = []  # each (N, features): the norms over a chunk of the input
    with torch.no_grad():
        for some in torch.split(torch.arange(size, device=inputs.device), chunk):
            basis = F.one_hot(some, size).to(inputs).view(-1, 1, *inputs.shape[1:])
            products = batched_jvp(function, inputs, basis.expand(-1, *inputs.shape).contiguous(), chunk=chunk)
            columns.append(torch.linalg.vector_norm(products, order, dim=0))
    norms: Tensor = torch.linalg.vector_norm(torch.stack(columns), order, dim=0)
    return norms


def _estimated_row_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    order: float,
    probes: int,
    rng: SecretStream | None,
    chunk: int,
) -> Tensor:
    if rng is None:
        raise ConfigError("probes need random draws, got rng=None. Pass rng, a SecretStream.")
    if order != 2:
        raise ConfigError(f"probes estimate the Euclidean norm only: order must be 2, got {order:g}. Use probes=0.")
    total = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
    with torch.no_grad():
        for start in range(0, probes, chunk):
            shape = (min(chunk, probes - start), *inputs.shape)
            tangents = rng.normal(shape, inputs.dtype).to(inputs.device)
            try:
                total = total + batched_jvp(function, inputs, tangents, chunk=chunk).square().sum(0)
            except RuntimeError as error:
                raise ConfigError(
                    f"probes must be 0 for a network without forward-mode derivatives, got {probes}: {error}"
                ) from error
    return (total / probes).sqrt()
