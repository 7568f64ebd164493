"""Per-example parameter gradients, fast and differentiable again; attacks and defences build on them.

All examples share the weights, so one batched forward and one batched backward suffice: the layers' inputs and the
gradients of their outputs are captured, and each layer's weight gradient is a small product of the two
(Goodfellow 2015, https://arxiv.org/abs/1510.01799; convolutions by patches, as Opacus does, or by
`gradveil.networks.group_convolution`). With ``create_graph=True`` the result can be differentiated once more, which
gradient matching needs. A single group, and large batches of large networks, are left to plain autograd, group by
group: nothing beats it there.

Layers with a rule of their own: Linear, Conv2d, BatchNorm (evaluation mode, or `BatchNormOfGroups`), GroupNorm,
LayerNorm. Any other layer uses `torch.func.vmap` over its own backward. So does the whole network if some parameters
are not reached through their layers, or if the gradients do not add up to autograd's (a weight is used outside its
layer). This is checked once per network.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import ConfigError
from gradveil.networks.grouped import BatchNormOfGroups
from gradveil.networks.layers import grouped, layer_gradient, own_parameters, small_convolutions
from gradveil.networks.watch import LayerCall, watch
from gradveil.networks.work import work_per_example

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

    if len(images) == group_size:
        return _of_one_group(network, images, labels, met_loss, create_graph, wanted), met[-1]
    if _loop_pays(network, images, group_size):
        pieces = zip(torch.split(images, group_size), torch.split(labels, group_size), strict=True)
        each = [_of_one_group(network, *piece, met_loss, create_graph, wanted) for piece in pieces]
        return {name: torch.cat([one[name] for one in each]) for name in wanted}, torch.cat(met)
    if _by_layers_holds.get(network, True):
        gradients = _by_layers(network, images, labels, group_size, met_loss, create_graph, wanted)
    if gradients is not None and network not in _by_layers_holds and get_proxy_mode() is None:
        _by_layers_holds[network] = _adds_up(network, images, labels, group_size, loss, gradients, wanted)
        gradients = gradients if _by_layers_holds[network] else None
    if gradients is None:
        return _by_vmap(network, images, labels, group_size, loss, wanted), None
    return gradients, met[-1]


def _of_one_group(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    loss: Loss,
    create_graph: bool,
    wanted: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Compute the gradient of a single group by plain autograd, which nothing beats then."""
    with torch.enable_grad():
        value = loss(network(images), labels).mean()
        found = torch.autograd.grad(value, list(wanted.values()), create_graph=create_graph, allow_unused=True)
    pairs = zip(wanted.items(), found, strict=True)
    return {name: (torch.zeros_like(p) if gradient is None else gradient)[None] for (name, p), gradient in pairs}


def _loop_pays(network: nn.Module, images: Tensor, group_size: int) -> bool:
    """Return whether groups are played one by one; not if somebody watches the layers of a pass over all of them."""
    parts = list(network.modules())
    watched = network._forward_hooks or any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])
    if group_size == 1 or watched or get_proxy_mode() is not None:
        return False
    return work_per_example(network, images) * group_size >= _LOOPED


_LOOPED = 100_000_000
"""Multiplications of a group from which groups are played one by one: a larger pass saves no calls then, and what it
keeps in memory no longer fits the cache. Measured by benchmarks/never_slower.py on a CPU."""


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
        network,
        layers,
        lambda outputs: loss(outputs, labels).sum() / group_size,
        images,
        create_graph,
        single=group_size == 1,
    )
    if calls is None or any(len(call.inputs) != 1 or len(call.inputs[0]) != len(images) for call in calls):
        return None
    found: dict[str, Tensor] = {}
    for call, gradient in zip(calls, downstream, strict=True):
        prefix = f"{call.name}." if call.name else ""
        own = {} if gradient is None else layer_gradient(layers[call.name], call.inputs[0], gradient, group_size)
        for key, value in own.items():
            full = prefix + key
            found[full] = found[full] + value if full in found else value  # a layer may be used twice
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
    result: dict[str, Tensor] = each(dict(wanted), grouped(images, group_size), grouped(labels, group_size))
    return result


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
    single: bool = True,
    copy: bool = False,
) -> tuple[list[_Call] | None, tuple[Tensor | None, ...]]:
    """Run forward and backward; return all calls of the layers, and the gradient of ``total`` by their outputs.

    ``single`` says that gradients of single examples are wanted, for which products of small convolutions pay.
    """
    calls: list[_Call] = []
    odd: list[str] = []

    def capture(call: LayerCall) -> Tensor | None:
        if not isinstance(call.output, Tensor):
            odd.append(call.name)  # a recurrent layer returns a tuple
            return None
        calls.append(_Call(call.name, call.inputs, call.output, call.output._version))
        return call.output.clone() if copy else None

    fast = small_convolutions(network) if images.requires_grad and single else nullcontext()
    with watch(network, layers, after=capture), torch.enable_grad(), fast:
        value = total(network(images))
    if odd or not calls:  # a network may use its weights without calling their layers
        return None, ()
    if not copy and any(call.output._version != call.version for call in calls):
        return _run(network, layers, total, images, create_graph, single=single, copy=True)
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
