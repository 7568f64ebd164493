"""R-GAP: rebuild one image layer by layer, from the last to the first, by linear equations."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.chains import (
    Layer,
    chain_of,
    gradient_matrix,
    inverted,
    largest_row,
    least_squares,
    weight_matrix,
)
from gradveil.attacks.parts.undoing import undone_gradients
from gradveil.errors import ConfigError
from gradveil.networks.space import Space
from gradveil.threat import Knowledge, Observation, Reconstruction


@dataclass(frozen=True)
class RGap(Attack):
    r"""Solve for the input of each layer, given its output and the output's gradient, from the last layer to the image.

    .. math:: W x = z - b, \qquad \frac{\partial L}{\partial z}\, x^T = \frac{\partial L}{\partial W}

    Both equations are linear in the input x, for convolutions too, and are solved by least squares. The output z
    follows by inverting the activation after the layer, and its gradient by going back through the weights. In the last
    layer, the gradient of the bias is that of the logits. Without a bias, the gradient of the weight is a product of
    two directions; their lengths are those for which softmax and label explain them.

    Needs: the number of examples, which must be 1, and the gradient of a single step. The label is recovered.
    Fails: under noise, which grows from layer to layer; with fewer equations than unknowns (`rank_analysis`), as in
    strided convolutions with few channels; in saturated sigmoids. Refuses ReLU and other activations without an
    inverse, pooling, BatchNorm, Dropout, grouped convolutions, residual connections, several images or local steps.
    Adapts: knowing the defence, it completes removed entries of the last layer and leaves the equations of removed
    entries out elsewhere, undoes a clipped gradient's scale, or separates a concealed sample's part first.
    Reference: Zhu and Blaschko 2021, https://arxiv.org/abs/2010.07733, Sections 3 and 4.
    Differs from the paper: uses cross-entropy with several classes instead of a binary loss, so the last layer is
    found by a search for one number instead of inverting :math:`u\,dL/du` by Adam; layers may have biases; weight and
    gradient equations are scaled to the same size, because the latter are much smaller.
    """

    name: ClassVar[str] = "r-gap"
    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})
    most_images: ClassVar[int] = 1
    adapts: ClassVar[bool] = True

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Rebuild each target separately, in double precision."""
        if seen.num_examples != 1:
            raise ConfigError(f"Attack 'r-gap' needs updates of 1 image, got {seen.num_examples}. Use --images 1.")
        if not seen.single_step:
            raise ConfigError(
                "Attack 'r-gap' needs the gradient of a single step, got several local steps. Use --attacks gs."
            )
        layers = chain_of(seen.network, seen.shape)
        like = next(iter(seen.updates.values()))
        space = Space(seen.network, seen.shape, torch.zeros((), dtype=torch.float64))
        gradients, answer, note = undone_gradients(seen, layers[-1].name)
        found = [_rebuild(layers, {name: g[t] for name, g in gradients.items()}) for t in range(seen.num_targets)]
        images = torch.stack([space.to_pixels(one.image.view(seen.shape)) for one in found])
        loss = torch.tensor([one.residual for one in found], dtype=torch.float64)
        usable = images.flatten(1).isfinite().all(1)
        images = torch.where(usable[:, None, None, None], images.clamp(0, 1), torch.nan)
        short = [
            f"{rank.name} ({rank.surplus})" for rank in rank_analysis(seen.network, seen.shape) if rank.surplus < 0
        ]
        lacking = f"fewer equations than unknowns in {', '.join(short)}" if short else ""
        converged = (loss < _EXACT) & usable
        return Reconstruction(
            images=images[:, None].to(like),
            labels=torch.tensor([[one.label] for one in found], device=like.device),
            loss=loss.to(like),
            converged=converged.to(like.device),
            why=tuple(
                "; ".join(filter(None, [lacking, "" if solved else one.shortfall, note]))
                for one, solved in zip(found, converged.tolist(), strict=True)
            ),
            answers=(answer,) * len(found) if answer else (),
        )


_EXACT = 1e-3
"""Equations of a layer count as solved up to this relative residual."""


class Rank(NamedTuple):
    """The number of equations for the input of a layer.

    Attributes:
        name: the layer's name.
        unknowns: entries of the layer's input.
        weight: equations from the output, one per entry; 0 for the last layer, whose output is not known.
        gradient: independent equations from the gradient, at most one per entry of the weight; if there are more
            channels than positions, some repeat others.
        surplus: equations minus unknowns; below 0 the input is not determined.
    """

    name: str
    unknowns: int
    weight: int
    gradient: int
    surplus: int


def rank_analysis(network: nn.Module, shape: tuple[int, int, int]) -> list[Rank]:
    """Count the equations for each layer, first to last; the count is an upper bound of the rank."""
    ranks = []
    for layer in chain_of(network, shape):
        unknowns, outputs = torch.Size(layer.shape).numel(), torch.Size(layer.out).numel()
        weight = outputs if layer.act is not None else 0
        kernel, channels = layer.module.weight[0].numel(), layer.out[0]
        gradient = kernel * min(channels, outputs // channels)
        ranks.append(Rank(layer.name, unknowns, weight, gradient, weight + gradient - unknowns))
    return ranks


class Rebuilt(NamedTuple):
    """An image as the first layer sees it, its label, and the worst relative residual with the name of its layer."""

    image: Tensor
    label: int
    residual: float
    worst: str

    @property
    def shortfall(self) -> str:
        """What is wrong with the worst layer, for ``why``."""
        if not math.isfinite(self.residual):
            return f"the equations of {self.worst} hold numbers that are not finite"
        return f"the equations of {self.worst} have a misfit of {self.residual:.2g}, where {_EXACT:g} counts as solved"


def _rebuild(layers: list[Layer], gradients: dict[str, Tensor]) -> Rebuilt:
    """Solve from the last layer to the image."""
    last = layers[-1]
    reached, error, residual = last_input(last, gradients)
    label, worst = int(error.argmin()), last.name
    for after, layer in zip(reversed(layers[1:]), reversed(layers[:-1]), strict=True):
        back = weight_matrix(after).T @ error  # gradient of the activation's output
        drive, slope = inverted(layer.act or nn.Identity(), reached)
        error = back * slope
        reached, misfit = _solve(layer, drive, error, gradients)
        if misfit > residual:
            worst, residual = layer.name, misfit
    return Rebuilt(reached, label, residual, worst)


def last_input(layer: Layer, gradients: dict[str, Tensor]) -> tuple[Tensor, Tensor, float]:
    """Return the last layer's input, the gradient of the logits, and how badly softmax and label explain it."""
    weight, bias = layer.module.weight, layer.module.bias
    seen = gradients[f"{layer.name}.weight"]  # (classes, features)
    if bias is not None:
        error = gradients[f"{layer.name}.bias"]
        return seen.T @ error / error.square().sum(), error, _misfit(weight, bias, seen, error)
    left, size, right = torch.linalg.svd(seen, full_matrices=False)
    direction, other = left[:, 0], right[0] * size[0]
    if direction.max() > -direction.min():  # the label's entry is the largest, and negative
        direction, other = -direction, -other
    longest = -1 / float(direction.min())  # p - 1 of the label's class is at least -1
    low, high = -12.0, 0.0
    for _ in range(_ZOOMS):  # a search along the length of the error, on a logarithmic scale
        tries = torch.linspace(low, high, _TRIES, dtype=torch.float64)
        lengths = longest * 10**tries
        misfits = torch.tensor([_misfit(weight, None, seen, length * direction) for length in lengths])
        at = int(misfits.argmin())
        low, high = float(tries[max(0, at - 1)]), float(tries[min(_TRIES - 1, at + 1)])
    length = lengths[at]
    return other / length, length * direction, float(misfits[at])


_ZOOMS, _TRIES = 9, 400


def _misfit(weight: Tensor, bias: Tensor | None, seen: Tensor, error: Tensor) -> float:
    """Return the relative distance between a gradient of the logits and the one that its own input gives."""
    inputs = seen.T @ error / error.square().sum()
    logits = F.linear(inputs, weight, bias)
    label = F.one_hot(error.argmin(), len(error)).to(error)
    return float((logits.softmax(0) - label - error).norm() / error.norm())


def _solve(layer: Layer, drive: Tensor, error: Tensor, gradients: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Return the input that gives the output ``drive`` and, with ``error``, the gradient; and the relative residual."""
    bias = layer.module.bias
    if bias is not None:
        drive = (drive.view(len(bias), -1) - bias[:, None]).flatten()
    errors, wanted = error.view(layer.out[0], -1), gradients[f"{layer.name}.weight"].flatten(1)
    known = wanted.isfinite()
    if errors.shape[0] > errors.shape[1] and bool(known.all()):  # more channels than positions: equations repeat others
        basis, errors = torch.linalg.qr(errors)
        wanted = basis.T @ wanted
    there = known.flatten() if wanted.shape == known.shape else slice(None)
    blocks = [(weight_matrix(layer), drive)]
    if bool(known.any()):
        blocks.append((gradient_matrix(layer, errors)[there], wanted.flatten()[there]))
    scaled = [(matrix / (size := largest_row(matrix)), wanted / size) for matrix, wanted in blocks]
    matrix, wanted = torch.cat([m for m, _ in scaled]), torch.cat([w for _, w in scaled])
    if not (matrix.isfinite().all() and wanted.isfinite().all()):
        return torch.full((matrix.shape[1],), torch.nan, dtype=torch.float64), torch.inf
    found = least_squares(matrix, wanted)
    residual = (matrix @ found - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return found, float(residual)
