"""Sketches: updates of any size as vectors of a fixed length, by a random sparse projection."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.randomness import stream


def sketched(tensors: Mapping[str, Tensor], width: int, seed: int) -> dict[str, Tensor]:
    r"""Return each tensor (N, ...) as (N, places): its entries, or, if all together exceed ``width``, a sketch.

    Each entry is added, with a random sign, to one random place of its tensor (a count sketch), so that inner products
    are kept in expectation: :math:`E \langle s(u), s(v) \rangle = \langle u, v \rangle`. Each tensor has its share of
    the ``width`` places, at least one. Equal seeds give equal projections.

    Example:
        >>> tensors = {"w": torch.ones(2, 3, 4)}
        >>> sketched(tensors, 100, seed=0)["w"].shape, sketched(tensors, 5, seed=0)["w"].shape
        (torch.Size([2, 12]), torch.Size([2, 5]))
    """
    flat = {name: tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for name, tensor in tensors.items()}
    whole = sum(rows.shape[1] for rows in flat.values())
    if whole <= width:
        return flat
    return {
        name: _folded(rows, max(1, round(width * rows.shape[1] / whole)), stream(seed, "sketch", name))
        for name, rows in flat.items()
    }


def _folded(rows: Tensor, places: int, rng: torch.Generator) -> Tensor:
    entries = rows.shape[1]
    where = torch.randint(places, (entries,), generator=rng).to(rows.device)
    signs = torch.randint(2, (entries,), generator=rng).to(rows) * 2 - 1
    return rows.new_zeros(len(rows), places).index_add_(1, where, rows * signs)
