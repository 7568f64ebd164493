r"""The gradient behind Adam's first step, as far as the weights' precision shows it.

From a fresh state, Adam moves every weight by :math:`-\eta u` with :math:`u = g / (|g| + \epsilon)`: the sign of the
gradient, and, because :math:`1 - |u| = \epsilon / (|g| + \epsilon)`, its size as well,

.. math:: g = \epsilon \frac{u}{1 - |u|}.

A weight w in floating point shows u to about :math:`\delta = \mathrm{ulp}(w) / \eta` only, so sizes beyond the cap
:math:`\epsilon / \delta` are lost and only their signs stay. Gradients are therefore compared after `saturated`, which
keeps entries that are small against their cap and flattens those beyond it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradveil.federated.protocol import LocalSettings
from gradveil.types import Tensors

ROUNDING = 4
"""Units in the last place that Adam's own arithmetic may lose."""


def caps(network: nn.Module, how: LocalSettings, lr: float) -> dict[str, Tensor]:
    """Return the largest size of each entry of the gradient that Adam's first step shows, by parameter name."""
    found = {}
    for name, parameter in network.named_parameters():
        unit = torch.finfo(parameter.dtype).eps
        resolution = unit * (parameter.detach().abs() + lr) / lr + ROUNDING * unit
        found[name] = how.eps / resolution
    return found


def saturated(gradient: Tensors, limits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each entry g as c tanh(g / c) with its cap c; gradients may have leading dimensions."""
    return {name: limits[name] * torch.tanh(value / limits[name]) for name, value in gradient.items()}


def behind_first_step(changes: Tensors, network: nn.Module, how: LocalSettings, lr: float) -> dict[str, Tensor]:
    """Return the saturated gradients (T, ...) that explain the changes (T, ...) of the weights by Adam's first step.

    Weight decay is part of Adam's gradient; that of AdamW is taken out.

    Example:
        >>> network = nn.Linear(1, 1, bias=False).double()
        >>> how, g = LocalSettings("fedsgd", batch_size=0, optimiser="adam"), torch.tensor([[[3e-4]]]).double()
        >>> change = -0.01 * g / (g.abs() + how.eps)
        >>> found = behind_first_step({"weight": change}, network, how, 0.01)["weight"]
        >>> bool((found / g - 1).abs() < 1e-3)
        True
    """
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    decay = how.weight_decay if how.optimiser == "adamw" else 0.0
    limits = caps(network, how, lr)
    found = {}
    for name, change in changes.items():
        step = -(change + lr * decay * weights[name]) / lr
        left = (1 - step.abs()).clamp_min(torch.finfo(step.dtype).eps)
        found[name] = how.eps * step / left
    return saturated(found, limits)
