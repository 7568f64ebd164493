"""LODA: train on images that look different from the client's own and have similar features."""

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.defences.base import Client, Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import ConfigError, DefenceError
from gradveil.models.base import Normalisation, create_model, normalisation_of
from gradveil.models.weights import load_weights
from gradveil.networks.features import Features, chosen_layers
from gradveil.storage import PrivateFolder
from gradveil.types import Batch
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class Loda(Defence):
    r"""Replace a client's images, once before training, by images with similar features and very different pixels.

    .. math:: \mathcal E(x^*) = \arg\min_{x' \in [0,1]^D} \|g(x') - g(x^*)\|_2^2 - c\,\|x' - x^*\|_2^2

    by normalised gradient descent from a random public image, :math:`x' \leftarrow \mathrm{clip}(x' - \tau \nabla /
    \|\nabla\|)`. The features g are the outputs of chosen layers of a network that was trained on public data. Labels
    do not change.

    Images are obscured in batches. In training, each finished batch is saved in the client's private folder, under a
    hash of all inputs and settings, so that an interrupted run continues with the next batch.

    Threat model: an honest-but-curious server that takes the image it inverts from an update for a private one.
    Does not protect: information that g keeps, which training needs; or images against a server that knows g, inverts
        the obscured image, and searches for the private image that it was made from (the decoder ``stationarity``).
    Guarantee: none.
    Reference: Wan et al. 2022, https://arxiv.org/abs/2206.00769, Eq. 4 and Algorithm 1. LODA_1 is
        ``layers=first-5,c=20``, LODA_2 ``layers=all,c=30``, LODA_3 (SVHN) ``layers=last-5,c=1``, with a resnet18 that
        was trained on CIFAR-100 (for SVHN on its extra images).
    Differs from the paper: by default, squared distances are means over each layer's features and over pixels; the
        equation has sums. The effect of c depends on the extractor: with a resnet20 trained on normalised CIFAR-10,
        c = 20 changes the image little (20 dB with means, 30 dB with sums), and the paper's 5.8 dB take c = 100
        (docs/results/notes-loda.md). Measure the effect before you trust a value of c.

    Attributes:
        extractor: the network that computes g: a model name with its settings separated by ``;``
            (``resnet20:width=8;shortcut=B``), your own ``file.py:factory``, or ``model``, which is the trained network
            itself as the client first received it.
        weights: safetensors file with the extractor's weights, trained on public data; required unless the extractor is
            ``model``, or a ``file.py:factory`` that loads its own weights.
        classes: number of classes of the extractor; 0 is the number of classes of the task.
        mean: per-channel mean by which the extractor's input is normalised; if empty, that of the client's network.
        std: per-channel standard deviation for the same, with as many numbers as ``mean``.
        layers: layers whose outputs are g: ``first-5`` (the first five convolutions), ``all`` (all convolutions),
            ``last-5`` (the last five convolutions and all linear layers), or names joined by ``/``.
        c: weight of the distance between pixels.
        steps: number of steps of gradient descent.
        lr: length of each step, τ.
        mean_squares: whether squared distances are means over each layer's features and over pixels, not sums.
        start: where the descent begins: ``public`` images (``--aux``), or uniform ``noise``.
        together: number of images that are obscured in one batch.
    """

    uses_aux: ClassVar[bool] = True
    aux_labels: ClassVar[bool] = False
    hides_images: ClassVar[bool] = True

    extractor: str = "model"
    weights: str = ""
    classes: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layers: str = "first-5"
    c: float = 20.0
    steps: int = 500
    lr: float = 0.1
    mean_squares: bool = True
    start: str = "public"
    together: int = 16

    def __post_init__(self) -> None:
        own = ".py:" in self.extractor
        if self.extractor != "model" and not self.weights and not own:
            raise ConfigError(
                f"extractor={self.extractor} needs weights trained on public data, got none. Give weights=FILE."
            )
        if self.extractor == "model" and self.weights:
            raise ConfigError(f"weights must come with an extractor, got {self.weights!r} alone. Give extractor=MODEL.")
        if self.weights and not Path(self.weights).expanduser().is_file():
            raise ConfigError(
                f"weights must be a safetensors file that exists, got {self.weights!r}. Give its path: weights=FILE."
            )
        if len(self.mean) != len(self.std):
            raise ConfigError(
                f"mean and std must have the same number of values, got {len(self.mean)} and {len(self.std)}. "
                "Give one value per channel for each, or leave out both."
            )
        for number in self.std:
            in_range("std", number, 0, open_low=True)
        counted = self.layers.startswith(("first-", "last-"))
        if not self.layers or (counted and not re.search(r"-[1-9]\d*$", self.layers)):
            raise ConfigError(
                f"layers must be first-N, last-N, all or names joined by '/', got {self.layers!r}. Try layers=first-5."
            )
        in_range("classes", self.classes, 0)
        in_range("c", self.c, 0)
        in_range("steps", self.steps, 1)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("together", self.together, 1)
        one_of("start", self.start, ["public", "noise"])
        object.__setattr__(self, "needs_aux", self.start == "public")

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` unless the extractor loads, accepts images of this shape, and has the layers."""
        self.features(network, shape)

    def on_data(self, data: Batch, client: Client) -> Batch:
        """Obscure all images, batch by batch; batches saved by an interrupted run are loaded."""
        images = data.images
        self.require_pixels(images)
        channels, height, width = images.shape[1:]
        features = self.features(client.model, (channels, height, width))
        begun = self._starts(images, client)
        key = self._key(features, images, begun)
        parts = []
        for start in range(0, len(images), self.together):
            some = slice(start, start + self.together)
            name = f"loda-{key}-{start:06d}"
            kept = client.folder.load(name) if client.folder is not None else None
            if kept is None:
                kept = {"images": self.obscured(features, images[some], begun[some])}
                if client.folder is not None:
                    client.folder.save(name, kept)
            parts.append(kept["images"].to(images))
        if client.folder is not None:
            _drop_others(client.folder, key)
        return replace(data, images=torch.cat(parts))

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return three ways to search for the private image behind an inverted, obscured image."""
        return {
            "learned": Countermove(decode=("stationarity:way=learned,search=24",)),
            "stationarity": Countermove(decode=("stationarity",)),
            "features": Countermove(decode=("stationarity:way=features",)),
        }

    def features(self, model: nn.Module, shape: tuple[int, int, int]) -> Features:
        """Return g for images of a shape (C, H, W); ``model`` is the network that clients train."""
        parameter = next(model.parameters())
        if self.extractor == "model":
            network = copy.deepcopy(model)
        else:
            with torch.no_grad():
                classes = self.classes or _outputs(model, shape)
            own = Normalisation(self.mean, self.std) if self.mean else normalisation_of(model)
            network = create_model(self.extractor.replace(";", ","), shape, classes, 0, own)
            if self.weights:
                load_weights(network, Path(self.weights).expanduser())
        network = network.to(parameter).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Features(network, chosen_layers(network, shape, self.layers), shape)

    def obscured(self, features: Features, images: Tensor, begun: Tensor) -> Tensor:
        """Run Algorithm 1 for images (N, C, H, W) together, starting from the images ``begun``."""
        images, begun = (
            some.contiguous(memory_format=torch.channels_last) for some in (images, begun)
        )  # takes half the time in this memory format
        with torch.no_grad():
            wanted = features(images)
        away = 2 * self.c / (images[0].numel() if self.mean_squares else 1)  # factor of the pixel difference
        found = begun.detach()
        for _ in range(self.steps):
            slope = features.slope(found, wanted, mean=self.mean_squares)
            slope = slope.sub_(found - images, alpha=away)
            length = slope.flatten(1).norm(dim=1).clamp_min(torch.finfo(slope.dtype).tiny).view(-1, 1, 1, 1)
            found = (found - self.lr * slope / length).clamp_(0, 1)
        if not bool(found.isfinite().all()):
            raise DefenceError("Defence 'loda' found no finite image. Check the extractor's weights, or lower lr or c.")
        return found

    def objective(self, features: Features, obscured: Tensor, images: Tensor, wanted: Sequence[Tensor]) -> Tensor:
        """Return the objective of Eq. 4 (N,); ``wanted`` are the features of the private images."""
        apart = (obscured - images).square().flatten(1)
        far = apart.mean(1) if self.mean_squares else apart.sum(1)
        return features.distance(obscured, wanted, mean=self.mean_squares) - self.c * far

    def _starts(self, images: Tensor, client: Client) -> Tensor:
        """Return the image where each image's descent begins."""
        if self.start == "noise":
            return client.rng.uniform(images.shape).to(images)
        public = client.aux
        if public is None or not len(public) or public.images.shape[1:] != images.shape[1:]:
            there = "none" if public is None or not len(public) else f"some of {tuple(public.images.shape[1:])}"
            raise DefenceError(
                f"Defence 'loda' starts from public images of shape {tuple(images.shape[1:])}, got {there}. "
                "Choose other public images (--aux), or set start=noise."
            )
        self.require_pixels(public.images)
        chosen = client.rng.integers(0, len(public), (len(images),))
        return public.images[chosen.to(public.images.device)].to(images)

    def _key(self, features: Features, images: Tensor, begun: Tensor) -> str:
        """Return a hash of all that determines the result; features of one image stand for the extractor's code."""
        settings = replace(self, weights="", extractor="model").spec
        with torch.no_grad():
            tensors = [images, begun, *features(images[:1]), *features.network.state_dict().values()]
        return _digest([settings.encode(), "/".join(features.names).encode(), *(map(_bytes, tensors))])


def _outputs(model: nn.Module, shape: tuple[int, int, int]) -> int:
    network = copy.deepcopy(model).eval()
    return int(network(torch.zeros(1, *shape).to(next(network.parameters()))).shape[1])


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=12)
    for part in parts:
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def _drop_others(folder: PrivateFolder, key: str) -> None:
    """Remove batches that were saved with other settings."""
    for path in folder.path.glob("loda-*.safetensors"):
        if not path.name.startswith(f"loda-{key}-"):
            path.unlink(missing_ok=True)
