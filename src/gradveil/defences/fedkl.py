"""FedKL: a private key, through private lock layers, sets the scales and shifts of a block's channels."""

import copy
import itertools
import math
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gradveil.defences.base import Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import ConfigError
from gradveil.networks.calls import Calls, calls_on_blank, traced_calls
from gradveil.randomness import stream
from gradveil.secret_stream import SecretStream, attackers_stream
from gradveil.types import Tensors
from gradveil.validate import in_range, one_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda numbers: numbers,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
_NAME = "key_lock"
"""Part of a tensor's name that marks it as private."""
_UNDOES = (_BatchNorm, _InstanceNorm)
"""Normalisations that remove any scale and shift of a channel."""


@dataclass(frozen=True)
class Fedkl(Defence):
    r"""Scale and shift the channels of a convolution by numbers that private lock layers compute from a private key.

    A locked block maps its input x to

    .. math::
        \gamma = \phi(W_\gamma k + b_\gamma), \qquad \beta = \phi(W_\beta k + b_\beta), \qquad
        s = \gamma \odot \frac{u - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad u = \theta \otimes x

    with the client's own key k and lock W, b; each block has one of each. Key and lock never leave the device. The lock
    is trained with the network, and all other tensors are shared. So the server gets the update of a network whose
    inner scales it does not know.

    If the output of a locked convolution goes to a normalisation only (BatchNorm, GroupNorm or InstanceNorm), the lock
    replaces the scale and shift of that normalisation; otherwise BatchNorm is added. ``torch.fx`` traces which layer is
    called first and where outputs go. If a network cannot be traced (e.g. because it branches on the data), the order
    of definition is used. Before training, one blank image is sent through the network; a network is refused if a lock
    is in the wrong place, or if a later normalisation undoes it. BatchNorm's running statistics are shared as usual,
    unless ``--batch-norm local`` is given. The server has a random key and lock of its own; ``accuracy_server`` in the
    rows is the accuracy of the global model with these.

    Threat model: an honest-but-curious server that matches updates with a lock of its own in place of the client's.
    Does not protect: against a server that optimises the 2C scales and shifts of each locked block together with the
        image, since one update gives thousands of equations for them. Layers that are not locked are not protected.
        A longer key does not help, since the network uses the key only through these 2C numbers. A client that shares
        the gradient of its lock reveals its key: it is the gradient of W divided by that of b.
    Guarantee: none.
    Reference: Ren et al., Gradient leakage defense with key-lock module for federated learning,
        https://arxiv.org/abs/2305.04095, Sections 3.2 to 3.4, Equation 30.
    Differs from the paper: the two lock layers are one matrix with 2C rows. Each client draws its own lock; in the
        paper (``lock=common``) the server sends the initial lock to all clients, and so knows it in round 1. Eq. 30 has
        no activation; the authors' code has ReLU (``activation=relu``), with which half of the channels start at zero.
        Eq. 30 has no normalisation either, but the rest of the paper has. ``grid`` is our extension. A step of SGD
        on W and b moves :math:`\gamma` by the learning rate times :math:`\|k\|^2 + 1` times its gradient. For the
        paper's key of 1,024 numbers this factor is about 342, and at FedAvg's usual rates training never leaves chance
        level. With ``scale=unit`` the factor is about 2, for any length of the key, and :math:`\gamma` and
        :math:`\beta` start with the same values.

    Attributes:
        blocks: convolutions to lock: ``first``, ``all``, or names joined by ``/``.
        length: length of the key; its entries are uniform in [0, 1), before ``scale``.
        activation: activation φ of the lock: ``none``, ``relu`` or ``sigmoid``.
        norm: what to add after a convolution without normalisation: ``batch`` (BatchNorm), or ``none`` (as in Eq. 30).
        init: initial values of the lock, before ``scale``: ``default`` is PyTorch's, uniform within 1 / sqrt(length);
            ``uniform`` is uniform within 0.5, as in the authors' attacks.
        grid: number of tiles per side of the feature map with scales and shifts of their own, C times grid squared
            numbers each; 1 is the paper's.
        lock: ``own`` lets each client draw its lock; ``common`` starts all clients with the same lock, which the server
            knows. It is the same in all runs, whatever their seed, and in all blocks with the same number of channels.
        source: ``seed`` makes a simulation reproducible, but whoever knows the seed knows the keys; ``system`` draws
            keys and locks from the operating system's secure random source, for real clients.
        scale: ``unit`` divides the key by sqrt(length / 3) and multiplies the lock's weights by it, so that training
            moves scales and shifts about as fast as other weights; ``paper`` leaves both as drawn, which trains at the
            paper's learning rate of 0.01, but not at 0.05 with the same momentum of 0.9.
    """

    blocks: tuple[str, ...] = ("first",)
    length: int = 1024
    activation: str = "none"
    norm: str = "batch"
    init: str = "default"
    grid: int = 1
    lock: str = "own"
    source: str = "seed"
    scale: str = "unit"

    def __post_init__(self) -> None:
        if not self.blocks or (len(self.blocks) > 1 and {"first", "all"} & set(self.blocks)):
            raise ConfigError(
                f"blocks must be first, all or names of convolutions, got {'/'.join(self.blocks)!r}. Try blocks=first."
            )
        in_range("length", self.length, 1)
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("norm", self.norm, ["batch", "none"])
        one_of("init", self.init, ["default", "uniform"])
        in_range("grid", self.grid, 1)
        one_of("lock", self.lock, ["own", "common"])
        one_of("source", self.source, ["seed", "system"])
        one_of("scale", self.scale, ["unit", "paper"])

    def on_model(self, model: nn.Module, rng: SecretStream) -> nn.Module:
        """Lock the chosen convolutions, each with a new key and lock."""
        if any(isinstance(layer, KeyLock) for layer in model.modules()):
            raise ConfigError(
                "Defence 'fedkl' locks a network once, but this network is locked already. Use it only once in a chain."
            )
        model = copy.deepcopy(model)
        following = _following(model)
        for name, conv in self._chosen(model).items():
            key_lock = self._key_lock(conv.out_channels, conv.weight, rng)
            norm = following.get(name, "")
            norm = norm if _normalises(model.get_submodule(norm), conv.out_channels) else ""
            if norm:
                _replace(model, norm, Locked(_without_affine(model.get_submodule(norm)), key_lock))
            else:
                fresh = _without_affine(nn.BatchNorm2d(conv.out_channels)) if self.norm == "batch" else nn.Identity()
                block = OrderedDict(conv=conv, locked=Locked(fresh.to(conv.weight), key_lock))
                _replace(model, name, nn.Sequential(block).train(model.training))
        return model

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` unless each lock gets a convolution's output, and each chosen convolution is locked."""
        wrong = self._misplaced(calls_on_blank(network, shape))
        if wrong:
            raise ConfigError(
                f"Defence 'fedkl' must lock the outputs of its convolutions, got {wrong}. Name the convolutions "
                "(blocks=NAME/NAME), or define each right before a normalisation of its own, and call both once."
            )

    def private(self, name: str) -> bool:
        """Return whether a tensor belongs to a key or lock; these never leave the device."""
        return _NAME in name.split(".")

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``joint``, and ``known`` or ``key`` if the threat model grants keys or locks.

        ``joint`` optimises the scales and shifts of each block together with the image. ``known`` computes them from
        the granted lock, and from the granted key or the key that the lock's change in the round reveals. ``key`` puts
        a granted key into a lock of the attacker's own; with ``lock=common`` that lock is the client's, so this is
        ``known`` too. If ``joint`` gets the signs of the scales wrong, it ends in a negative of the image with a larger
        loss, so several restarts help. It weights tensors by one over their norm, so that the gradients of convolutions
        count beside those of the last layer.
        """
        locks = dict(_key_locks(arrived.network)) if arrived.network is not None else {}
        joint = Countermove(
            unknowns={name: partial(self._guesses, lock) for name, lock in locks.items()},
            weights=arrived.even_weights,
        )
        names = {name.rpartition(".")[2] for each in arrived.secrets for name in each}
        if not names & {"key", "weight"}:
            return {"joint": joint}
        found = Countermove(outputs={name: _outputs(name, lock, arrived) for name, lock in locks.items()})
        if "weight" in names or self.lock == "common":
            return {"known": found, "joint": joint}
        return {"joint": joint, "key": found}

    def _chosen(self, model: nn.Module) -> dict[str, nn.Conv2d]:
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and name]
        convs = {name: layer for name, layer in layers if [*layer.parameters()]}  # those of a trunk are frozen
        if not convs:
            raise ConfigError(
                "Defence 'fedkl' locks convolutions, but this network trains no nn.Conv2d. "
                "Use a convolutional model (`gradveil list models`), or another defence."
            )
        if self.blocks == ("first",):
            called = [str(node.target) for node in traced_calls(model) if node.target in convs]
            first = called[0] if called else next(iter(convs))
            return {first: convs[first]}
        if self.blocks == ("all",):
            return convs
        unknown = [name for name in self.blocks if name not in convs]
        if unknown:
            raise ConfigError(
                f"blocks must be first, all or names of convolutions, got {unknown[0]!r}. Known: {', '.join(convs)}."
            )
        return {name: conv for name, conv in convs.items() if name in self.blocks}

    def _misplaced(self, calls: Calls) -> str:
        """Describe the first convolution or lock that is in the wrong place, or return "" if there is none."""
        locks = [call for call in calls.layers if isinstance(call.layer, Locked)]
        convs = [call for call in calls.layers if isinstance(call.layer, nn.Conv2d)]
        named = [call for call in convs if {call.name, call.name.removesuffix(".conv")} & set(self.blocks)]
        for conv in {"first": convs[:1], "all": convs}.get(self.blocks[0], named):
            if not any(map(conv.feeds, locks)) or calls.uses(conv.made) > 1:
                return f"a call of {conv.name!r} whose output is used unlocked"
        for lock in locks:
            if not any(conv.feeds(lock) for conv in convs):
                return f"{lock.name!r} locked, whose input is not the output of a convolution"
            undoes = [norm for norm in calls.layers if isinstance(norm.layer, _UNDOES) and lock.feeds(norm)]
            if undoes and calls.uses(lock.made) == 1:
                return f"{undoes[0].name!r} right after {lock.name!r}, which undoes the scales"
        return "" if locks else "none of them called"

    def _key_lock(self, channels: int, like: Tensor, rng: SecretStream) -> "KeyLock":
        """Draw a key and lock for a number of channels, with the type and device of ``like``."""
        count = 2 * channels * self.grid**2
        spread = 0.5 if self.init == "uniform" else 1 / math.sqrt(self.length)
        key = self._drawn(self.length, rng)
        numbers = (
            torch.rand(count * (self.length + 1), generator=stream(0, "fedkl", "lock", count), dtype=torch.float64)
            if self.lock == "common"
            else self._drawn(count * (self.length + 1), rng)
        )
        lock = ((2 * numbers - 1) * spread).view(count, self.length + 1)
        if self.scale == "unit":  # the outputs of the lock stay the same
            key, lock[:, 1:] = key * self._shrink, lock[:, 1:] / self._shrink
        lock = lock.to(like)
        return KeyLock(key.to(like), lock[:, 1:], lock[:, 0], self.activation, (channels, self.grid, self.grid))

    @property
    def _shrink(self) -> float:
        """Factor that gives a key with entries uniform in [0, 1) a mean squared norm of 1."""
        return math.sqrt(3 / self.length)

    def _drawn(self, count: int, rng: SecretStream) -> Tensor:
        """Draw ``count`` numbers, uniform in [0, 1), from the random source that ``source`` names."""
        if self.source == "seed":
            return rng.uniform((count,), torch.float64)
        bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)

    def _guesses(self, lock: "KeyLock", rows: int, rng: torch.Generator) -> Tensor:
        """Return first guesses (rows, numbers) of a block's scales and shifts, from random keys and locks."""
        draws = attackers_stream(rng)
        with torch.no_grad():
            return torch.stack([self._key_lock(lock.shape[0], lock.key, draws)() for _ in range(rows)])


class KeyLock(nn.Module):
    """A key and its lock, which output the scales of all channels followed by their shifts.

    Args:
        key: (length,).
        weight: weight of the lock, (numbers, length), with 2 C grid² numbers.
        bias: bias of the lock, (numbers,).
        activation: activation of the lock, one of `ACTIVATIONS`.
        shape: (C, grid, grid), the shape of the scales.
    """

    key: Tensor

    def __init__(self, key: Tensor, weight: Tensor, bias: Tensor, activation: str, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.register_buffer("key", key)
        self.weight, self.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
        self.activation, self.shape = activation, shape

    def forward(self) -> Tensor:
        """Return all scales and then all shifts, (numbers,)."""
        return ACTIVATIONS[self.activation](F.linear(self.key, self.weight, self.bias))


class Locked(nn.Module):
    """A normalisation without scale and shift of its own, followed by the scale and shift of a key-lock.

    The output of the key-lock may also be (N, numbers), with one row per image: attackers put their guesses there.
    """

    def __init__(self, norm: nn.Module, key_lock: KeyLock) -> None:
        super().__init__()
        self.norm, self.key_lock = norm, key_lock

    def forward(self, features: Tensor) -> Tensor:
        """Normalise, scale and shift features (N, C, H, W)."""
        numbers = self.key_lock()
        if numbers.dim() == 1 and self.key_lock.shape[1] == 1 and hasattr(self.norm, "affine"):
            return self._at_once(features, *numbers.chunk(2))
        gamma, beta = numbers.view(-1, 2, *self.key_lock.shape).unbind(1)  # (1 or N, C, grid, grid)
        if self.key_lock.shape[1] > 1:
            self._check_grid(features)
            gamma, beta = (F.interpolate(tiles, features.shape[2:], mode="nearest") for tiles in (gamma, beta))
        normal: Tensor = self.norm(features)
        scaled: Tensor = gamma * normal + beta
        return scaled

    def _check_grid(self, features: Tensor) -> None:
        grid, (height, width) = self.key_lock.shape[1], features.shape[2:]
        if grid > min(height, width):
            raise ConfigError(
                f"grid must be at most the side of the {height}x{width} feature map that it scales, got {grid}. "
                "Lower grid."
            )

    def _at_once(self, features: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        """Do the same with the kernel of the normalisation, which scales and shifts at no extra cost."""
        own = vars(self.norm)
        own["weight"], own["bias"] = gamma, beta
        try:
            result: Tensor = self.norm(features)
        finally:
            own["weight"] = own["bias"] = None  # a network that holds parts of an autograd graph cannot be copied
        return result


def recovered_key(weight: Tensor, bias: Tensor) -> Tensor:
    r"""Return the key (length,), given the change of a lock's weight (numbers, length) and bias (numbers,).

    By Eqs. 27 and 28, each row of the weight's gradient is the key times that entry of the bias's gradient. So
    :math:`k = \nabla_b^T \nabla_W / \|\nabla_b\|^2`, also for sums over steps. The result is NaN if the bias did not
    change.

    Example:
        >>> recovered_key(torch.tensor([[2.0, 4.0], [-1.0, -2.0]]), torch.tensor([2.0, -1.0]))
        tensor([1., 2.])
    """
    return bias @ weight / bias.square().sum()


def _outputs(name: str, lock: KeyLock, arrived: Arrived) -> Tensor:
    """Return the outputs (T, numbers) of the targets' key-locks; tensors not granted are the attacker's own."""
    changes: Sequence[Tensors] = arrived.secret_changes or [{}] * len(arrived.secrets)
    found = []
    for granted, change in zip(arrived.secrets, changes, strict=True):
        tensors = {
            key.removeprefix(f"{name}."): tensor for key, tensor in granted.items() if key.startswith(f"{name}.")
        }
        moved = [change.get(f"{name}.{part}") for part in ("weight", "bias")]
        if "key" not in tensors and moved[0] is not None and moved[1] is not None and bool(moved[1].any()):
            tensors["key"] = recovered_key(moved[0], moved[1])
        with torch.no_grad():
            found.append(torch.func.functional_call(lock, tensors, ()))
    return torch.stack(found)


def _key_locks(network: nn.Module) -> Iterator[tuple[str, KeyLock]]:
    return ((name, layer) for name, layer in network.named_modules() if isinstance(layer, KeyLock))


def _following(model: nn.Module) -> dict[str, str]:
    """Return, for each layer name, the only layer that gets its output, or "" if there are several, or none.

    The result is also "" if that layer differs between calls. If the network cannot be traced, it is the layer defined
    next, which may be wrong: see `Fedkl.check`.
    """
    nodes = traced_calls(model)
    if not nodes:
        names = [name for name, layer in model.named_modules() if name and not any(layer.children())]
        pairs = itertools.pairwise(names)
        return {before: after for before, after in pairs if before.rpartition(".")[0] == after.rpartition(".")[0]}
    found = defaultdict[str, set[str]](set)
    for node in nodes:
        user, *others = node.users or [None]
        found[str(node.target)].add(str(user.target) if user in nodes and not others else "")
    return {name: users.pop() if len(users) == 1 else "" for name, users in found.items()}


def _normalises(layer: nn.Module, channels: int) -> bool:
    if isinstance(layer, (_BatchNorm, _InstanceNorm)):
        return layer.num_features == channels
    return isinstance(layer, nn.GroupNorm) and layer.num_channels == channels


def _without_affine(norm: nn.Module) -> nn.Module:
    """Remove scale and shift from a normalisation, but not its statistics; `Locked` may set them temporarily."""
    for name in ("weight", "bias"):
        del norm._parameters[name]
        vars(norm)[name] = None
    norm.affine = False  # type: ignore[assignment]
    return norm


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
