"""POGZ: layers that change most between rounds get most of the privacy budget, i.e. the least noise."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradveil.defences.base import Client, Defence, Server
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import Gaussian, noise_spread, seen_noise
from gradveil.defences.parts.accounting import Budget, Releases, epsilon
from gradveil.errors import DefenceError
from gradveil.types import Tensors, Update
from gradveil.validate import in_range

_EQUAL = 0.1
"""Part of the budget that is split equally, so that every layer gets some."""
BELOW = 1 - 2.0**-30
"""Updates are clipped to this share of the bound, so that rounding in float64 never exceeds it."""
_LAST, _IMPORTANCE = "last.", "importance."


@dataclass(frozen=True)
class Pogz(Defence):
    r"""Clip each layer of the update and add Gaussian noise to it, with less noise in more important layers.

    A layer is the weight and bias of one module. With L layers, :math:`w^t` the model broadcast in round t, and z the
    setting ``noise``, a client sends

    .. math:: \tilde u_l = u_l \min\Big(1, \frac{C_l}{\|u_l\|_2}\Big) + N(0, \sigma_l^2 I), \qquad
        C_l = \frac{C}{\sqrt L}, \qquad \sigma_l = \frac{2 C_l z}{\sqrt{b_l}}

    .. math:: b_l = \frac{0.1}{L} + 0.9 \frac{I_l^\alpha}{\sum_k I_k^\alpha}, \qquad
        I_l = \|w^t_l - w^{t-1}_l\|_2

    so that the budgets of the layers add up to that of the update in zero-concentrated differential privacy:
    :math:`\sum_l (2 C_l)^2 / (2 \sigma_l^2) = \sum_l b_l \rho = \rho = 1 / (2 z^2)`. In the first round the shares
    :math:`b_l` are equal, so all layers get the same noise. The server broadcasts the importance I. This costs no
    budget, as everyone can compute it from earlier broadcasts. Each layer is clipped separately: under one common
    bound, the whole change could lie in the layer with the least noise, which alone would then determine the budget.

    Threat model: an honest-but-curious server that sees all updates of a client.
    Does not protect: with the default ``noise``, which is low enough to train with a few clients, against an attacker
        who uses the likelihood of the noise as its matching loss together with a prior on images. The number of a
        client's images is assumed to be public. Noise does not cover the running statistics of BatchNorm
        (``Update.buffers``), so an update that changes them is refused.
    Guarantee: (ε, δ)-differential privacy for the whole data of a client (neighbours replace all of its images), and
        hence for each image: ``accounting.epsilon`` with z, composed over rounds. With the default, ε is tens of
        thousands per round, which is no meaningful protection. A meaningful ε takes a ``noise`` of about 1, and then
        thousands of clients for a useful mean. Clipped layers and noise are whole steps of a grid
        (``parts.grid``) and the noise comes from a cipher, so that it cannot be computed or taken off.
    Reference: Zhu et al. 2022, A fine-grained differentially private federated learning against leakage from gradients,
        IEEE Internet of Things Journal 9(13), https://doi.org/10.1109/JIOT.2021.3131258, as the submission Model
        Entanglement (ICLR 2025) describes and uses it: importance of layers, :math:`\alpha` = 1.
    Differs from the paper: we had no access to the paper. We interpret the description above as follows: important
        layers get more budget, importance is the change of a layer, :math:`\alpha` is its exponent, layers are
        clipped, a tenth of the budget is split equally, and the noise is Gaussian.

    Attributes:
        alpha: exponent of the importance; 0 gives all layers the same share.
        clip: C, the bound on the norm of all layers together.
        noise: z, the standard deviation of the noise under equal shares, in units of 2 C, the most that an update can
            change.
        delta: δ of the guarantee.
    """

    budget_replaces: ClassVar[bool] = True

    alpha: float = 1.0
    clip: float = 4.0
    noise: float = 0.005
    delta: float = 1e-5

    def __post_init__(self) -> None:
        in_range("alpha", self.alpha, 0)
        in_range("clip", self.clip, 0, open_low=True)
        in_range("noise", self.noise, 0, open_low=True)
        in_range("delta", self.delta, 0, 1, open_low=True, open_high=True)

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """Broadcast how much each layer has changed since the last broadcast; nothing in the first round."""
        now = {name: parameter.detach().cpu().clone() for name, parameter in server.model.named_parameters()}
        changes = {name: now[name] - server.state[_LAST + name] for name in now if _LAST + name in server.state}
        server.state.update({_LAST + name: tensor for name, tensor in now.items()})
        return {_IMPORTANCE + layer: _norm(changes, names) for layer, names in layers_of(changes).items()}

    def on_update(self, update: Update, client: Client) -> Update:
        """Clip every layer and add its noise; an update that is not finite counts as zero."""
        refuse_moved_buffers(self.name, update, client.model)
        update = finite_or_zero(update)
        sent = dict(update.tensors)
        layers = layers_of(update.tensors)
        stds = self._stds(layers, client.public)
        for layer, names in layers.items():
            excess = (_norm(update.tensors, names) / (self._bound(layers) * BELOW)).clamp(min=1.0).item()
            clipped = {name: update.tensors[name].double() / excess for name in names}
            noisy = Gaussian(std=stds[layer]).perturb(clipped, client.rng)
            sent |= {name: tensor.to(sent[name].dtype) for name, tensor in noisy.items()}
        return replace(update, tensors=sent)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``likelihood`` (of the noise) and ``direction`` (cosine); both clip the layers of the guess."""
        layers, spread = layers_of(arrived.gradients), noise_spread("update", arrived.steps)
        clipped = partial(_clip_layers, layers=layers, bound=self._bound(layers) * spread)
        noise: dict[str, float] = {}
        for layer, std in self._stds(layers, arrived.public).items():
            own = {name: arrived.gradients[name] for name in layers[layer]}
            noise |= seen_noise(own, std, spread, relative=False)
        return {"likelihood": Countermove(clipped, "l2", noise), "direction": Countermove(clipped, "cosine")}

    def budget(self, releases: Releases) -> Budget | None:
        """Return the budget of one Gaussian mechanism per round with noise multiplier z."""
        return Budget(epsilon(float(self.noise), 1.0, releases.rounds, self.delta), self.delta)

    def _bound(self, layers: Mapping[str, object]) -> float:
        """Return the clipping bound of one layer."""
        return float(self.clip / max(len(layers), 1) ** 0.5)

    def _stds(self, layers: Mapping[str, object], public: Tensors) -> dict[str, float]:
        """Return the standard deviation of the noise in each layer.

        An importance that is no norm (negative, NaN, infinite) is ignored, as it could raise the sum of the shares.
        """
        told = {layer: float(public[key]) for layer in layers if (key := _IMPORTANCE + layer) in public}
        importance = {layer: value for layer, value in told.items() if 0 <= value < math.inf}
        shares = budget_shares(layers, importance, self.alpha)
        return {layer: 2 * self._bound(layers) * self.noise / share**0.5 for layer, share in shares.items()}


def budget_shares(layers: Iterable[str], importance: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Return each layer's share of the budget; shares sum to 1. Unknown importance is taken as the mean of the others.

    Example:
        >>> {layer: round(share, 3) for layer, share in budget_shares("ab", {"a": 3.0, "b": 1.0}, alpha=1.0).items()}
        {'a': 0.725, 'b': 0.275}
        >>> budget_shares(["a", "b"], {}, alpha=1.0)
        {'a': 0.5, 'b': 0.5}
    """
    layers = list(layers)
    usual = sum(importance.values()) / max(len(importance), 1)
    known = {layer: importance.get(layer, usual) for layer in layers}
    most = max(known.values(), default=0.0)
    powers = {layer: (value / most) ** alpha if most > 0 else 1.0 for layer, value in known.items()}
    total = sum(powers.values())
    return {layer: _EQUAL / len(layers) + (1 - _EQUAL) * power / total for layer, power in powers.items()}


def layers_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameter names by the module they belong to.

    Example:
        >>> layers_of(["conv.weight", "conv.bias", "scale"])
        {'conv': ['conv.weight', 'conv.bias'], '': ['scale']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def refuse_moved_buffers(defence: str, update: Update, model: nn.Module) -> None:
    """Raise `DefenceError` if local training changes buffers that would be sent, since they get no noise.

    A layer that tracks statistics is refused whether or not they moved, as whether they did depends on the images.
    """
    tracking = {name for name, layer in model.named_modules() if isinstance(layer, _NormBase) and layer.training}
    moved = [
        name for name, change in update.buffers.items() if name.rpartition(".")[0] in tracking or bool(change.any())
    ]
    if moved:
        raise DefenceError(
            f"Defence {defence!r} protects parameters only, but local training also changed {', '.join(moved[:3])}, "
            "which would be sent. Freeze these layers (--batch-norm freeze), or use a model with GroupNorm."
        )


def finite_or_zero(update: Update) -> Update:
    """Return the update, or a zero one if any entry is NaN or infinite, which cannot be clipped.

    An error would tell the server, without any noise, that the images overflow under the weights that it chose.
    """
    if all(bool(tensor.isfinite().all()) for tensor in update.tensors.values()):
        return update
    return replace(update, tensors={name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()})


def _norm(tensors: Tensors, names: Iterable[str]) -> Tensor:
    """Return the norm of all entries of the named tensors together (0-d, float64)."""
    return torch.stack([tensors[name].double().square().sum() for name in names]).sum().sqrt()


def _clip_layers(guess: Tensors, seen: Tensors, *, layers: Mapping[str, list[str]], bound: float) -> dict[str, Tensor]:
    """Scale every layer of each of T gradients down to a norm of at most ``bound``."""
    clipped = dict(guess)
    for names in layers.values():
        own = {name: guess[name] for name in names}
        if any(tensor.numel() for tensor in own.values()):
            clipped |= clip_rows(own, seen, bound=bound)
    return clipped
