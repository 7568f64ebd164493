"""Store what the server of an NVFlare job sees, as files that ``gradveil attack`` and ``gradveil diagnose`` take.

``out`` gets a folder per round: ``round-1/model.safetensors`` is what the sites received, ``round-1/SITE.safetensors``
what changed, and ``round-1/SITE.toml`` the specification, whose first lines are the command to type.
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from gradveil.engines.nvflare_filters import as_tensor
from gradveil.errors import ConfigError, MessageError
from gradveil.runs.update_spec import make_spec
from gradveil.seal import sealed
from gradveil.storage import to_safetensors, write_atomic
from gradveil.validate import in_range

from nvflare.apis.dxo import DXO, DataKind  # isort: skip - nvflare_filters says if it is missing
from nvflare.apis.dxo_filter import DXOFilter  # isort: skip
from nvflare.apis.filter import FilterChainType, FilterContextKey  # isort: skip
from nvflare.apis.fl_context import FLContext  # isort: skip
from nvflare.apis.shareable import Shareable  # isort: skip

LOG = logging.getLogger("gradveil")
_lock = threading.Lock()
_sent: dict[str, dict[str, Tensor]] = {}
_rounds: Counter[tuple[str, str]] = Counter()
_bytes: Counter[str] = Counter()


class NvflareTap(DXOFilter):  # type: ignore[misc]  # NVFlare has no types
    """Filter of the server that stores each site's updates and changes nothing.

    Put it among the filters of task data (direction out) and of task results (direction in), with the same ``out``. A
    problem of the tap, such as a full disk, is logged and ends no training.

    Args:
        out: folder for the files of one job.
        model: a model of the zoo, or your own file.py:factory.
        shape: (C, H, W) of an image.
        num_classes: number of classes of the task.
        lr: the clients' learning rate.
        known: other keys of a specification, see docs/attack.md.
        rounds: number of rounds to store.
        max_bytes: stop storing before the files are larger than this together.
    """

    def __init__(
        self,
        out: str,
        model: str,
        shape: list[int],
        num_classes: int,
        lr: float,
        known: Mapping[str, Any] | None = None,
        rounds: int = 10,
        max_bytes: int = 2**30,
    ) -> None:
        super().__init__([str(DataKind.WEIGHTS.value), str(DataKind.WEIGHT_DIFF.value)], None)
        in_range("max_bytes", max_bytes, 1)
        # NVFlare writes a job from the attributes that have the names of arguments
        self.out, self.model, self.shape, self.num_classes = out, model, list(shape), num_classes
        self.lr, self.known, self.rounds, self.max_bytes = lr, dict(known or {}), rounds, max_bytes
        make_spec(self._facts(), "the tap's specification")

    def _facts(self) -> dict[str, Any]:
        named = {"model": self.model, "shape": self.shape, "num_classes": self.num_classes, "lr": self.lr}
        return {**named, "kind": "change", **self.known}

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Remember what is sent, or store what came; the message itself stays as it is."""
        try:
            with _lock:
                if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
                    _sent[self.out] = _tensors(dxo)
                else:
                    self._store(dxo, _site(fl_ctx))
        except Exception as error:  # a tap must not stop a training
            LOG.warning("The tap left out a message: %s", error)

    def _store(self, dxo: DXO, site: str) -> None:
        """Write one result: the model if this round has not written it before, the update, the specification."""
        owner = self.out
        _rounds[owner, site] += 1
        number = _rounds[owner, site]
        if number > self.rounds:
            return
        if owner not in _sent:
            raise MessageError("what was sent is not known; put the tap among the task_data_filters too.")
        sent, got = _sent[owner], _tensors(dxo)
        if dxo.data_kind == DataKind.WEIGHTS:
            got = {name: tensor - sent[name] for name, tensor in got.items() if tensor.is_floating_point()}
        folder = Path(self.out).expanduser().absolute() / f"round-{number}"
        files = {folder / f"{site}.safetensors": sealed(to_safetensors(got)), folder / f"{site}.toml": self._spec(site)}
        if not (folder / "model.safetensors").exists():
            files[folder / "model.safetensors"] = sealed(to_safetensors(sent))
        size = sum(map(len, files.values()))
        if _bytes[owner] + size > self.max_bytes:
            raise ConfigError("max_bytes is reached. Raise it to store more.")
        _bytes[owner] += size
        for path, content in files.items():
            write_atomic(path, content, mode=0o600)

    def _spec(self, site: str) -> bytes:
        trust = " --trust-code" if ".py:" in self.model else ""
        command = f"gradveil attack --model-file model.safetensors --update {site}.safetensors --spec {site}.toml"
        head = f"# What the server saw of {site}. In this folder, try:\n# {command} --attack gs{trust}\n"
        return (head + tomli_w.dumps(self._facts())).encode()


def _site(fl_ctx: FLContext) -> str:
    """Return the name of the site that a result is from, as part of a file name."""
    peer = fl_ctx.get_peer_context()
    name = str(peer.get_identity_name()) if peer is not None else "unknown"
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:100]


def _tensors(dxo: DXO) -> dict[str, Tensor]:
    return {name: as_tensor(value, name).clone() for name, value in dxo.data.items()}
