"""Plain chains of layers as linear equations: what R-GAP solves, and what tells a decoy from a private image."""

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
"""What went into an activation, from what came out."""


class Layer(NamedTuple):
    """A Linear or convolution of a plain chain, and the activation behind it.

    Attributes:
        name: in the network.
        module: the layer, in double precision.
        act: what follows, None for the last layer.
        shape: (C, H, W) or (features,) of its input.
        out: of its output.
    """

    name: str
    module: nn.Linear | nn.Conv2d
    act: nn.Module | None
    shape: tuple[int, ...]
    out: tuple[int, ...]


def chain_of(network: nn.Module, shape: tuple[int, int, int]) -> list[Layer]:
    """The layers of a network that is a plain chain of convolutions, Linears and invertible activations.

    Raises:
        ConfigError: if it is anything else.
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
        f"Linear, got {got}. Choose another model, such as lenet-dlg, or another attack, such as gs."
    )


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _doubled(layer: nn.Linear | nn.Conv2d) -> nn.Linear | nn.Conv2d:
    """A copy in double precision; frozen, on the CPU."""
    return copy.deepcopy(layer).double().cpu().requires_grad_(False)


Call = tuple[str, nn.Module, tuple[int, ...], tuple[int, ...]]


def _calls(network: nn.Module, shape: tuple[int, int, int]) -> list[Call]:
    """Every call of a layer without children, in order, with the shapes of one image before and after it.

    Raises:
        ConfigError: unless these calls one after the other are all that the network does.
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
    """What went into an activation, and its slope there."""
    drive = INVERSES[type(act)](out, act) if type(act) in INVERSES else out
    leaf = drive.detach().requires_grad_()
    return drive, torch.autograd.grad(act(leaf).sum(), leaf)[0]


def least_squares(matrix: Tensor, wanted: Tensor) -> Tensor:
    """The shortest solution of ``matrix @ x = wanted`` but for a slight damping, most of which is taken back.

    By the normal equations, refined: ten times as fast as by singular values, and precise enough for float32 updates.
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
    """The largest norm of a row, by which equations are brought to one scale."""
    largest: Tensor = matrix.norm(dim=1).max()
    return largest.clamp_min(torch.finfo(torch.float64).tiny)


def _patches(layer: Layer) -> tuple[Tensor, int]:
    """(weights of a channel, positions): which entry of the input each sees, and how many entries; the last is none."""
    count = torch.Size(layer.shape).numel()
    if isinstance(layer.module, nn.Linear):
        return torch.arange(count)[:, None], count
    where = torch.arange(1, count + 1, dtype=torch.float64).view(1, *layer.shape)
    conv = layer.module
    padding = (conv.padding[0], conv.padding[1]) if not isinstance(conv.padding, str) else (0, 0)
    found = F.unfold(where, conv.kernel_size, conv.dilation, padding, conv.stride)[0].long() - 1
    return torch.where(found < 0, count, found), count


def weight_matrix(layer: Layer) -> Tensor:
    """(outputs, inputs): the layer without its bias."""
    patches, count = _patches(layer)
    kernel = layer.module.weight.flatten(1)  # (channels, R)
    rows, positions = patches.shape
    matrix = torch.zeros(len(kernel), positions, count + 1, dtype=torch.float64)
    index = patches.T.expand(len(kernel), positions, rows)
    matrix.scatter_add_(2, index, kernel[:, None].expand(len(kernel), positions, rows))
    return matrix[..., :count].flatten(0, 1)


def gradient_matrix(layer: Layer, errors: Tensor) -> Tensor:
    """(weights, inputs): the gradient of the weight as a linear function of the input, given the output's (., L)."""
    patches, count = _patches(layer)
    rows, positions = patches.shape
    matrix = torch.zeros(len(errors), rows, count + 1, dtype=torch.float64)
    index = patches.expand(len(errors), rows, positions)
    matrix.scatter_add_(2, index, errors[:, None].expand(len(errors), rows, positions))
    return matrix[..., :count].flatten(0, 1)
