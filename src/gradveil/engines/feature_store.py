"""Features of frozen trunks, computed once per client and kept in its private folder."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.errors import DataError
from gradveil.models.trunk import FeatureMemo, image_hashes, learn_features, trunk_of
from gradveil.storage import PrivateFolder

MOST_BYTES = 2**30
"""Features that a process keeps in memory; those of other clients are read from their folders again."""
_FILE = "features"


class _Entry(NamedTuple):
    """Features, and what they were made from: a number per image, and the trunk's fingerprint."""

    made_from: Tensor
    memo: FeatureMemo


class FeatureStore:
    """The features of a network's trunk that a process has at hand; does nothing for a network without a trunk."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self._trunk = network, trunk_of(network)
        self._kept: OrderedDict[str, _Entry] = OrderedDict()

    def use(self, name: str, images: Tensor, folder: PrivateFolder | None = None) -> None:
        """Let the network use the features of these images until `released` ends.

        They come from memory, from a client's ``folder``, or are computed and saved there. The file is written
        atomically with mode 0600; one that is damaged, or was made from other images or by another trunk, is replaced.
        """
        if self._trunk is None:
            return
        made_from = torch.cat([image_hashes(images).cpu(), _as_numbers(self._trunk.fingerprint)])
        entry = self._kept.get(name)
        if entry is None or not torch.equal(entry.made_from, made_from):
            memo = None if folder is None else _load(folder, made_from, images.device)
            entry = _Entry(made_from, memo or learn_features(self._network, self._trunk, images))
            if memo is None and folder is not None:
                kept = {"features": entry.memo.features, "keys": entry.memo.keys, "made_from": made_from}
                folder.save(_FILE, kept)
        self._keep(name, entry)
        self._trunk.memo = entry.memo

    def recall(self, name: str) -> None:
        """Let the network use features that are in memory, if they are; the images are looked up by their content."""
        if self._trunk is not None and name in self._kept:
            self._trunk.memo = self._kept[name].memo

    @contextmanager
    def released(self) -> Iterator[None]:
        """Take all features from the network again at the end of a ``with`` block."""
        try:
            yield
        finally:
            if self._trunk is not None:
                self._trunk.memo = None

    def _keep(self, name: str, entry: _Entry) -> None:
        self._kept[name] = entry
        self._kept.move_to_end(name)
        while len(self._kept) > 1 and sum(one.memo.features.nbytes for one in self._kept.values()) > MOST_BYTES:
            self._kept.popitem(last=False)


def _load(folder: PrivateFolder, made_from: Tensor, device: torch.device) -> FeatureMemo | None:
    """Return the features in a client's folder, or None if they are not of these images by this trunk."""
    with suppress(DataError, KeyError):
        kept = folder.load(_FILE)
        if kept is not None and torch.equal(kept["made_from"], made_from):
            return FeatureMemo(kept["keys"], kept["features"].to(device))
    return None


def _as_numbers(fingerprint: str) -> Tensor:
    return torch.tensor([int(fingerprint[start : start + 15], 16) for start in range(0, 60, 15)])
