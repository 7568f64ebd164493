"""The images of one client of somebody's own app, read once from a DataLoader or from tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.data import Split
from gradveil.data.federated import FederatedData
from gradveil.errors import ConfigError, DataError

Pairs = Iterable[Any] | tuple[Tensor, Tensor]
"""Batches (images, labels), or all images and labels at once."""


def one_client(loader: Pairs, sensitive: Tensor | None, aux: Pairs | None, client: int, clients: int) -> FederatedData:
    """Return the data of one client, under its number."""
    if client >= clients:
        raise ConfigError(f"client must be below the number of clients ({clients}), got {client}. Raise clients=.")
    train = _read(loader)
    marks = np.zeros(len(train), bool) if sensitive is None else torch.as_tensor(sensitive).bool().cpu().numpy()
    if marks.shape != (len(train),):
        raise DataError(f"sensitive must say yes or no for each of {len(train)} images, got shape {marks.shape}.")
    offsets = np.where(np.arange(clients + 1) > client, len(train), 0)
    nothing = Split(train.images[:0], train.labels[:0])
    return FederatedData(train, nothing, np.arange(len(train)), offsets, marks, None if aux is None else _read(aux))


def _read(loader: Pairs) -> Split:
    """Return all images and labels of a loader, or of a pair of tensors."""
    pairs: list[Any] = [loader] if _is_pair(loader) else [_pair(batch) for batch in loader]
    if not pairs or not all(_is_pair(pair) for pair in pairs):
        raise DataError("The loader must give batches (images, labels), got none or others. Pass a DataLoader.")
    images = torch.cat([torch.as_tensor(pair[0]) for pair in pairs]).cpu()
    labels = torch.cat([torch.as_tensor(pair[1]).flatten() for pair in pairs]).long().cpu()
    if images.dim() != 4 or len(images) != len(labels):
        raise DataError(
            f"The loader must give images (N, C, H, W) with a label each, got {tuple(images.shape)} and {len(labels)}."
        )
    return Split(images.numpy() if images.dtype == torch.uint8 else images.float().numpy(), labels.numpy())


def _pair(batch: object) -> object:
    """Return the images and labels of a batch; data sets of Flower give them by name."""
    if isinstance(batch, Mapping):
        images = [batch[key] for key in ("images", "image", "img") if key in batch]
        labels = [batch[key] for key in ("labels", "label") if key in batch]
        return (images[0], labels[0]) if images and labels else batch
    return batch


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(hasattr(part, "shape") for part in value)
