"""CPA, the cocktail party attack: independent components of a Linear layer's gradient are the images of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.analytic import exact_remark
from gradveil.attacks.parts.attacked_layer import AttackedLayer, attacked_layer
from gradveil.attacks.parts.cocktail import published
from gradveil.attacks.parts.completion import completed
from gradveil.attacks.parts.components import unmix
from gradveil.attacks.parts.exact_batches import by_span, factors, spans, unexplained
from gradveil.attacks.parts.feature_inversion import FeatureSearch
from gradveil.attacks.whole_batches import Layers, WholeBatches
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.progress import part
from gradveil.threat import Observation, Reconstruction
from gradveil.validate import in_range, one_of

WAYS = ("sparse", "published")
EXACT = 1e-3
"""Relative distance of the gradient up to which a batch counts as recovered."""
_RESTARTS = 1024
"""Random starts of the search for features in the span of the next layer's gradient."""
_FEATURE_LR, _FEATURE_TV = 0.1, 0.3
"""Adam's learning rate and the weight of total variation in the search for images that have given features.

Chosen on training images of mnist-5k and CIFAR-10 behind lenet5.
"""


class Inputs(NamedTuple):
    """The recovered inputs of the layer for one target.

    Attributes:
        values: (k, D); pixels are in the range of images.
        sure: how many are surely right.
        loss: relative distance of the gradient from one that they cause.
    """

    values: Tensor
    sure: int
    loss: float


class Pictures(NamedTuple):
    """The images (k, C, H, W) of one target, the attack's own loss, and whether that says that all is recovered."""

    images: Tensor
    loss: float
    recovered: bool


@dataclass(frozen=True)
class Cpa(WholeBatches):
    r"""Treat the rows of a Linear layer's gradient as mixtures of its inputs, and separate them.

    .. math:: \frac{\partial L}{\partial W} = \sum_j \delta_j x_j^T = A V, \qquad [x_j\ 1] = p_j V

    The gradient has a row per neuron, and every row is a mixture of the batch's images. A singular value decomposition
    leaves as many mixtures V as there are images, and independent component analysis finds the combinations
    :math:`p_j`. The gradient of the bias, as one more column, gives sign and scale of each image. ``way=sparse``
    maximises the likelihood of images with sparse details (`gradveil.attacks.parts.components`); ``way=published``
    minimises the paper's objective (`gradveil.attacks.parts.cocktail`). If a ReLU follows, ``relu`` makes the estimates
    exact: they tell which neurons are off for an image, and this determines its combination
    (`gradveil.attacks.parts.completion`). If convolutions come before the first Linear layer, the features at its input
    are recovered (through the span of the next layer's gradient if that can be used) and images are searched that have
    them. The loss is the relative distance of the gradient from one that the returned images cause; through
    convolutions it is that of the search.

    Needs: the gradient of a single step, which may be a mean over clients, of a Linear layer with bias at least as wide
    as the batch is large. The number of examples is used if known, and otherwise read off the rank.
    Fails: after several local steps; for images whose gradient drowns in noise or rounding. Without ReLU, or if fewer
    neurons are off for an image than the batch has images, the result stays an estimate: the larger the batch beside
    the number of pixels, the more images shine through each other. Recovered features do not help if the layers before
    have pooled the details away, or if BatchNorm used statistics of the batch.
    Adapts: knowing the defence, it completes removed entries first, for a few images, and finds dcs2's concealed
    samples beside the images (`gradveil.attacks.whole_batches`). Noise and rounding it always handles: only as many
    directions count as there are images.
    Reference: Kariyappa et al. 2022, https://arxiv.org/abs/2209.05578, Sections 4 and 5.
    Differs from the paper: ``sparse``, which is better and faster than the published objective; ``relu``; sign and
    scale come from the gradient of the bias rather than from the range of the pixels.

    Attributes:
        way: how components are found: ``sparse`` or ``published``.
        relu: whether the zeros of a ReLU after the layer are used.
        iterations: steps of Adam, of ``way=published`` and of the search for images that have given features.
        lr: Adam's learning rate for ``way=published``.
    """

    way: str = "sparse"
    relu: bool = True
    iterations: int = 2000
    lr: float = 1e-3

    def __post_init__(self) -> None:
        one_of("way", self.way, WAYS)
        in_range("iterations", self.iterations, 1)
        in_range("lr", self.lr, 0, open_low=True)

    def unfit(self, network: nn.Module, shape: tuple[int, int, int], images: int | None) -> str:
        """Return why batches behind this network are out of reach, or ""."""
        try:
            width = len(attacked_layer(network, shape).layer.bias)
        except ConfigError as error:
            return str(error)
        if images is not None and images >= width:
            return f"The batch must be smaller than the Linear layer is wide ({width}), got {images}. Use fewer images."
        return ""

    def recover(self, seen: Observation, known: Layers, rng: torch.Generator) -> Reconstruction:
        """Recover each target's batch."""
        entry, count = known.entry, known.images
        space = Space(seen.network, seen.shape, known.gradients)
        found = list[Inputs]()
        for number in range(len(known.gradients)):
            with part(number, len(known.gradients) * (1 if entry.on_images else 2)):
                one = None if entry.on_images else self._in_span(number, known, rng)
                found.append(one or self._components(number, known, space))
        if entry.on_images:
            pictures = [_pictures(space, one) for one in found]
        else:
            pictures = self._through_features(seen, known, found, rng)
        told = [_remark(entry, count or len(one.values), one) for one in found]
        return _collect(seen, pictures, told, count)

    def _in_span(self, target: int, known: Layers, rng: torch.Generator) -> Inputs | None:
        """Return features that the next layer's gradient tells apart, or None if it can't be used."""
        parts, later = known.factors(target), known.later[target]
        if later is None or not self.relu or not parts.rank:
            return None
        hidden = factors(later, known.parts or parts.rank)
        if not spans(hidden, parts):
            return None
        values, sure = by_span(parts, known.entry.layer, hidden.basis, _RESTARTS, rng)
        return Inputs(values.nan_to_num(0.0, 0.0, 0.0), int(sure.sum()), torch.nan)

    def _components(self, target: int, known: Layers, space: Space) -> Inputs:
        """Return independent components, or what ReLU makes of them if that explains the gradient better."""
        gradient, parts, entry = known.gradients[target], known.factors(target), known.entry
        if not parts.rank:
            return Inputs(gradient.new_empty(0, gradient.shape[1] - 1), 0, torch.nan)
        separate, layer = self._separation(entry.shape), entry.layer if entry.relu else None

        def judged(rows: Tensor, exact: bool) -> Inputs:
            mixed = rows @ parts.basis
            values = (mixed[:, :-1] / mixed[:, -1:]).nan_to_num(0.0, 0.0, 0.0)
            values = space.box(values) if entry.on_images and not known.conceals else values
            loss = unexplained(gradient, layer, values)
            return Inputs(values, parts.rank if exact and loss < EXACT else 0, loss)

        estimate = separate(parts.basis)
        best = judged(estimate, parts.rank == 1)
        if self.relu and entry.relu and parts.rank > 1:
            rows, right = completed(parts, entry.layer, estimate, separate)
            best = min(best, judged(rows, bool(right.all())), key=lambda one: one.loss)
        if not (known.conceals and entry.on_images):
            return best
        values = best.values[known.pictures(best.values, space)]
        return Inputs(values, len(values) if best.sure else 0, best.loss)

    def _separation(self, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return the function from mixtures (k, D + 1), the last column of which is the bias, to their unmixing."""
        way = partial(unmix, shape=shape)
        if self.way == "published":
            way = partial(published, shape=shape, iterations=self.iterations, lr=self.lr)
        return lambda mixtures: way(mixtures[:, :-1])

    def _through_features(
        self, seen: Observation, known: Layers, found: list[Inputs], rng: torch.Generator
    ) -> list[Pictures]:
        """Search an image for each recovered feature vector; those of concealed samples are explained worst."""
        like = next(iter(seen.updates.values()))
        counts = [len(one.values) for one in found]
        if not sum(counts):
            return [Pictures(like.new_empty(0, *seen.shape), torch.nan, False) for _ in found]
        search = FeatureSearch(self.iterations, _FEATURE_LR, _FEATURE_TV, distance="l2", start="grey")
        with part(1, 2):
            every = search(seen, known.entry.name, torch.cat([one.values for one in found]).to(like), rng)
        pictures = []
        for one, images, loss, close in zip(found, *(torch.split(each, counts) for each in every[:3]), strict=True):
            kept = loss.argsort(stable=True)[: known.images] if known.conceals else slice(None)
            whole = 0 < one.sure == len(images) and bool(close[kept].all())
            pictures.append(Pictures(images[kept], float(loss[kept].mean()), whole))
        return pictures


def _pictures(space: Space, found: Inputs) -> Pictures:
    """Return the inputs of a layer on images as images in [0, 1]."""
    pixels = space.to_pixels(found.values.view(-1, *space.shape)).clamp(0, 1)
    return Pictures(pixels, found.loss, 0 < found.sure == len(pixels))


def _remark(entry: AttackedLayer, wanted: int, found: Inputs) -> str:
    """Return what ``why`` says of one target; "" if all its images are exact."""
    if entry.on_images or not len(found.values):
        return exact_remark(wanted, len(found.values), found.sure)
    return f"features of {found.sure} of {wanted} images surely exact; the images were searched"


def _collect(seen: Observation, pictures: list[Pictures], told: list[str], count: int | None) -> Reconstruction:
    """Return the images of all targets, and no guess for those that were not found."""
    like = next(iter(seen.updates.values()))
    sizes = [len(one.images) for one in pictures]
    images = like.new_full((len(pictures), count or max(1, *sizes, 1), *seen.shape), torch.nan)
    for target, one in enumerate(pictures):
        images[target, : len(one.images)] = one.images.to(like)
    whole = [one.recovered and size == (count or size) for one, size in zip(pictures, sizes, strict=True)]
    return Reconstruction(
        images=images,
        labels=torch.full(images.shape[:2], -1, device=like.device),
        loss=like.new_tensor([one.loss for one in pictures]),
        converged=torch.tensor(whole, device=like.device),
        why=tuple(told),
    )
