"""SPEAR: recover whole batches exactly from the gradient of a first Linear layer with ReLU."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.analytic import exact_remark, first_linear, nothing, outside
from gradveil.attacks.parts.exact_batches import ReluLayer, by_span, by_zeros, factors, misfit, spans
from gradveil.attacks.parts.following import next_linear, relu_follows
from gradveil.attacks.parts.undoing import concealed, undone_rows
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of

WAYS = ("auto", "span", "zeros")


@dataclass(frozen=True)
class Spear(Attack):
    r"""Factor the gradient of the first layer into images and their errors, using that ReLU turns neurons off.

    .. math:: \frac{\partial L}{\partial W} = \frac{\partial L}{\partial Z} X^T = A V, \qquad
        \frac{\partial L}{\partial Z} = A Q, \quad X^T = Q^{-1} V

    ``way=zeros`` finds the columns of Q as directions with many zeros in :math:`A q`, by minimising
    :math:`\sum_i \log\cosh(a_i^T q / \epsilon)` from many starts. ``way=span`` uses the next Linear layer too: the rows
    of its gradient span all hidden representations, and few combinations of the rows of V give an image whose own
    representation :math:`\mathrm{relu}(W x + b)` lies in that span. It needs a next layer at least as wide as the batch
    is large, finds each image by itself, and still works when most neurons are on. ``way=auto`` takes it if it can.
    The gradient of the bias, as one more column, gives the scale. All arithmetic is in double precision. The loss is
    the relative distance of the gradient from the nearest one that the returned images can cause through this ReLU.

    Needs: the gradient of a single step, which may be a mean over clients. The number of examples is used if known, and
    otherwise read off the rank. The network must begin with a Linear layer with bias and ReLU, wider than the batch.
    Fails: after several local steps; for images whose gradient drowns in rounding errors because they are classified
    confidently; under noise, which hides the weakest images first. ``zeros`` finds only a part of many batches, because
    all directions are needed and some are found from no start; the more so for large batches, if training has left few
    neurons off, or if there is only one hidden layer.
    Adapts: knowing the defence, it completes removed entries first (`gradveil.attacks.parts.undoing`), and finds dcs2's
    concealed samples beside the images. Noise it always handles: only as many directions count as there are images.
    Reference: Dimitrov et al. 2024 (SPEAR), https://arxiv.org/abs/2403.03945, Sections 3 and 4; SPEAR++ 2025,
    https://arxiv.org/abs/2510.24200; the span of gradients is used by Petrov et al. 2024 (DAGER) for text,
    https://arxiv.org/abs/2405.15586, Section 4.
    Differs from the paper: ``zeros`` minimises a smooth count of zeros where SPEAR samples rows, and takes the
    directions with the most zeros without exchanging them later; ``span`` is not in the paper.

    Attributes:
        way: how images are found: ``zeros``, ``span`` or ``auto``.
        restarts: random starts at most per target; the search ends as soon as everything is found.
    """

    adapts: ClassVar[bool] = True

    way: str = "auto"
    restarts: int = 2048

    def __post_init__(self) -> None:
        one_of("way", self.way, WAYS)
        in_range("restarts", self.restarts, 1)

    def too_large(self, images: int, local_steps: int) -> str:
        """Return that several local steps are out of reach, or ""."""
        return f"needs the gradient of a single step, got {local_steps:,} local steps" if local_steps > 1 else ""

    def unfit(self, network: nn.Module, shape: tuple[int, int, int], images: int | None) -> str:
        """Return why batches behind this network are out of reach, or ""."""
        try:
            name = first_linear(network, shape)
        except ConfigError as error:
            return str(error)
        if not relu_follows(network, shape, name):
            return f"A ReLU must follow the first layer, got another one after {name}. Use --attacks gs."
        width = len(network.get_submodule(name).get_parameter("weight"))
        if images is not None and images >= width:
            return f"The batch must be smaller than the first layer is wide ({width}), got {images}. Use fewer images."
        if self.way == "span" and not next_linear(network, shape, name):
            return f"way=span needs a Linear layer behind the ReLU after {name}. Use way=zeros."
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
        name = first_linear(seen.network, seen.shape)
        linear = seen.network.get_submodule(name)
        layer = ReluLayer(*(linear.get_parameter(key).detach().double().cpu() for key in ("weight", "bias")))
        hidden = concealed(seen)
        undone = undone_rows(seen, name, None if count is None or hidden else count)
        rows = undone.rows
        gradients = -torch.cat([rows.weight, rows.bias[..., None]], 2)  # (T, m, D + 1)
        later = seen.updates.get(f"{next_linear(seen.network, seen.shape, name)}.weight")
        laters = [None] * len(gradients) if later is None else list(-later.double().cpu())
        whole = count if count is None else count + math.ceil(count * hidden)
        found = [self._batch(one, layer, after, whole, rng) for one, after in zip(gradients, laters, strict=True)]
        if hidden and count is not None:
            space = Space(seen.network, seen.shape, torch.zeros((), dtype=torch.float64))
            found = [_like_pictures(inputs, sure, count, space) for inputs, sure in found]
            undone = undone._replace(answers=(WITHOUT,) * len(found), notes=("",) * len(found))
        return undone.told(self._collect(seen, found, gradients, layer, count))

    def _batch(
        self, gradient: Tensor, layer: ReluLayer, later: Tensor | None, count: int | None, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs (k, D), and which of them are surely right."""
        parts = factors(gradient, count)
        if parts.rank == 0:
            return gradient.new_empty(0, gradient.shape[1] - 1), torch.empty(0, dtype=torch.bool)
        hidden = None if later is None else factors(later, parts.rank if count is None else count)
        if hidden is not None and self.way != "zeros" and spans(hidden, parts):
            return by_span(parts, layer, hidden.basis, self.restarts, rng)
        return by_zeros(parts, layer, self.restarts, rng)

    def _collect(
        self,
        seen: Observation,
        found: list[tuple[Tensor, Tensor]],
        gradients: Tensor,
        layer: ReluLayer,
        count: int | None,
    ) -> Reconstruction:
        """Return the images in [0, 1], and no guess for those that were not found."""
        like = next(iter(seen.updates.values()))
        space = Space(seen.network, seen.shape, torch.zeros((), dtype=torch.float64))
        wanted = count or max(1, *(len(inputs) for inputs, _ in found))
        images = torch.full((len(found), wanted, *seen.shape), torch.nan, dtype=torch.float64)
        loss, why = torch.full((len(found),), torch.nan, dtype=torch.float64), list[str]()
        whole = torch.tensor([int(sure.sum()) == (count or len(sure)) for _, sure in found])
        for target, (inputs, sure) in enumerate(found):
            pixels = space.to_pixels(inputs.view(-1, *seen.shape)).nan_to_num(0.5, 0.5, 0.5).clamp(0, 1)
            images[target, : len(pixels)] = pixels
            if len(pixels):
                loss[target] = misfit(gradients[target], layer, space.from_pixels(pixels).flatten(1))
            why.append(exact_remark(count or len(inputs), len(inputs), int(sure.sum())))
        return Reconstruction(
            images=images.to(like),
            labels=torch.full(images.shape[:2], -1, device=like.device),
            loss=loss.to(like),
            converged=((loss < _EXACT) & whole).to(like.device),
            why=tuple(why),
        )


_EXACT = 1e-3
"""Relative misfit of the gradient up to which a batch counts as recovered, if every image is surely exact."""
WITHOUT = "concealed samples found too, and left out"


def _like_pictures(inputs: Tensor, sure: Tensor, count: int, space: Space) -> tuple[Tensor, Tensor]:
    """Return the ``count`` inputs (k, D) that leave the range of pixels least: concealed samples are far outside."""
    pixels = space.to_pixels(inputs.view(-1, *space.shape)).flatten(1)
    kept = outside(pixels).argsort()[:count]
    return inputs[kept], sure[kept]
