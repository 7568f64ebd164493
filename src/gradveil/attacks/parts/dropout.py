r"""Dropout in a client's single step: its masks are read off the gradient if possible, and searched otherwise.

A layer behind Dropout has the weight gradient :math:`\sum_i \delta_i (m_i \circ f_i)^T`. For one image, its column j is
zero exactly where the unit j was dropped (or was zero anyway, when the mask makes no difference), so the mask is known.
For several images each image's mask is searched together with the images, as a number in (0, 1) per unit that starts
at the share of units that are kept: there the network is its own average over masks. Several local steps keep this
average in every step.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from gradveil.attacks.parts.local_training import Replay
from gradveil.attacks.parts.search import Search
from gradveil.networks.watch import LayerCall, record
from gradveil.threat import Knowledge, Observation

SURE = 20.0
"""Logit of a unit that is known to be kept; minus this is one that is known to be dropped."""


ROUGHLY = 0.3
"""Relative error of what Adam's first step shows of a gradient."""


class Masked(nn.Module):
    """Dropout with given masks: multiply the input by the probability to keep each unit, over the share kept.

    Args:
        share: share of the units that are dropped.
        size: images per client.
        shape: shape of what is dropped, for one image; channels alone for Dropout of whole channels.
    """

    def __init__(self, share: float, size: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.share, self.size, self.shape = share, size, shape
        self.logits = nn.Identity()  # gets the logits as its output, see `replaced_outputs`

    @property
    def start(self) -> float:
        """The logit of a unit of which nothing is known."""
        return float(torch.tensor(1 - self.share).logit())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the masked input (N, ...); without logits, the input itself."""
        given: Tensor = self.logits(inputs)
        if given is inputs:
            return inputs
        masks = given.reshape(-1, self.size, *self.shape)  # one row per image (all of its client's), or one for all
        places = torch.arange(len(inputs), device=inputs.device)
        own = masks[0] if len(masks) == 1 and len(inputs) == self.size else masks[places, places % self.size]
        own = own.reshape(len(inputs), *self.shape, *[1] * (inputs.dim() - 1 - len(self.shape)))
        return inputs * own.sigmoid() / (1 - self.share)


def with_masks(search: Search, replay: Replay, seen: Observation) -> tuple[Search, Replay]:
    """Return a search and a replay in which the masks of Dropout are known or searched, or the same without Dropout."""
    active = {
        name: layer
        for name, layer in replay.network.named_modules()
        if isinstance(layer, _DropoutNd) and 0 < layer.p < 1
    }
    if not active or seen.dropout == "off" or not seen.single_step:
        return search, replay
    calls = _calls(replay, seen)
    once = [call.name for call in calls]
    active = {name: layer for name, layer in active.items() if once.count(name) == 1}
    network = copy.deepcopy(replay.network)
    known: dict[str, Tensor] = {}
    sizes: dict[str, tuple[int, float]] = {}
    for name, layer in active.items():
        call = calls[once.index(name)]
        whole = not isinstance(layer, nn.Dropout)  # Dropout1d to 3d and the like drop whole channels
        shape = tuple(call.output.shape[1:2] if whole else call.output.shape[1:])
        masked = Masked(layer.p, replay.batch_size, shape)
        _set(network, name, masked)
        columns = _columns(calls[once.index(name) + 1 :], seen, shape) if replay.batch_size == 1 else None
        if columns is None:
            sizes[f"{name}.logits"] = (replay.batch_size * torch.Size(shape).numel(), masked.start)
        else:
            known[f"{name}.logits"] = torch.where(columns, SURE, -SURE).flatten(1)
    return _asking(search, known, sizes), replace(replay, network=network)


def _asking(search: Search, known: Mapping[str, Tensor], sizes: Mapping[str, tuple[int, float]]) -> Search:
    """Return the search that knows some logits and searches others, in all its phases."""
    unknowns = {name: partial(_drawn, *each) for name, each in sizes.items()}
    move = replace(search.move, outputs={**search.move.outputs, **known}, unknowns={**search.move.unknowns, **unknowns})
    first = None if search.first is None else _asking(search.first, known, sizes)
    return replace(search, move=move, first=first)


def _drawn(size: int, start: float, rows: int, rng: torch.Generator) -> Tensor:
    return start + 0.01 * torch.randn(rows, size, generator=rng)


def _calls(replay: Replay, seen: Observation) -> list[LayerCall]:
    """Return the calls of all layers without children for one client's images, in their order."""
    like = next(iter(seen.updates.values()))
    with record(replay.network) as calls, torch.no_grad():
        replay.network(torch.zeros(replay.batch_size, *seen.shape).to(like))
    return [call for call in calls if call.name and not any(True for _ in call.layer.children())]


def _columns(later: list[LayerCall], seen: Observation, shape: tuple[int, ...]) -> Tensor | None:
    """Return which units (T, ...) the next layer with weights saw, or None if that does not show in its gradient."""
    following = next((call for call in later if f"{call.name}.weight" in seen.updates), None)
    if following is None or not isinstance(following.layer, (nn.Linear, nn.Conv2d)):
        return None
    moved = _moved(seen, f"{following.name}.weight", following.layer.weight.detach())
    if isinstance(following.layer, nn.Linear) and following.layer.in_features == torch.Size(shape).numel():
        return moved.any(1).view(-1, *shape)
    whole = len(shape) == 1 and isinstance(following.layer, nn.Conv2d) and following.layer.groups == 1
    if whole and following.layer.in_channels == shape[0]:
        return moved.flatten(3).any(3).any(1)
    return None


def _moved(seen: Observation, name: str, weight: Tensor) -> Tensor:
    """Return which entries (T, ...) of a weight a gradient moved, not weight decay alone."""
    change = seen.updates[name]
    how = seen.local_steps if seen.knows(Knowledge.LOCAL_STEPS) else None
    if how is None or not how.weight_decay:
        return change.ne(0)
    rounding = 4 * torch.finfo(weight.dtype).eps * weight.abs()
    if how.optimiser == "adamw":  # decay was taken out of the change, up to rounding, which its inversion shrinks
        return change.abs() > how.eps * rounding
    decayed = -seen.lr * how.weight_decay * weight
    if how.is_adam:  # decay is part of the gradient, whose size Adam shows roughly
        return (change - decayed).abs() > ROUGHLY * decayed.abs()
    return (change - decayed).abs() > rounding


def _set(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, layer)
