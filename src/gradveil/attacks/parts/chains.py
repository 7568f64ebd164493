"""Plain chains of layers as linear equations, for R-GAP and for separating decoys from private images."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.networks.watch import record

INVERSES: dict[type[nn.Module], Callable[[Tensor, nn.Module], Tensor]] = {
    nn.LeakyReLU: lambda out, act: torch.where(out < 0, out / act(-torch.ones_like(out)).neg(), out),
    nn.Sigmoid: lambda out, act: torch.logit(out, eps=1e-12),
    nn.Tanh: lambda out, act: torch.atanh(out.clamp(-1 + 1e-12, 1 - 1e-12)),
}
"""The input of an activation as a function of its output."""


class Layer(NamedTuple):
    """A Linear or convolution of a plain chain, and the activation after it.

    Attributes:
        name: the layer's name in the network.
        module: the layer, in double precision.
        act: the activation after it, or None for the last layer.
        shape: (C, H, W) or (features,) of the input.
        out: shape of the output.
    """

    name: str
    module: nn.Linear | nn.Conv2d
    act: nn.Module | None
    shape: tuple[int, ...]
    out: tuple[int, ...]


def chain_of(network: nn.Module, shape: tuple[int, int, int]) -> list[Layer]:
    """Return the layers of a network that is a plain chain of convolutions, Linears and invertible activations.

    Raises:
        ConfigError: if the network is not such a chain.
    """
    calls = _calls(network, shape)
    layers = list[Layer]()
    for name, module, before, after in calls:
        if isinstance(module, (nn.Flatten, nn.Identity)):
            continue
        if type(module) in INVERSES:
            if not layers or layers[-1].act is not None:
                raise _refusal(f"an activation ({name}) that does not follow a layer")
            layers[-1] = layers[-1]._replace(act=module)
        elif type(module) is nn.Linear or (type(module) is nn.Conv2d and _is_plain(module)):
            if layers and layers[-1].act is None:
                layers[-1] = layers[-1]._replace(act=nn.Identity())
            layers.append(Layer(name, _doubled(module), None, before, after))
        else:
            raise _refusal(f"{type(module).__name__} ({name})")
    if not layers or layers[-1].act is not None or not isinstance(layers[-1].module, nn.Linear):
        raise _refusal("one that does not end in a Linear")
    return layers


def _refusal(got: str) -> ConfigError:
    return ConfigError(
        "Attack 'r-gap' needs a plain chain of convolutions, Linears and LeakyReLU, Sigmoid or Tanh that ends in a "
        f"Linear, got {got}. Use another model, such as --model lenet-dlg, or another attack, such as --attacks gs."
    )


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _doubled(layer: nn.Linear | nn.Conv2d) -> nn.Linear | nn.Conv2d:
    """Return a frozen copy in double precision on the CPU."""
    return copy.deepcopy(layer).double().cpu().requires_grad_(False)


Call = tuple[str, nn.Module, tuple[int, ...], tuple[int, ...]]


def _calls(network: nn.Module, shape: tuple[int, int, int]) -> list[Call]:
    """Return every call of a layer without children, in order, with the shapes of one image before and after it.

    Raises:
        ConfigError: if the network does anything else than these calls, one after the other.
    """
    like = next(network.parameters())
    probe = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(like)
    leaves = [name for name, layer in network.named_modules() if not list(layer.children())]
    with record(network, leaves) as met, torch.no_grad():
        result = network(probe)
    calls, reached = list[Call](), Space(network, shape, like).from_pixels(probe)
    for name, _, layer, inputs, output in met:
        if not inputs:
            raise _refusal(f"{type(layer).__name__} ({name}), which is called without inputs")
        if inputs[0].numel() != reached.numel() or not torch.equal(inputs[0].flatten(), reached.flatten()):
            raise _refusal("one whose layers do not follow each other, as in residual connections")
        calls.append((name, layer, tuple(inputs[0].shape[1:]), tuple(output.shape[1:])))
        reached = output
    if not torch.equal(reached, result):
        raise _refusal("one that does more than its layers")
    return calls


def inverted(act: nn.Module, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of an activation that gave ``out``, and the slope there."""
    drive = INVERSES[type(act)](out, act) if type(act) in INVERSES else out
    leaf = drive.detach().requires_grad_()
    return drive, torch.autograd.grad(act(leaf).sum(), leaf)[0]


def least_squares(matrix: Tensor, wanted: Tensor) -> Tensor:
    """Return the shortest least-squares solution of ``matrix @ x = wanted``, with a slight damping.

    Uses the normal equations with refinement, which removes most of the damping: ten times as fast as singular values,
    and precise enough for float32 updates.
    """
    square = matrix.T @ matrix
    square.diagonal().add_(_DAMPING * square.diagonal().max())
    factor = torch.linalg.cholesky(square)
    found = torch.zeros(matrix.shape[1], dtype=matrix.dtype)
    for _ in range(_REFINEMENTS):
        rest = matrix.T @ (wanted - matrix @ found)
        found = found + torch.cholesky_solve(rest[:, None], factor)[:, 0]
    return found


_DAMPING, _REFINEMENTS = 1e-12, 4


def largest_row(matrix: Tensor) -> Tensor:
    """Return the largest norm of a row, which equations are divided by to have one scale."""
    largest: Tensor = matrix.norm(dim=1).max()
    return largest.clamp_min(torch.finfo(torch.float64).tiny)


def _patches(layer: Layer) -> tuple[Tensor, int]:
    """Return the input entry that each weight of a channel sees at each position, and the number of entries.

    Entries are given by their index; the index equal to the number of entries means padding.
    """
    count = torch.Size(layer.shape).numel()
    if isinstance(layer.module, nn.Linear):
        return torch.arange(count)[:, None], count
    where = torch.arange(1, count + 1, dtype=torch.float64).view(1, *layer.shape)
    conv = layer.module
    padding = (conv.padding[0], conv.padding[1]) if not isinstance(conv.padding, str) else (0, 0)
    found = F.unfold(where, conv.kernel_size, conv.dilation, padding, conv.stride)[0].long() - 1
    return torch.where(found < 0, count, found), count


def weight_matrix(layer: Layer) -> Tensor:
    """Return the layer without its bias as a matrix (outputs, inputs)."""
    patches, count = _patches(layer)
    kernel = layer.module.weight.flatten(1)  # (channels, R)
    rows, positions = patches.shape
    matrix = torch.zeros(len(kernel), positions, count + 1, dtype=torch.float64)
    index = patches.T.expand(len(kernel), positions, rows)
    matrix.scatter_add_(2, index, kernel[:, None].expand(len(kernel), positions, rows))
    return matrix[..., :count].flatten(0, 1)


def gradient_matrix(layer: Layer, errors: Tensor) -> Tensor:
    """Return the weight's gradient as a matrix (weights, inputs) on the input, given the output's gradient (., L)."""
    patches, count = _patches(layer)
    rows, positions = patches.shape
    matrix = torch.zeros(len(errors), rows, count + 1, dtype=torch.float64)
    index = patches.expand(len(errors), rows, positions)
    matrix.scatter_add_(2, index, errors[:, None].expand(len(errors), rows, positions))
    return matrix[..., :count].flatten(0, 1)
