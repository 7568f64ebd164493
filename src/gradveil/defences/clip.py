"""Clipping the norm of the update."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradveil.defences.base import Perturbation
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.secret_stream import SecretStream
from gradveil.types import Tensors
from gradveil.validate import in_range

_TINY = 1e-24


@dataclass(frozen=True)
class Clip(Perturbation):
    r"""Scale the whole update down to an L2 norm of at most ``norm``.

    .. math:: \tilde u = u \cdot \min(1, C / \|u\|_2)

    The norm is that of all tensors together. A zero update stays zero. BatchNorm's running statistics
    (``Update.buffers``) are sent unchanged.

    Threat model: an honest-but-curious server that sees individual updates.
    Does not protect: against an attack whose distance ignores scale (cosine), or one that clips the gradient of its
        guess in the same way: the direction of the update is sent unchanged.
    Guarantee: none; clipping bounds how much one client can change the model, but without noise it hides nothing.
    Reference: Li et al. 2022 (GGL), https://arxiv.org/abs/2203.15696, with a bound of 4; Geyer et al. 2017,
        https://arxiv.org/abs/1712.07557.
    Differs from the paper: clips the update of a round by default; GGL clips gradients, which is ``where=gradient``.

    Attributes:
        where: ``update`` clips the update once per round; ``gradient`` clips the gradient of every local step.
        norm: the bound C.
    """

    norm: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("norm", self.norm, 0, open_low=True)

    def perturb(self, tensors: Tensors, rng: SecretStream) -> dict[str, Tensor]:
        """Scale all tensors by the same factor; ``rng`` is not used."""
        squares = [tensor.double().square().sum() for tensor in tensors.values()]
        excess = (torch.stack(squares or [torch.zeros(())]).sum().sqrt() / self.norm).clamp(min=1.0)
        return {name: _divided(tensor, excess) for name, tensor in tensors.items()}

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``again``, which clips the guess as the client does, and ``scale``, which gives it the seen norm."""
        bound = self.norm / max(sum(arrived.steps), 1e-12) if self.where == "update" else self.norm
        return {"again": Countermove(partial(clip_rows, bound=bound)), "scale": Countermove(_same_norm)}


def _divided(tensor: Tensor, divisor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) / divisor.to(wide)).to(tensor.dtype)


def row_norms(tensors: Tensors) -> Tensor:
    """Return the norms (T,) of T gradients, given as (T, ...) by name; never zero, so that derivatives stay finite."""
    squares = [tensor.reshape(len(tensor), -1).square().sum(1) for tensor in tensors.values() if tensor.numel()]
    return torch.stack(squares).sum(0).clamp(min=_TINY).sqrt()


def scale_rows(tensors: Tensors, factors: Tensor) -> dict[str, Tensor]:
    """Multiply each of T gradients by its own factor; ``factors`` is (T,)."""
    return {name: tensor * factors.view(-1, *[1] * (tensor.dim() - 1)) for name, tensor in tensors.items()}


def clip_rows(guess: Tensors, seen: Tensors, *, bound: float) -> dict[str, Tensor]:
    """Scale each of T gradients down to a norm of at most ``bound``; ``seen`` is not used.

    Example:
        >>> clip_rows({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, {}, bound=1.0)["w"]
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    return scale_rows(guess, 1 / (row_norms(guess) / bound).clamp(min=1.0))


def _same_norm(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    return scale_rows(guess, row_norms(seen).detach() / row_norms(guess))
