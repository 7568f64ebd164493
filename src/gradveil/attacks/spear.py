"""SPEAR: recover whole batches exactly from the gradient of a first Linear layer with ReLU."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.analytic import exact_remark, first_linear
from gradveil.attacks.parts.exact_batches import by_span, by_zeros, factors, misfit, spans
from gradveil.attacks.parts.following import next_linear, relu_follows
from gradveil.attacks.whole_batches import Layers, WholeBatches
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.threat import Observation, Reconstruction
from gradveil.validate import in_range, one_of

WAYS = ("auto", "span", "zeros")


@dataclass(frozen=True)
class Spear(WholeBatches):
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

    way: str = "auto"
    restarts: int = 2048

    def __post_init__(self) -> None:
        one_of("way", self.way, WAYS)
        in_range("restarts", self.restarts, 1)

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

    def recover(self, seen: Observation, known: Layers, rng: torch.Generator) -> Reconstruction:
        """Recover each target's batch."""
        found = [self._batch(target, known, rng) for target in range(len(known.gradients))]
        space = Space(seen.network, seen.shape, torch.zeros((), dtype=torch.float64))
        if known.conceals:
            kept = [known.pictures(inputs, space) for inputs, _ in found]
            found = [(inputs[some], sure[some]) for (inputs, sure), some in zip(found, kept, strict=True)]
        return self._collect(seen, found, known, space)

    def _batch(self, target: int, known: Layers, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs (k, D), and which of them are surely right."""
        parts, later, layer = known.factors(target), known.later[target], known.entry.layer
        if parts.rank == 0:
            return layer.weight.new_empty(0, layer.weight.shape[1]), torch.empty(0, dtype=torch.bool)
        hidden = None if later is None else factors(later, known.parts or parts.rank)
        if hidden is not None and self.way != "zeros" and spans(hidden, parts):
            return by_span(parts, layer, hidden.basis, self.restarts, rng)
        return by_zeros(parts, layer, self.restarts, rng)

    def _collect(
        self, seen: Observation, found: list[tuple[Tensor, Tensor]], known: Layers, space: Space
    ) -> Reconstruction:
        """Return the images in [0, 1], and no guess for those that were not found."""
        like, count = next(iter(seen.updates.values())), known.images
        wanted = count or max(1, *(len(inputs) for inputs, _ in found))
        images = torch.full((len(found), wanted, *seen.shape), torch.nan, dtype=torch.float64)
        loss, why = torch.full((len(found),), torch.nan, dtype=torch.float64), list[str]()
        whole = torch.tensor([int(sure.sum()) == (count or len(sure)) for _, sure in found])
        for target, (inputs, sure) in enumerate(found):
            pixels = space.to_pixels(inputs.view(-1, *seen.shape)).nan_to_num(0.5, 0.5, 0.5).clamp(0, 1)
            images[target, : len(pixels)] = pixels
            if len(pixels):
                loss[target] = misfit(known.gradients[target], known.entry.layer, space.from_pixels(pixels).flatten(1))
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
