"""FedKL: scale and shift of a block's channels come out of a private key, through layers that are private too."""

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
from gradveil.types import Tensors
from gradveil.validate import in_range, one_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda numbers: numbers,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}
_NAME = "key_lock"
"""The part of a tensor's name that says that it is private."""
_UNDOES = (_BatchNorm, _InstanceNorm)
"""Normalisations that take a channel's scale and shift off, whatever they are."""


@dataclass(frozen=True)
class Fedkl(Defence):
    r"""Let a private key, through private lock layers, decide how the channels of a convolution are scaled and shifted.

    A locked block turns the image (or map) x into

    .. math::
        \gamma = \phi(W_\gamma k + b_\gamma), \qquad \beta = \phi(W_\beta k + b_\beta), \qquad
        s = \gamma \odot \frac{u - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad u = \theta \otimes x

    with the key k and the lock W, b of the client, one of each for a block. Both stay on the device for ever, beside
    its private files; the lock is trained with the rest, and all else is shared. What an aggregator gets is the change
    of a network whose inner scales it does not know. A convolution's own normalisation (BatchNorm, GroupNorm or
    InstanceNorm, the layer that alone it feeds) loses its own scale and shift; one without gets BatchNorm. What is
    called first, and what feeds what, comes from the network's code by ``torch.fx``; where a network can't be traced so
    (it branches on the data, say), from the order of definition. Before any work one blank image is sent through, and a
    network whose locks turn out to be elsewhere, or to be undone by a normalisation behind, is refused.
    BatchNorm's statistics are shared as ever, unless ``--batch-norm local``. The server has a random key and lock of
    its own: ``accuracy_server`` in the rows is that of the global model with them.

    Threat model: a curious server that matches updates with a lock of its own in place of the client's.
    Does not protect: against a server that searches the 2C numbers of each locked block with the image: one update has
        thousands of equations for them. Layers that are not locked stay as they are; the key's length is of no
        consequence, since the network sees nothing of the key but those 2C numbers. A client that shares the lock's
        gradient shares the key: it is the gradient of W divided by that of b.
    Guarantee: none.
    Reference: Ren et al., Gradient leakage defense with key-lock module for federated learning,
        https://arxiv.org/abs/2305.04095, Sections 3.2 to 3.4, Equation 30.
    Differs from the paper: the two lock layers are one matrix with 2C rows. Each client draws its lock itself;
        ``lock=common`` is the paper's, where the server hands out the first values and so knows them in round 1. The
        paper's Eq. 30 has no activation, the authors' code ReLU, which leaves half of the channels dark at the start
        (``activation=relu``). Eq. 30 has no normalisation either, but all else has. ``grid`` is ours.

    Attributes:
        blocks: which convolutions are locked: first, all, or their names written a/b.
        length: of the key, uniform in [0, 1).
        activation: of the lock: none, relu or sigmoid.
        norm: what a convolution without normalisation gets: batch, or none (Eq. 30 as it stands).
        init: of the lock: ``default`` is PyTorch's, uniform within 1 / sqrt(length); ``uniform`` within 0.5, as in the
            authors' attacks.
        grid: scales and shifts differ over grid x grid tiles of the map: C times grid squared numbers each. Ours.
        lock: ``own`` is drawn by each client, ``common`` begins alike for all, and the server knows it: it is the same
            in all runs, whatever their seed, and in all blocks with as many channels.
        source: ``seed`` makes a simulation repeatable, but whoever has the seed has the keys; ``system`` draws keys and
            locks from the system's secure random source: for real clients.
    """

    blocks: tuple[str, ...] = ("first",)
    length: int = 1024
    activation: str = "none"
    norm: str = "batch"
    init: str = "default"
    grid: int = 1
    lock: str = "own"
    source: str = "seed"

    def __post_init__(self) -> None:
        if not self.blocks or (len(self.blocks) > 1 and {"first", "all"} & set(self.blocks)):
            raise ConfigError(f"blocks must be first, all or names of convolutions, got {'/'.join(self.blocks)!r}.")
        in_range("length", self.length, 1)
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("norm", self.norm, ["batch", "none"])
        one_of("init", self.init, ["default", "uniform"])
        in_range("grid", self.grid, 1)
        one_of("lock", self.lock, ["own", "common"])
        one_of("source", self.source, ["seed", "system"])

    def on_model(self, model: nn.Module, rng: torch.Generator) -> nn.Module:
        """Lock the chosen blocks, with a fresh key and lock for each."""
        if any(isinstance(layer, KeyLock) for layer in model.modules()):
            raise ConfigError("Defence 'fedkl' locks a network once, got one that is locked. Use it once in a chain.")
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
        """Each lock must be given what a convolution gives, and each chosen convolution's result must be locked."""
        wrong = self._misplaced(calls_on_blank(network, shape))
        if wrong:
            raise ConfigError(
                f"Defence 'fedkl' must lock what its convolutions give, got {wrong}. Name the convolutions "
                "(blocks=NAME/NAME), or define each right before a normalisation of its own, and call both once."
            )

    def private(self, name: str) -> bool:
        """Keys and locks never leave the device."""
        return _NAME in name.split(".")

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Search each block's scales and shifts with the image: ``joint``; or compute them from what was shared.

        ``known`` comes first where key and lock are granted, or the lock alone: its change in the round betrays the
        key. ``key`` puts a known key into a lock of the attacker's own, which is the client's with ``lock=common``.
        A search that guesses the signs of the scales wrong ends in a negative of the image, at a larger loss: several
        restarts help. Tensors count by one over their norm, so that the convolutions' are heard beside the last layer.
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
        convs = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and name}
        if not convs:
            raise ConfigError(
                "Defence 'fedkl' locks convolutions, but this network has no nn.Conv2d. "
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
        """What is locked wrongly or not at all; "" if nothing is."""
        locks = [call for call in calls.layers if isinstance(call.layer, Locked)]
        convs = [call for call in calls.layers if isinstance(call.layer, nn.Conv2d)]
        named = [call for call in convs if {call.name, call.name.removesuffix(".conv")} & set(self.blocks)]
        for conv in {"first": convs[:1], "all": convs}.get(self.blocks[0], named):
            if not any(map(conv.feeds, locks)) or calls.uses(conv.made) > 1:
                return f"a call of {conv.name!r} whose result is used unlocked"
        for lock in locks:
            if not any(conv.feeds(lock) for conv in convs):
                return f"{lock.name!r} locked, which is given something else"
            undoes = [norm for norm in calls.layers if isinstance(norm.layer, _UNDOES) and lock.feeds(norm)]
            if undoes and calls.uses(lock.made) == 1:
                return f"{undoes[0].name!r} right behind {lock.name!r}, which takes the scales off again"
        return "" if locks else "none of them called"

    def _key_lock(self, channels: int, like: Tensor, rng: torch.Generator) -> "KeyLock":
        """A fresh key and lock for so many channels, of the type and on the device of ``like``."""
        count = 2 * channels * self.grid**2
        spread = 0.5 if self.init == "uniform" else 1 / math.sqrt(self.length)
        key = self._drawn(self.length, rng)
        numbers = (
            torch.rand(count * (self.length + 1), generator=stream(0, "fedkl", "lock", count), dtype=torch.float64)
            if self.lock == "common"
            else self._drawn(count * (self.length + 1), rng)
        )
        lock = ((2 * numbers - 1) * spread).to(like).view(count, self.length + 1)
        return KeyLock(key.to(like), lock[:, 1:], lock[:, 0], self.activation, (channels, self.grid, self.grid))

    def _drawn(self, count: int, rng: torch.Generator) -> Tensor:
        """So many numbers, uniform in [0, 1), from where the settings say."""
        if self.source == "seed":
            return torch.rand(count, generator=rng, dtype=torch.float64)
        bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)

    def _guesses(self, lock: "KeyLock", rows: int, rng: torch.Generator) -> Tensor:
        """(rows, numbers) first guesses of a block's scales and shifts: those of locks of the attacker's own."""
        with torch.no_grad():
            return torch.stack([self._key_lock(lock.shape[0], lock.key, rng)() for _ in range(rows)])


class KeyLock(nn.Module):
    """A key and its lock: gives the scales of all channels, then their shifts, in one row of 2 C numbers.

    Args:
        key: (length,).
        weight: of the lock, (numbers, length).
        bias: of the lock, (numbers,).
        activation: of the lock, one of `ACTIVATIONS`.
        shape: (C, grid, grid) of the scales.
    """

    key: Tensor

    def __init__(self, key: Tensor, weight: Tensor, bias: Tensor, activation: str, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.register_buffer("key", key)
        self.weight, self.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
        self.activation, self.shape = activation, shape

    def forward(self) -> Tensor:
        """All numbers, (numbers,)."""
        return ACTIVATIONS[self.activation](F.linear(self.key, self.weight, self.bias))


class Locked(nn.Module):
    """A normalisation without scale and shift of its own, followed by those of a key-lock.

    The key-lock's output may also be (N, numbers), one row an image: so an attacker puts guesses in its place.
    """

    def __init__(self, norm: nn.Module, key_lock: KeyLock) -> None:
        super().__init__()
        self.norm, self.key_lock = norm, key_lock

    def forward(self, features: Tensor) -> Tensor:
        """Features (N, C, H, W) normalised, scaled and shifted."""
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
            raise ConfigError(f"grid must be at most the {height}x{width} pixels of the map it scales, got {grid}.")

    def _at_once(self, features: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        """The same by the normalisation's own kernel, which scales and shifts on the way at no cost."""
        own = vars(self.norm)
        own["weight"], own["bias"] = gamma, beta
        try:
            result: Tensor = self.norm(features)
        finally:
            own["weight"] = own["bias"] = None  # a network that holds parts of a graph can't be copied
        return result


def recovered_key(weight: Tensor, bias: Tensor) -> Tensor:
    r"""The key (length,) out of the change of a lock's matrix (numbers, length) and of its bias (numbers,).

    By Eqs. 27 and 28 each row of the gradient is that of the bias times the key, so that
    :math:`k = \nabla_b^T \nabla_W / \|\nabla_b\|^2`; sums over steps keep the ratio. NaN where the bias did not change.

    Example:
        >>> recovered_key(torch.tensor([[2.0, 4.0], [-1.0, -2.0]]), torch.tensor([2.0, -1.0]))
        tensor([1., 2.])
    """
    return bias @ weight / bias.square().sum()


def _outputs(name: str, lock: KeyLock, arrived: Arrived) -> Tensor:
    """(T, numbers): what each target's key-lock gives, with the attacker's own tensors where they are not granted."""
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
    """The layer that alone is given a layer's output, by name, and "" where that is none, or not the same in all calls.

    Where the network can't be traced it is the next one defined, which may be another: see `Fedkl.check`.
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
    """The same normalisation with its statistics, but without scale and shift; `Locked` may lend it its own."""
    for name in ("weight", "bias"):
        del norm._parameters[name]
        vars(norm)[name] = None
    norm.affine = False  # type: ignore[assignment]
    return norm


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)
