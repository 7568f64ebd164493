"""Networks on public features: a frozen trunk that is never trained or sent, and a linear head, which is all there is.

A trunk is made from public data alone, so that every site can build it by itself and check its fingerprint. Since its
weights never change, the features of an image never change either: a `FeatureMemo` keeps those of a client's images,
and a round of training costs a matrix product.
"""

import copy
import hashlib
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import ConfigError

BIAS = 0.3
"""The constant last feature of every image, through which the head learns a bias. All others have norm 1 together."""
CHUNK = 16
"""Images whose features are computed together: more do not fit a processor's cache, and bits depend on the number."""


class FeatureMemo:
    """Features of images that a trunk has seen, found by the images' content.

    Attributes:
        keys: one number per image, (N,) int64.
        features: (N, D).
        learns: whether the trunk adds features that it had to compute.
    """

    def __init__(self, keys: Tensor | None = None, features: Tensor | None = None, *, learns: bool = False) -> None:
        self.keys = torch.zeros(0, dtype=torch.int64) if keys is None else keys
        self.features = torch.zeros(0, 0) if features is None else features
        self.learns = learns
        self._rows = {key: row for row, key in enumerate(self.keys.tolist())}

    def find(self, images: Tensor) -> Tensor | None:
        """Return the features of images, (N, D), or None unless those of all of them are known."""
        rows = [self._rows.get(key, -1) for key in image_hashes(images).tolist()]
        if not rows or min(rows) < 0:
            return None
        if rows == list(range(len(self.features))):
            return self.features
        return self.features[torch.tensor(rows, device=self.features.device)]

    def __deepcopy__(self, copied: dict[int, object]) -> "FeatureMemo":
        """Return a memo that shares the features, which never change: a copy of a network costs nothing more."""
        return copy.copy(self)


def image_hashes(images: Tensor) -> Tensor:
    """Return a 64-bit number (N,) per image, the same for the same bits; different images differ by all likelihood."""
    words = images.detach().float().flatten(1).contiguous().view(torch.int32).long()
    factors = torch.randint(
        -(2**62), 2**62, (words.shape[1],), generator=torch.Generator().manual_seed(0), dtype=torch.int64
    )
    mixed = words * (2 * factors + 1).to(words.device)
    return (mixed ^ (mixed >> 29)).sum(1)  # sums wrap around at 64 bits


class Trunk(nn.Module, ABC):
    """The frozen part of a network: maps images to features, made of public data only.

    No training changes its tensors, no message holds them, and it stays in evaluation mode. A subclass implements
    ``features``.

    Attributes:
        fingerprint: a digest of all that the trunk was made from; equal trunks have equal ones.
        memo: features that are already known; None computes all of them.
    """

    fingerprint: str
    memo: FeatureMemo | None = None

    def __init__(self, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self.eval()

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """Return features (N, D - 1) of images (N, C, H, W), each image by itself; `forward` scales them."""

    def forward(self, images: Tensor) -> Tensor:
        """Return features of norm 1 and the constant `BIAS`, (N, D)."""
        memo = None if images.requires_grad else self.memo
        found = None if memo is None else memo.find(images)
        if found is None:
            parts = [self.features(chunk) for chunk in torch.split(images, CHUNK)]
            found = F.pad(F.normalize(torch.cat(parts)), (0, 1), value=BIAS)
            if memo is not None and memo.learns:
                memo.keys, memo.features = image_hashes(images).cpu(), found
        return found

    def train(self, mode: bool = True) -> "Trunk":
        """Stay in evaluation mode."""
        return super().train(False)


class FeatureNetwork(nn.Module):
    """A frozen trunk and a linear head that starts at zero; only the head is trained and sent.

    Attributes:
        takes_pixels: whether the trunk expects images in [0, 1] without a normalisation.
    """

    def __init__(self, trunk: Trunk, width: int, num_classes: int, *, takes_pixels: bool) -> None:
        super().__init__()
        self.trunk, self.takes_pixels = trunk, takes_pixels
        self.head = nn.Linear(width + 1, num_classes, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        logits: Tensor = self.head(self.trunk(images))
        return logits


def trunk_of(network: nn.Module) -> Trunk | None:
    """Return the network's trunk, or None if it has none."""
    return next((module for module in network.modules() if isinstance(module, Trunk)), None)


def frozen_names(network: nn.Module) -> frozenset[str]:
    """Return the names of all parameters and buffers that belong to trunks."""
    trunks = {name: module for name, module in network.named_modules() if isinstance(module, Trunk)}
    return frozenset(f"{name}.{key}" if name else key for name, trunk in trunks.items() for key in trunk.state_dict())


def fingerprint_of(*parts: object) -> str:
    """Return a digest of tensors, by their bytes, and of other things, by their text."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            plain = part.detach().cpu().contiguous()
            digest.update(f"{tuple(plain.shape)} {plain.dtype}\n".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def require_fingerprint(trunk: Trunk, wanted: str) -> None:
    """Raise ConfigError if the trunk is not the one with this fingerprint, or the beginning of one; "" takes any."""
    if not trunk.fingerprint.startswith(wanted.lower()):
        raise ConfigError(
            f"The frozen part of the model must have the fingerprint {wanted!r}, got {trunk.fingerprint!r}: it was "
            "made from other public pictures, weights or settings. Use the same ones, or correct sha256=."
        )


def learn_features(network: nn.Module, trunk: Trunk, images: Tensor) -> FeatureMemo:
    """Return the features that a network's trunk has of images, computed in chunks, so that bits are always the same.

    Keys are those of what the trunk gets, after the network has normalised the images.
    """
    parts = []
    for chunk in torch.split(images, CHUNK):
        trunk.memo = FeatureMemo(learns=True)
        with torch.no_grad():
            network(chunk)
        parts.append(trunk.memo)
        trunk.memo = None
    keys, features = ([getattr(part, name) for part in parts] for name in ("keys", "features"))
    return FeatureMemo(torch.cat(keys), torch.cat(features)) if parts else FeatureMemo()
