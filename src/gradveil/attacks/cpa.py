"""CPA, the cocktail party attack: independent components of a Linear layer's gradient are the images of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.analytic import exact_remark, nothing, rows_of
from gradveil.attacks.parts.attacked_layer import AttackedLayer, attacked_layer
from gradveil.attacks.parts.cocktail import published
from gradveil.attacks.parts.completion import completed
from gradveil.attacks.parts.components import unmix
from gradveil.attacks.parts.exact_batches import by_span, factors, spans, unexplained
from gradveil.attacks.parts.feature_inversion import FeatureSearch
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.progress import part
from gradveil.threat import Knowledge, Observation, Reconstruction
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
class Cpa(Attack):
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

    def too_large(self, images: int, local_steps: int) -> str:
        """Return that several local steps are out of reach, or ""."""
        return f"needs the gradient of a single step, got {local_steps:,} local steps" if local_steps > 1 else ""

    def unfit(self, network: nn.Module, shape: tuple[int, int, int], images: int | None) -> str:
        """Return why batches behind this network are out of reach, or ""."""
        try:
            width = len(attacked_layer(network, shape).layer.bias)
        except ConfigError as error:
            return str(error)
        if images is not None and images >= width:
            return f"The batch must be smaller than the Linear layer is wide ({width}), got {images}. Use fewer images."
        return ""

    def out_of_reach(self, network: nn.Module, shape: tuple[int, int, int], images: int, local_steps: int) -> str:
        """Return why the updates have too many local steps, or the layer does not fit them, or ""."""
        return self.too_large(images, local_steps) or self.unfit(network, shape, images).rstrip(".")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Recover each target's batch; targets out of reach have no guess, and ``why`` says so."""
        count = seen.num_examples if seen.knows(Knowledge.NUM_EXAMPLES) else None
        reason = self.unfit(seen.network, seen.shape, count)
        if not seen.single_step:
            reason = "needs the gradient of a single step, got several local steps"
        if reason:
            return nothing(seen, count or 1, reason)
        entry = attacked_layer(seen.network, seen.shape)
        rows = rows_of(seen, entry.name)
        gradients = -torch.cat([rows.weight, rows.bias[..., None]], 2)  # (T, m, D + 1)
        later = seen.updates.get(f"{entry.after}.weight")
        space = Space(seen.network, seen.shape, gradients)
        found = list[Inputs]()
        for number, gradient in enumerate(gradients):
            with part(number, len(gradients) * (1 if entry.on_images else 2)):
                hidden = None if later is None else -later[number].double().cpu()
                one = None if entry.on_images else self._in_span(gradient, entry, hidden, count, rng)
                found.append(one or self._components(gradient, entry, space, count))
        if entry.on_images:
            pictures = [_pictures(space, one) for one in found]
        else:
            pictures = self._through_features(seen, entry, found, rng)
        told = [_remark(entry, count or len(one.values), one) for one in found]
        return _collect(seen, pictures, told, count)

    def _in_span(
        self, gradient: Tensor, entry: AttackedLayer, later: Tensor | None, count: int | None, rng: torch.Generator
    ) -> Inputs | None:
        """Return features that the next layer's gradient tells apart, or None if it can't be used."""
        parts = factors(gradient, count)
        if later is None or not self.relu or not parts.rank:
            return None
        hidden = factors(later, count or parts.rank)
        if not spans(hidden, parts):
            return None
        values, sure = by_span(parts, entry.layer, hidden.basis, _RESTARTS, rng)
        return Inputs(values.nan_to_num(0.0, 0.0, 0.0), int(sure.sum()), torch.nan)

    def _components(self, gradient: Tensor, entry: AttackedLayer, space: Space, count: int | None) -> Inputs:
        """Return independent components, or what ReLU makes of them if that explains the gradient better."""
        parts = factors(gradient, count)
        if not parts.rank:
            return Inputs(gradient.new_empty(0, gradient.shape[1] - 1), 0, torch.nan)
        separate, layer = self._separation(entry.shape), entry.layer if entry.relu else None

        def judged(rows: Tensor, known: bool) -> Inputs:
            mixed = rows @ parts.basis
            values = (mixed[:, :-1] / mixed[:, -1:]).nan_to_num(0.0, 0.0, 0.0)
            values = space.box(values) if entry.on_images else values
            loss = unexplained(gradient, layer, values)
            return Inputs(values, parts.rank if known and loss < EXACT else 0, loss)

        estimate = separate(parts.basis)
        best = judged(estimate, parts.rank == 1)
        if self.relu and entry.relu and parts.rank > 1:
            rows, known = completed(parts, entry.layer, estimate, separate)
            best = min(best, judged(rows, bool(known.all())), key=lambda one: one.loss)
        return best

    def _separation(self, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return the function from mixtures (k, D + 1), the last column of which is the bias, to their unmixing."""
        way = partial(unmix, shape=shape)
        if self.way == "published":
            way = partial(published, shape=shape, iterations=self.iterations, lr=self.lr)
        return lambda mixtures: way(mixtures[:, :-1])

    def _through_features(
        self, seen: Observation, entry: AttackedLayer, found: list[Inputs], rng: torch.Generator
    ) -> list[Pictures]:
        """Search an image for each recovered feature vector."""
        like = next(iter(seen.updates.values()))
        counts = [len(one.values) for one in found]
        if not sum(counts):
            return [Pictures(like.new_empty(0, *seen.shape), torch.nan, False) for _ in found]
        search = FeatureSearch(self.iterations, _FEATURE_LR, _FEATURE_TV, distance="l2", start="grey")
        with part(1, 2):
            every = search(seen, entry.name, torch.cat([one.values for one in found]).to(like), rng)
        each = zip(found, *(torch.split(tensor, counts) for tensor in every[:3]), strict=True)
        return [
            Pictures(images, float(loss.mean()), 0 < one.sure == len(images) and bool(close.all()))
            for one, images, loss, close in each
        ]


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
