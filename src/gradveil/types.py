"""The values that gradveil passes around: frozen, with no logic but algebra."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by name, as in a state dict: a gradient, the change of a model, a client's private state."""


@dataclass(frozen=True)
class Batch:
    """Images with their labels.

    Attributes:
        images: (N, C, H, W), floating point in [0, 1].
        labels: (N,) class indices, or (N, classes) probabilities (soft labels).
        sensitive: (N,) bool: the images whose owner asked for special care.
    """

    images: Tensor
    labels: Tensor
    sensitive: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Tensor | slice) -> "Batch":
        return Batch(self.images[index], self.labels[index], self.sensitive[index])

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch on another device."""
        return Batch(self.images.to(device), self.labels.to(device), self.sensitive.to(device))


@dataclass(frozen=True)
class Update:
    """What a client sends: the CHANGE of the model, by parameter name. Updates form a vector space.

    Attributes:
        tensors: change of each shared parameter.
        num_examples: number of images it was computed from.
        buffers: change of each shared floating-point buffer (BatchNorm's running statistics).

    Example:
        >>> one = Update({"w": torch.ones(2)}, num_examples=5)
        >>> (one + one * 3).tensors["w"]
        tensor([4., 4.])
    """

    tensors: Tensors
    num_examples: int
    buffers: Tensors = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Update":
        """Apply a function to each parameter's tensor; buffers are unchanged."""
        return replace(self, tensors={name: change(tensor) for name, tensor in self.tensors.items()})

    def norm(self) -> Tensor:
        """Return the Euclidean norm of the changes of all parameters together (0-d)."""
        return (
            torch.stack([tensor.double().square().sum() for tensor in self.tensors.values()] or [torch.zeros(())])
            .sum()
            .sqrt()
        )

    def sha256(self) -> str:
        """Return a digest of all tensors: their names, shapes, types and bytes, in the order of the names.

        Example:
            >>> one = Update({"w": torch.ones(2)}, num_examples=5)
            >>> one.sha256() == (one * 1.0).sha256(), one.sha256() == (one * 2.0).sha256()
            (True, False)
        """
        digest = hashlib.sha256()
        for kind, tensors in (("tensor", self.tensors), ("buffer", self.buffers)):
            for name, tensor in sorted(tensors.items()):
                plain = tensor.detach().cpu().contiguous()
                digest.update(f"{kind} {name} {tuple(plain.shape)} {plain.dtype}\n".encode())
                digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __add__(self, other: "Update") -> "Update":
        return Update(
            {name: tensor + other.tensors[name] for name, tensor in self.tensors.items()},
            self.num_examples + other.num_examples,
            {name: tensor + other.buffers[name] for name, tensor in self.buffers.items()},
        )

    def __mul__(self, factor: float) -> "Update":
        return Update(
            {name: tensor * factor for name, tensor in self.tensors.items()},
            self.num_examples,
            {name: tensor * factor for name, tensor in self.buffers.items()},
        )

    def __sub__(self, other: "Update") -> "Update":
        return replace(self + other * -1.0, num_examples=self.num_examples)
