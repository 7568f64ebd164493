r"""Tell a private image's gradient from that of the decoy which a defence hides behind it, by linear algebra alone.

The gradient of a network's last Linear is :math:`\delta_s h_s^T + \delta_c h_c^T`, of rank two: features and error of
the private image s and of its decoy c. Both h lie in a known plane, and four numbers that place them there must explain

.. math:: \delta_s = \mathrm{softmax}(W h_s + b) - e_y, \quad
    \delta_c = \mathrm{softmax}(W h_c + b) - (1 - \lambda) e_z - \lambda e_y

for some class z: three equations a class, which leave no doubt. From there it goes backwards as in R-GAP. The errors of
a layer's output are known of both images, so its gradient is linear in the two inputs, :math:`M_s x_s + M_c x_c`. What
the projection P leaves that :math:`M_c` does not reach speaks of the private image alone. Where these equations, with
those of the output, are enough, :math:`x_s` is solved for, then :math:`x_c`, and the layer before is next. Where they
are not, the projected gradient is still the private image's own.

What comes out is the private image's own gradient as far as it could be told: an attack matches it as if there were no
defence, and leaves out the rest.

Needs: one private image with a known label and one decoy, in a single step; a network that ends in a Linear with bias.
Before that Linear only plain chains are followed, `gradveil.attacks.parts.chains`.
Fails: where both errors are the same but for a factor, so that the plane is a line: both images sure of one class.
Where decoy and private image have the same label, it may take one for the other if the decoy is not far from images.
Reference: this package's own; R-GAP, https://arxiv.org/abs/2010.07733, has the equations of one image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.parts.chains import (
    Layer,
    chain_of,
    gradient_matrix,
    inverted,
    largest_row,
    least_squares,
    weight_matrix,
)
from gradveil.errors import ConfigError
from gradveil.networks.grads import layer_inputs
from gradveil.threat import Knowledge, Observation
from gradveil.types import Tensors

KEEP, PROJECT = "keep/", "project/"
"""Prefixes of what travels beside the gradients: whether a tensor counts, (T, 1, ..), and P, (T, R, R)."""
STARTS, STEPS, TRIES = 12, 60, 5
"""Searches for the four numbers for each class z, steps of each, and how often all begin anew where none succeeds."""
EXPLAINED = 1e-3
"""The largest relative misfit at which equations count as solved."""
EXACT = 1e-7
"""The relative misfit at which a search needs to look no further: what float32 allows."""
THIN = 1e-5
"""The plane counts as one if its second direction has this share of the first; float32 has 1e-7."""
LARGEST = 30_000_000
"""Entries of the largest system of equations that is solved."""


class Half(NamedTuple):
    """One of the two images at some layer: the layer's input, and the gradient of its output."""

    inputs: Tensor
    error: Tensor


@dataclass
class Told:
    """What could be told of one target: the private image's own gradients by name, and P where they are projected."""

    own: dict[str, Tensor] = field(default_factory=dict)
    project: dict[str, Tensor] = field(default_factory=dict)


def told_apart(seen: Observation, gradients: Tensors, share: float, *, spares: bool = False) -> list[Told | None]:
    """What could be told of each target's private image, None where nothing could.

    Args:
        seen: what a server saw.
        gradients: mean gradients (T, ...) as they were before any factor on both parts.
        share: of the private image's label in the decoy's, lambda.
        spares: whether some images have no decoy; a gradient of rank one is then the image's own.
    """
    name = _last_linear(seen)
    fits = seen.single_step and seen.knows(Knowledge.LABELS) and seen.num_examples == 1
    if not fits or name is None or not {f"{name}.weight", f"{name}.bias"} <= gradients.keys():
        return [None] * seen.num_targets
    try:
        layers = chain_of(seen.network, seen.shape)
    except ConfigError:
        layers = []
    found: list[Told | None] = []
    for target, label in enumerate(seen.labels[:, 0].tolist()):
        mine = {key: tensor[target].detach().double().cpu() for key, tensor in gradients.items()}
        if spares and not _is_plane(mine[f"{name}.weight"]):
            found.append(Told(mine))
            continue
        pair = split_last(mine, name, seen, label, share)
        found.append(None if pair is None else _followed(mine, name, pair, layers))
    return found


def projected(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """What a guess's gradient has of the parts that were told apart; ``seen`` says which, from `stacked`."""
    beside = {name: tensor for name, tensor in seen.items() if name.startswith((KEEP, PROJECT))}
    return {name: _kept(name, tensor, seen) for name, tensor in guess.items()} | beside


def _kept(name: str, tensor: Tensor, seen: Tensors) -> Tensor:
    if PROJECT + name in seen:
        tensor = by_weight(by_channel(tensor) @ seen[PROJECT + name], tensor)
    return tensor * seen[KEEP + name]


def by_channel(gradient: Tensor) -> Tensor:
    """(T, channels of the input, R) of a weight's gradients: (T, out, in) or (T, out, in, height, width)."""
    return gradient.transpose(1, 2).flatten(2)


def by_weight(channels: Tensor, like: Tensor) -> Tensor:
    """The inverse of `by_channel`."""
    return channels.view(like.transpose(1, 2).shape).transpose(1, 2)


def _last_linear(seen: Observation) -> str | None:
    """The Linear with a bias that gives the logits; None where the last one is no such layer."""
    linears = [(name, layer) for name, layer in seen.network.named_modules() if isinstance(layer, nn.Linear)]
    name, layer = linears[-1] if linears else ("", None)
    return name if layer is not None and layer.bias is not None and layer.out_features == seen.num_classes else None


# --- The last layer ---------------------------------------------------------------------------------------------------


def split_last(gradients: Tensors, name: str, seen: Observation, label: int, share: float) -> tuple[Half, Half] | None:
    """The private image and the decoy at the last layer; None where nothing explains its gradient.

    Labels tell which is which. Where z is the private label too, the private one is whose features are nearer to those
    of pictures of noise.
    """
    seen_weight, seen_bias = gradients[f"{name}.weight"], gradients[f"{name}.bias"]
    layer = seen.network.get_submodule(name)
    weight, bias = (getattr(layer, key).detach().double().cpu() for key in ("weight", "bias"))
    if not _is_plane(seen_weight):
        return None
    _, sizes, right = torch.linalg.svd(seen_weight, full_matrices=False)
    plane = right[:2] * sizes[0]  # (2, features); places in it are of order one
    outputs = plane @ weight.T  # (2, classes)
    inside = seen_weight @ right[:2].T / sizes[0]  # (classes, 2)
    own = F.one_hot(torch.tensor(label), len(bias)).double()
    theirs = (1 - share) * torch.eye(len(bias), dtype=torch.float64) + share * own  # a line for each z
    labels = torch.stack([own.expand_as(theirs), theirs], 1).repeat(STARTS, 1, 1)  # (N, 2, classes)
    rng = torch.Generator().manual_seed(0)  # not the attack's: it decides nothing but where a search begins

    def misfit(place: Tensor, target: Tensor) -> Tensor:
        errors = inside @ _inverse(place)  # (classes, 2)
        logits = place @ outputs + bias  # (2, classes)
        explained = logits.softmax(1) - target
        return torch.cat([(errors.T - explained).flatten(), errors.sum(1) - seen_bias])

    for _ in range(TRIES):
        begun = torch.randn(len(labels), 2, 2, generator=rng, dtype=torch.float64)
        places, costs = _levenberg(misfit, begun, labels, EXACT * float(seen_bias.norm()))
        best = int(costs.nan_to_num(torch.inf).argmin())
        if float(costs[best]) <= EXPLAINED * float(seen_bias.norm()) + 1e-12:
            break
    else:
        return None
    errors = inside @ _inverse(places[best])
    halves = [Half(places[best, each] @ plane, errors[:, each]) for each in range(2)]
    if torch.equal(labels[best, 0], labels[best, 1]):
        usual = _usual_features(seen, name)
        halves.sort(key=lambda half: float((half.inputs - usual).norm()))
    return halves[0], halves[1]


def _is_plane(gradient: Tensor) -> bool:
    """Whether a Linear's gradient is of two images, or more."""
    sizes = torch.linalg.svdvals(gradient)
    return len(sizes) >= 2 and bool(sizes[1] > THIN * sizes[0])


def _inverse(matrix: Tensor) -> Tensor:
    """Of a 2x2 matrix, in one formula: a search may pass near singular ones."""
    (a, b), (c, d) = matrix
    adjoint = torch.stack([torch.stack([d, -b]), torch.stack([-c, a])])
    determinant = a * d - b * c
    return adjoint / torch.where(determinant.abs() < 1e-12, 1e-12, determinant)


def _levenberg(
    misfit: Callable[[Tensor, Tensor], Tensor], places: Tensor, targets: Tensor, enough: float
) -> tuple[Tensor, Tensor]:
    """Levenberg-Marquardt on many small problems at once, until one misfit is small enough.

    Returns:
        The places, and the norms of their misfits.
    """
    function = torch.func.vmap(misfit)
    slope = torch.func.vmap(torch.func.jacfwd(misfit))
    rest, damping = function(places, targets), torch.ones(len(places), dtype=places.dtype)
    cost = rest.norm(dim=1)
    for _ in range(STEPS):
        jacobian = slope(places, targets).flatten(2)  # (N, equations, 4)
        square = jacobian.mT @ jacobian
        damped = square + torch.diag_embed(damping[:, None] * square.diagonal(dim1=1, dim2=2) + 1e-15)
        step = torch.linalg.solve_ex(damped, jacobian.mT @ rest[..., None])[0].view_as(places)
        tried = places - step
        after = function(tried, targets)
        better = after.norm(dim=1) < cost
        places = torch.where(better[:, None, None], tried, places)
        rest = torch.where(better[:, None], after, rest)
        cost = rest.norm(dim=1)
        if bool(cost.nan_to_num(torch.inf).min() < enough):
            break
        damping = torch.where(better, damping / 5, damping * 3).clamp(1e-12, 1e12)
    return places, cost


def _usual_features(seen: Observation, name: str) -> Tensor:
    """The mean of what the last layer sees of pictures of noise."""
    rng = torch.Generator().manual_seed(0)
    like = next(iter(seen.updates.values()))
    with torch.no_grad():
        noise = torch.rand(32, *seen.shape, generator=rng).to(like)
        return layer_inputs(seen.network, [name], noise)[0].mean(0).double().cpu()


# --- The layers before ------------------------------------------------------------------------------------------------


def _followed(gradients: Tensors, name: str, pair: tuple[Half, Half], layers: list[Layer]) -> Told:
    """From the last layer backwards, as far as the equations go."""
    told = Told({f"{name}.weight": torch.outer(pair[0].error, pair[0].inputs), f"{name}.bias": pair[0].error})
    for after, layer in zip(reversed(layers[1:]), reversed(layers[:-1]), strict=True):
        back = weight_matrix(after).T
        drives, errors = [], []
        for half in pair:
            drive, slope = inverted(layer.act or nn.Identity(), half.inputs)
            drives.append((drive, slope / slope.max()))
            errors.append((back @ half.error) * slope)
        if layer.module.bias is not None:
            told.own[f"{layer.name}.bias"] = errors[0].view(layer.out[0], -1).sum(1)
        weight = gradients[f"{layer.name}.weight"]
        wanted = by_channel(weight[None])[0]  # (channels, R)
        own, other = (gradient_matrix(_one_channel(layer), error.view(layer.out[0], -1)) for error in errors)
        keep = unreached(other)  # (R, R)
        inputs = _solved(layer, drives[0], keep @ own, wanted @ keep)
        theirs = None if inputs is None else _solved(layer, drives[1], other, wanted - _product(inputs, own, wanted))
        if inputs is None or theirs is None:
            told.own[f"{layer.name}.weight"] = by_weight((wanted @ keep)[None], weight[None])[0]
            told.project[f"{layer.name}.weight"] = keep
            return told
        told.own[f"{layer.name}.weight"] = by_weight(_product(inputs, own, wanted)[None], weight[None])[0]
        pair = Half(inputs, errors[0]), Half(theirs, errors[1])
    return told


def _one_channel(layer: Layer) -> Layer:
    """The layer as it sees one channel of its input: the gradients of all channels are alike."""
    return layer._replace(shape=(1, *layer.shape[1:]))


def _product(inputs: Tensor, matrix: Tensor, wanted: Tensor) -> Tensor:
    """(channels, R): what inputs make of the gradient."""
    return inputs.view(len(wanted), -1) @ matrix.T


def unreached(matrix: Tensor) -> Tensor:
    """The projection (R, R) on what the columns of a matrix (R, n) do not reach.

    Example:
        >>> unreached(torch.tensor([[2.0], [0.0]])).tolist()
        [[0.0, 0.0], [0.0, 1.0]]
    """
    left, sizes, _ = torch.linalg.svd(matrix, full_matrices=False)
    basis = left[:, sizes > 1e-7 * sizes.max().clamp_min(torch.finfo(sizes.dtype).tiny)]
    left_over: Tensor = torch.eye(len(matrix), dtype=matrix.dtype) - basis @ basis.T
    return left_over


def _solved(layer: Layer, drive: tuple[Tensor, Tensor], matrix: Tensor, wanted: Tensor) -> Tensor | None:
    """The layer's input from its output's and its gradient's equations; None where these are too few, or disagree.

    Args:
        layer: whose input is looked for.
        drive: its output, and how much each entry of it counts: a saturated one is known badly.
        matrix: (R, entries of a channel), what a channel of the input makes of the gradient.
        wanted: (channels, R), the gradient.
    """
    output, certain = drive
    bias = layer.module.bias
    if bias is not None:
        output = (output.view(len(bias), -1) - bias[:, None]).flatten()
    channels, unknowns = len(wanted), len(wanted) * matrix.shape[1]
    rank = int(torch.linalg.matrix_rank(matrix, rtol=1e-7))
    if rank * channels + len(output) < unknowns or (len(matrix) * channels + len(output)) * unknowns > LARGEST:
        return None
    forward = weight_matrix(layer)
    blocks = [
        (forward * certain[:, None], output * certain, largest_row(forward)),
        (torch.kron(torch.eye(channels, dtype=matrix.dtype), matrix), wanted.flatten(), largest_row(matrix)),
    ]
    equations = torch.cat([rows / size for rows, _, size in blocks])
    sides = torch.cat([side / size for _, side, size in blocks])
    if not (equations.isfinite().all() and sides.isfinite().all()):
        return None
    found = least_squares(equations, sides)
    misfit = (equations @ found - sides).norm() / sides.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return found if float(misfit) < EXPLAINED else None


def stacked(gradients: Tensors, found: Sequence[Told]) -> dict[str, Tensor]:
    """The private images' own gradients (T, ...) by the names in ``gradients``, with what `projected` needs beside."""
    result: dict[str, Tensor] = {}
    for name, tensor in gradients.items():
        rows, keeps, matrices = [], [], []
        for target, told in enumerate(found):
            mine = told.own.get(name)
            rows.append(torch.zeros_like(tensor[target]) if mine is None else mine.to(tensor))
            keeps.append(mine is not None)
            matrices.append(told.project.get(name))
        result[name] = torch.stack(rows)
        result[KEEP + name] = torch.tensor(keeps).to(tensor).view(-1, *[1] * (tensor.dim() - 1))
        if any(matrix is not None for matrix in matrices):
            size = by_channel(tensor).shape[2]
            all_ = torch.eye(size, dtype=tensor.dtype, device=tensor.device)
            result[PROJECT + name] = torch.stack([all_ if m is None else m.to(tensor) for m in matrices])
    return result
