"""Filters for NVFlare: a site protects what its jobs send, by its own ``privacy.json``, which no job can switch off.

`Remember` stands among the filters of task data and keeps the model that the server sent. `Protect` stands among the
filters of task results and applies a defence to the change of the weights. It fails closed: results that it can't
protect raise, and NVFlare then sends an error code without data. Results that are no weights pass only if they are a
few numbers, such as metrics. With a private folder, it answers each round of a job once, so that nobody averages the
noise of several answers.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradveil.defences import build_defence
from gradveil.engines.answered import answer_once
from gradveil.engines.update_protection import (
    MOST_METRICS,
    ProtectionPlace,
    change_of,
    others_than_update,
    protected_update,
    split_statistics,
)
from gradveil.errors import ConfigError, DefenceError
from gradveil.storage import PrivateFolder
from gradveil.types import Tensors, Update
from gradveil.validate import one_of

try:
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable, make_reply
except ImportError as error:
    raise ImportError("These filters need NVFlare. Run `pip install 'gradveil[nvflare]'`.") from error

LOG = logging.getLogger("gradveil")
WEIGHTS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
_PARTS = ("DXO", "__headers__")
"""Keys of a result that holds one DXO and nothing else."""
_COUNTER = "num_batches_tracked"
"""BatchNorm's count of batches, which depends on no image."""
_ROUND = "current_round"
"""Where NVFlare's workflows state the round, in the header of a task or the facts about its weights; from 0."""
_received: dict[tuple[str, str], tuple[dict[str, Tensor], int | None]] = {}
_lock = threading.Lock()


def owner_of(fl_ctx: FLContext) -> tuple[str, str]:
    """Return the job and the site that a filter works for; a simulator runs many sites in one process."""
    return str(fl_ctx.get_job_id()), str(fl_ctx.get_identity_name())


class Remember(DXOFilter):  # type: ignore[misc]  # NVFlare has no types
    """Filter of task data (direction in): keeps the received model and its round, for `Protect`."""

    def __init__(self) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHTS], data_kinds_to_filter=None)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Keep the weights of a task; the task itself stays as it is."""
        with _lock:
            weights = {name: as_tensor(value, name).clone() for name, value in dxo.data.items()}
            _received[owner_of(fl_ctx)] = weights, _stated(shareable, dxo)


class Protect(DXOFilter):  # type: ignore[misc]  # NVFlare has no types
    """Filter of task results (direction out): applies a defence to each update.

    Args:
        defence: a defence that works on updates alone: clip, gaussian, laplace, prune, quantise, your own, or a chain.
        folder: private folder for a defence that keeps state, and for the last round that was answered: with it, a
            round that was answered before, or a task without a round, is not answered.
        statistics: what happens to running statistics of BatchNorm, which no defence here covers: ``refuse`` sends
            nothing if training changed them, ``received`` sends back those of the server, ``send`` sends the new ones.

    Raises:
        ConfigError: the defence needs more than updates, or protects no updates at all.
    """

    def __init__(self, defence: str, folder: str = "", statistics: str = "refuse") -> None:
        super().__init__(supported_data_kinds=[str(kind.value) for kind in WEIGHTS], data_kinds_to_filter=None)
        # NVFlare writes a job from the attributes that have the names of arguments
        self.defence, self.folder, self.statistics, self._built = defence, folder, statistics, build_defence(defence)
        one_of("statistics", statistics, ["refuse", "received", "send"])
        others = others_than_update(self._built)
        if others or not self._built.overrides("on_update"):
            lack = f"which also needs {', '.join(others)}" if others else "which would send updates as they are"
            raise ConfigError(
                f"A filter takes a defence that works on updates alone, got {defence!r}, {lack}. Choose another one, "
                "such as gaussian:std=0.01, or train with gradveil's own hooks."
            )

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a result with protected weights. Raise if it holds anything that can't be protected."""
        if shareable.get_return_code() != ReturnCode.OK:
            return make_reply(shareable.get_return_code())  # an error needs no data
        others = sorted(str(key) for key in shareable if key not in _PARTS)
        if others:
            raise DefenceError(f"A result must hold one DXO and nothing else, got {', '.join(others)}.")
        dxo = from_shareable(shareable)
        numbers = _count(dxo.meta) + (0 if dxo.data_kind in WEIGHTS else _count(dxo.data))
        if dxo.data_kind not in (*WEIGHTS, DataKind.METRICS) or numbers > MOST_METRICS:
            raise DefenceError(
                f"A result must be weights, or at most {MOST_METRICS} numbers, got {dxo.data_kind} with {numbers}. "
                "Nothing else is protected."
            )
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Return weights, or their change, after the defence."""
        given = {name: as_tensor(value, name) for name, value in dxo.data.items()}
        with _lock:
            received, asked = _received.get(owner_of(fl_ctx), ({}, None))
        whole, counted = dxo.data_kind == DataKind.WEIGHTS, _steps(dxo)
        if whole and not received:
            raise DefenceError(
                "Weights are protected by their difference to the received model, which is not known. Put "
                "gradveil.nvflare.Remember among the task_data_filters, direction in."
            )
        update = (
            change_of(received, given, counted, self.statistics)
            if whole
            else split_statistics(_floating(given), counted, self.statistics)
        )
        told = _stated(shareable, dxo) if asked is None else asked  # what the server stated counts
        safe = self._protected(update, received, told, fl_ctx)
        moved = {**safe.tensors, **safe.buffers}
        sent = {name: received[name] + moved[name] if whole else moved[name] for name in moved}
        data = {name: _like(sent.get(name, given[name]), value) for name, value in dxo.data.items()}
        return DXO(dxo.data_kind, data, dxo.meta)

    def _protected(self, update: Update, start: Tensors, told: int | None, fl_ctx: FLContext) -> Update:
        number, folder = 1 if told is None else told + 1, None  # NVFlare counts from 0
        if self.folder:
            place = Path(self.folder).joinpath(*owner_of(fl_ctx))
            if told is None:
                raise DefenceError(
                    "A site with a folder answers each round once and needs to know the round, got a task without one. "
                    "Choose a workflow that states current_round, or leave out the filter's folder."
                )
            answer_once(place / "answered", number)
            folder = PrivateFolder(place / "private")
        name_one = 'Name one among the filter\'s args: "folder": "/srv/gradveil".'
        return protected_update(self._built, update, start, ProtectionPlace(0, number, folder, name_one))


def _stated(shareable: Shareable, dxo: DXO) -> int | None:
    """Return the round that a task or a result states, or None."""
    for told in (shareable.get_header(_ROUND), dxo.get_meta_prop(MetaKey.CURRENT_ROUND)):
        if isinstance(told, int) and not isinstance(told, bool) and told >= 0:
            return told
    return None


def as_tensor(value: object, name: str) -> Tensor:
    """Return an array of a DXO as a tensor."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.asarray(value).copy())
    raise DefenceError(f"Weights must be arrays or tensors, got {type(value).__name__} as {name!r}.")


def _like(tensor: Tensor, value: object) -> Tensor | np.ndarray:
    return tensor if isinstance(value, Tensor) else tensor.numpy()


def _floating(given: Tensors) -> dict[str, Tensor]:
    """Return a change of weights without integers, which must not have changed."""
    moved = [name for name, t in given.items() if not t.is_floating_point() and name.rpartition(".")[2] != _COUNTER]
    if any(bool(given[name].ne(0).any()) for name in moved):
        raise DefenceError(f"Integers can't be protected, got a change of {moved[0]!r}. Leave them out.")
    return {name: tensor for name, tensor in given.items() if tensor.is_floating_point()}


def _steps(dxo: DXO) -> int:
    """Return the weight that a result states for its average, or 0."""
    stated = dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, 0)
    return int(stated) if isinstance(stated, int | float) else 0


def _count(value: object) -> int:
    """Return how many numbers a value of a DXO holds; a text counts by its length."""
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    if isinstance(value, list | tuple | set):
        return sum(map(_count, value))
    if isinstance(value, str | bytes):
        return len(value) // 8
    if isinstance(value, Tensor):
        return value.numel()
    return value.size if isinstance(value, np.ndarray) else 1
