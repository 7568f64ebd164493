"""POGZ: layers that move the model most get most of the privacy budget, i.e. the least noise."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradveil.defences.base import Budget, Client, Defence, Releases, Server
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import Gaussian, noise_spread, seen_noise
from gradveil.defences.parts.accounting import epsilon
from gradveil.errors import DefenceError
from gradveil.types import Tensors, Update
from gradveil.validate import in_range

_EQUAL = 0.1
"""Part of the budget that all layers share equally, so that none is left without."""
_LAST, _IMPORTANCE = "last.", "importance."


@dataclass(frozen=True)
class Pogz(Defence):
    r"""Clip each layer of the update and add Gaussian noise to it, the less the more important the layer is.

    A layer is one module's own parameters, its weight and bias. With L layers, :math:`w^t` the model broadcast in round
    t, and z the ``noise``, a client sends

    .. math:: \tilde u_l = u_l \min\Big(1, \frac{C_l}{\|u_l\|_2}\Big) + N(0, \sigma_l^2 I), \qquad
        C_l = \frac{C}{\sqrt L}, \qquad \sigma_l = \frac{2 C_l z}{\sqrt{b_l}}

    .. math:: b_l = \frac{0.1}{L} + 0.9 \frac{I_l^\alpha}{\sum_k I_k^\alpha}, \qquad
        I_l = \|w^t_l - w^{t-1}_l\|_2

    so that the layers' budgets add up to that of the whole,
    :math:`\sum_l (2 C_l)^2 / (2 \sigma_l^2) = \sum_l b_l \rho = \rho = 1 / (2 z^2)`, in zero-concentrated differential
    privacy. Shares :math:`b_l` are equal in the first round, and noise is then the same in all layers. The server
    broadcasts I, which everyone could compute from the models broadcast before: it costs no budget. Layers are clipped
    one by one, for with a common bound all of a change could lie in the layer with the least noise, which would then
    decide the budget alone.

    Threat model: a curious server that sees all updates of a client.
    Does not protect: with the default ``noise``, which lets a network train with a few clients, against an attacker who
        weighs its match by the noise's likelihood and has a prior on images. The number of a client's images counts as
        known. Running statistics of BatchNorm (``Update.buffers``) would be sent as they are, so an update that changes
        them is refused.
    Guarantee: (ε, δ)-differential privacy of a client's whole data, replacing all of its images by others, hence of
        each image: ``accounting.epsilon`` with z, once a round. The default's ε is in the tens of thousands a round,
        which promises nothing; a guarantee worth the name takes a ``noise`` of about 1, and then thousands of clients
        for the mean to be of use. The noise is pseudo-random and in floating point, not hardened against those who
        exploit that.
    Reference: Zhu et al. 2022, A fine-grained differentially private federated learning against leakage from gradients,
        IEEE Internet of Things Journal 9(13), https://doi.org/10.1109/JIOT.2021.3131258, as the submission Model
        Entanglement (ICLR 2025) describes and uses it: importance of layers, :math:`\alpha` = 1.
    Differs from the paper: it was not at hand. That important layers get more budget, what is important, the role of
        :math:`\alpha`, clipping, the tenth that is shared equally and the kind of noise are a reading of that
        description.

    Attributes:
        alpha: how much importance decides; 0 gives all layers the same share.
        clip: C, the bound on the norm of all layers together.
        noise: z, the noise's standard deviation under equal shares, in units of 2 C, by which an update can change.
        delta: δ of the guarantee.
    """

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
        """How much each layer has changed since the last broadcast; nothing in the first round."""
        now = {name: parameter.detach().cpu().clone() for name, parameter in server.model.named_parameters()}
        changes = {name: now[name] - server.state[_LAST + name] for name in now if _LAST + name in server.state}
        server.state.update({_LAST + name: tensor for name, tensor in now.items()})
        return {_IMPORTANCE + layer: _norm(changes, names) for layer, names in layers_of(changes).items()}

    def on_update(self, update: Update, client: Client) -> Update:
        """Clip every layer, and add its noise."""
        refuse_moved_buffers(self.name, update)
        refuse_infinite(self.name, update)
        sent = dict(update.tensors)
        layers = layers_of(update.tensors)
        stds = self._stds(layers, client.public)
        for layer, names in layers.items():
            excess = (_norm(update.tensors, names) / self._bound(layers)).clamp(min=1.0).item()
            clipped = {name: _wide(update.tensors[name]) / excess for name in names}
            noisy = Gaussian(std=stds[layer]).perturb(clipped, client.rng)
            sent |= {name: tensor.to(sent[name].dtype) for name, tensor in noisy.items()}
        return replace(update, tensors=sent)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Clip the guess's layers, and match by the noise's likelihood or by direction."""
        layers, spread = layers_of(arrived.gradients), noise_spread("update", arrived.steps)
        clipped = partial(_clip_layers, layers=layers, bound=self._bound(layers) * spread)
        noise: dict[str, float] = {}
        for layer, std in self._stds(layers, arrived.public).items():
            own = {name: arrived.gradients[name] for name in layers[layer]}
            noise |= seen_noise(own, std, spread, relative=False)
        return {"likelihood": Countermove(clipped, "l2", noise), "direction": Countermove(clipped, "cosine")}

    def budget(self, releases: Releases) -> Budget | None:
        """Of one Gaussian mechanism a round, whose noise is z times what an update can change by."""
        return Budget(epsilon(float(self.noise), 1.0, releases.rounds, self.delta), self.delta)

    def _bound(self, layers: Mapping[str, object]) -> float:
        """C of one layer."""
        return float(self.clip / max(len(layers), 1) ** 0.5)

    def _stds(self, layers: Mapping[str, object], public: Tensors) -> dict[str, float]:
        """The noise's standard deviation in each layer."""
        importance = {layer: float(public[key]) for layer in layers if (key := _IMPORTANCE + layer) in public}
        shares = budget_shares(layers, importance, self.alpha)
        return {layer: 2 * self._bound(layers) * self.noise / share**0.5 for layer, share in shares.items()}


def budget_shares(layers: Iterable[str], importance: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Each layer's part of the budget; they add up to 1. A layer of unknown importance counts as the mean of the rest.

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
    """The names of each module's own parameters, by the module's name.

    Example:
        >>> layers_of(["conv.weight", "conv.bias", "scale"])
        {'conv': ['conv.weight', 'conv.bias'], '': ['scale']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def refuse_moved_buffers(defence: str, update: Update) -> None:
    """Raise where local training changed buffers, which no noise protects."""
    moved = [name for name, change in update.buffers.items() if bool(change.any())]
    if moved:
        raise DefenceError(
            f"Defence {defence!r} protects parameters only, but local training also changed {', '.join(moved[:3])}, "
            "which would be sent. Freeze such layers (--batch-norm freeze), or use a model with GroupNorm."
        )


def refuse_infinite(defence: str, update: Update) -> None:
    """Raise where an update can't be clipped."""
    if not all(bool(tensor.isfinite().all()) for tensor in update.tensors.values()):
        raise DefenceError(
            f"Defence {defence!r} can clip finite updates only, got NaN or infinity. Lower the learning rate."
        )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _norm(tensors: Tensors, names: Iterable[str]) -> Tensor:
    """Of all entries of some tensors together (0-d, float64)."""
    return torch.stack([tensors[name].double().square().sum() for name in names]).sum().sqrt()


def _clip_layers(guess: Tensors, seen: Tensors, *, layers: Mapping[str, list[str]], bound: float) -> dict[str, Tensor]:
    """Each of T gradients with every layer scaled down to a norm of at most ``bound``."""
    clipped = dict(guess)
    for names in layers.values():
        own = {name: guess[name] for name in names}
        if any(tensor.numel() for tensor in own.values()):
            clipped |= clip_rows(own, seen, bound=bound)
    return clipped
