r"""Separate a private image's gradient from that of a decoy that the defence mixed in, by linear algebra alone.

The gradient of a network's last Linear is :math:`\delta_s h_s^T + \delta_c h_c^T`, of rank two: errors and features of
the private image s and its decoy c. Both h lie in a known plane, and the four coordinates in it must satisfy

.. math:: \delta_s = \mathrm{softmax}(W h_s + b) - e_y, \quad
    \delta_c = \mathrm{softmax}(W h_c + b) - (1 - \lambda) e_z - \lambda e_y

for some class z: three equations per class, which determine the solution. The earlier layers are solved backwards as in
R-GAP. The errors of a layer's output are known for both images, so its gradient is linear in the two inputs,
:math:`M_s x_s + M_c x_c`. The projection P on what :math:`M_c` does not reach leaves only the private image's part. If
these equations and those of the output are enough, :math:`x_s` is solved for, then :math:`x_c`, and then the layer
before. If they are not, the projected gradient still belongs to the private image alone.

The result is the part of the private image's own gradient that could be separated: an attack matches it as if there
were no defence, and leaves out the rest.

If entries of the gradient were set to zero afterwards (pruning), the last layer's matrix is first completed
(`gradveil.attacks.parts.matrix_completion`): it has rank two, so that the entries that are left give most of the
others. Then both images' features follow in the columns that could be completed. The few other features are small, or
their entries would have survived: they are replaced by their mean, which is one more unknown per image. The layers
before are not followed, as too few of their entries are left.

Needs: one private image with a known label and one decoy, in a single step; a network that ends in a Linear with bias.
Before that Linear, only plain chains are followed (`gradveil.attacks.parts.chains`).
Fails: if both errors are equal up to a factor, so that the plane is a line: both images are surely of one class. If
decoy and private image have the same label, they may be confused unless the decoy is far from real images.
Reference: ours; R-GAP, https://arxiv.org/abs/2010.07733, has the equations for one image.
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
from gradveil.attacks.parts.matrix_completion import completed
from gradveil.errors import ConfigError
from gradveil.networks.grads import layer_inputs
from gradveil.threat import Knowledge, Observation
from gradveil.types import Tensors

KEEP, PROJECT = "keep/", "project/"
"""Prefixes of entries that accompany the gradients: which entries count (1 or 0, same shape), and P, (T, R, R)."""
OWN = "own/"
"""Prefix of gradients of the private images alone, beside those of images and decoys together."""
STARTS, STEPS, TRIES = 12, 60, 5
"""Searches for the four coordinates per class z, steps per search, and how often all restart if none succeeds."""
EXPLAINED = 1e-3
"""Equations count as solved up to this relative misfit."""
GAPS_EXPLAINED = 0.1
"""The same if a few features are not known and at first taken to be zero."""
EXACT = 1e-7
"""A search stops at this relative misfit, the precision of float32."""
THIN = 1e-5
"""A gradient has rank two if its second singular value is above this share of the first; float32 has 1e-7."""
LARGEST = 30_000_000
"""The largest system of equations that is solved, in entries."""


class Half(NamedTuple):
    """One of the two images at a layer: the layer's input and the gradient of its output."""

    inputs: Tensor
    error: Tensor


@dataclass
class Told:
    """The separated part of one target: the private image's own gradients by name, and P for projected ones.

    ``known`` says which entries of a gradient are known, if not all are.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    project: dict[str, Tensor] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)


class LastLayer(NamedTuple):
    """What is known of the gradient of the last Linear.

    Attributes:
        weight: (R, C), gradient of the weight.
        bias: (R,), gradient of the bias; NaN if it is not known.
        rows: (R,) numbers of the rows.
        columns: (C,) numbers of the columns.
        explained: relative misfit up to which equations count as solved.
    """

    weight: Tensor
    bias: Tensor
    rows: Tensor
    columns: Tensor
    explained: float

    @staticmethod
    def of(gradients: Tensors, name: str, *, gaps: bool = False) -> "LastLayer | None":
        """Return the gradient of a layer; with ``gaps`` zeros are unknown, and as many of them as possible computed."""
        weight, bias = gradients[f"{name}.weight"], gradients[f"{name}.bias"]
        if not gaps:
            return LastLayer(weight, bias, torch.arange(len(weight)), torch.arange(weight.shape[1]), EXPLAINED)
        both = torch.cat([weight, bias[:, None]], 1)  # the bias is one more column: an input of 1
        found = completed(both, both != 0)
        if found is None or found.misfit > EXPLAINED:
            return None
        inner = found.columns < weight.shape[1]
        known = torch.where(bias == 0, torch.nan, bias)[found.rows]
        sums = known if bool(inner.all()) else found.values[:, -1]
        return LastLayer(found.values[:, inner], sums, found.rows, found.columns[inner], GAPS_EXPLAINED)


def told_apart(
    seen: Observation, gradients: Tensors, share: float, *, spares: bool = False, gaps: bool = False
) -> list[Told | None]:
    """Return what could be separated of each target's private image, or None if nothing could.

    Args:
        seen: what the server saw.
        gradients: mean gradients (T, ...) before any factor on both parts.
        share: lambda, the share of the private image's label in the decoy's.
        spares: whether some images have no decoy; a gradient of rank one is then the image's own.
        gaps: whether entries that are zero may have been set to zero after both parts were added.
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
        last = LastLayer.of(mine, name, gaps=gaps)
        if last is None:
            found.append(None)
        elif spares and not _is_plane(last.weight):
            found.append(Told(mine, known={key: tensor != 0 for key, tensor in mine.items()} if gaps else {}))
        else:
            pair = split_last(last, name, seen, label, share)
            found.append(None if pair is None else _told(mine, name, pair, [] if gaps else layers, last))
    return found


def projected(guess: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Return the separated parts of a guess's gradient; ``seen``, from `stacked`, says which these are."""
    beside = {name: tensor for name, tensor in seen.items() if name.startswith((KEEP, PROJECT))}
    return {name: _kept(name, tensor, seen) for name, tensor in guess.items()} | beside


def _kept(name: str, tensor: Tensor, seen: Tensors) -> Tensor:
    if PROJECT + name in seen:
        tensor = by_weight(by_channel(tensor) @ seen[PROJECT + name], tensor)
    return tensor * seen[KEEP + name]


def by_channel(gradient: Tensor) -> Tensor:
    """Reshape gradients of a weight, (T, out, in) or (T, out, in, height, width), to (T, input channels, R)."""
    return gradient.transpose(1, 2).flatten(2)


def by_weight(channels: Tensor, like: Tensor) -> Tensor:
    """Invert `by_channel`."""
    return channels.view(like.transpose(1, 2).shape).transpose(1, 2)


def _last_linear(seen: Observation) -> str | None:
    """Return the name of the Linear with bias that gives the logits, or None if the last Linear does not."""
    linears = [(name, layer) for name, layer in seen.network.named_modules() if isinstance(layer, nn.Linear)]
    name, layer = linears[-1] if linears else ("", None)
    return name if layer is not None and layer.bias is not None and layer.out_features == seen.num_classes else None


# --- The last layer ---------------------------------------------------------------------------------------------------


def split_last(last: LastLayer, name: str, seen: Observation, label: int, share: float) -> tuple[Half, Half] | None:
    """Return the private image and the decoy at the last layer, or None if nothing explains its gradient.

    Their labels distinguish them. If z is the private label too, the private image is the one whose features are nearer
    to those of noise images.
    """
    layer = seen.network.get_submodule(name)
    weight, bias = (getattr(layer, key).detach().double().cpu() for key in ("weight", "bias"))
    if not _is_plane(last.weight):
        return None
    _, sizes, right = torch.linalg.svd(last.weight, full_matrices=False)
    plane = torch.zeros(2, weight.shape[1], dtype=torch.float64)  # coordinates in it are of order one
    plane[:, last.columns] = right[:2] * sizes[0]
    if len(last.columns) < weight.shape[1]:  # one more coordinate: the mean of the features that are not known
        rest = torch.ones(1, weight.shape[1], dtype=torch.float64)
        rest[:, last.columns] = 0
        plane = torch.cat([plane, rest])
    outputs = plane @ weight.T  # (2 or 3, classes)
    inside = last.weight @ right[:2].T / sizes[0]  # (R, 2)
    summed = last.bias.isfinite()
    size = float(last.bias[summed].norm())
    own = F.one_hot(torch.tensor(label), len(bias)).double()
    theirs = (1 - share) * torch.eye(len(bias), dtype=torch.float64) + share * own  # one row per z
    labels = torch.stack([own.expand_as(theirs), theirs], 1).repeat(STARTS, 1, 1)  # (N, 2, classes)
    rng = torch.Generator().manual_seed(0)  # not the attack's: it only decides where a search begins

    def explained(place: Tensor, target: Tensor) -> Tensor:
        answers: Tensor = (place @ outputs[: place.shape[1]] + bias).softmax(1)  # (2, classes)
        return answers - target

    def misfit(place: Tensor, target: Tensor) -> Tensor:
        errors = inside @ _inverse(place[:, :2])  # (R, 2)
        sums = errors.sum(1)[summed] - last.bias[summed]
        return torch.cat([(errors.T - explained(place, target)[:, last.rows]).flatten(), sums])

    for _ in range(TRIES):
        begun = torch.randn(len(labels), 2, 2, generator=rng, dtype=torch.float64)
        places, costs = _levenberg(misfit, begun, labels, EXACT * size)
        best = int(costs.nan_to_num(torch.inf).argmin())
        if float(costs[best]) <= last.explained * size + 1e-12:
            break
    else:
        return None
    place = places[best]
    if len(plane) > 2:
        begun = F.pad(place, (0, 1))[None]
        place = _levenberg(misfit, begun, labels[best][None], EXACT * size)[0][0]
    errors = explained(place, labels[best])  # of classes without a known entry, the network's own answer
    errors[:, last.rows] = (inside @ _inverse(place[:, :2])).T
    halves = [Half(place[each] @ plane, errors[each]) for each in range(2)]
    if torch.equal(labels[best, 0], labels[best, 1]):
        usual = _usual_features(seen, name)
        halves.sort(key=lambda half: float((half.inputs - usual)[last.columns].norm()))
    return halves[0], halves[1]


def _is_plane(gradient: Tensor) -> bool:
    """Return whether a Linear's gradient comes from at least two images."""
    sizes = torch.linalg.svdvals(gradient)
    return len(sizes) >= 2 and bool(sizes[1] > THIN * sizes[0])


def _inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a 2x2 matrix; nearly singular ones are allowed."""
    (a, b), (c, d) = matrix
    adjoint = torch.stack([torch.stack([d, -b]), torch.stack([-c, a])])
    determinant = a * d - b * c
    return adjoint / torch.where(determinant.abs() < 1e-12, 1e-12, determinant)


def _levenberg(
    misfit: Callable[[Tensor, Tensor], Tensor], places: Tensor, targets: Tensor, enough: float
) -> tuple[Tensor, Tensor]:
    """Run Levenberg-Marquardt on many small problems at once, until one misfit is small enough.

    Returns:
        The places, and the norms of their misfits.
    """
    function = torch.func.vmap(misfit)
    slope = torch.func.vmap(torch.func.jacfwd(misfit))
    rest, damping = function(places, targets), torch.ones(len(places), dtype=places.dtype)
    cost = rest.norm(dim=1)
    for _ in range(STEPS):
        jacobian = slope(places, targets).flatten(2)  # (N, equations, 4 or 6)
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
    """Return the last layer's mean input for noise images."""
    rng = torch.Generator().manual_seed(0)
    like = next(iter(seen.updates.values()))
    with torch.no_grad():
        noise = torch.rand(32, *seen.shape, generator=rng).to(like)
        return layer_inputs(seen.network, [name], noise)[0].mean(0).double().cpu()


# --- The layers before ------------------------------------------------------------------------------------------------


def _told(gradients: Tensors, name: str, pair: tuple[Half, Half], layers: list[Layer], last: LastLayer) -> Told:
    """Solve from the last layer backwards, as far as there are enough equations."""
    told = Told({f"{name}.weight": torch.outer(pair[0].error, pair[0].inputs), f"{name}.bias": pair[0].error})
    if len(last.columns) < len(pair[0].inputs):
        there = torch.zeros_like(pair[0].inputs, dtype=torch.bool)
        there[last.columns] = True
        told.known[f"{name}.weight"] = there.expand_as(told.own[f"{name}.weight"])
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
    """Return the layer as it sees one channel of its input: all channels have the same equations."""
    return layer._replace(shape=(1, *layer.shape[1:]))


def _product(inputs: Tensor, matrix: Tensor, wanted: Tensor) -> Tensor:
    """Return the gradient (channels, R) that the inputs cause."""
    return inputs.view(len(wanted), -1) @ matrix.T


def unreached(matrix: Tensor) -> Tensor:
    """Return the projection (R, R) on the orthogonal complement of the columns of a matrix (R, n).

    Example:
        >>> unreached(torch.tensor([[2.0], [0.0]])).tolist()
        [[0.0, 0.0], [0.0, 1.0]]
    """
    left, sizes, _ = torch.linalg.svd(matrix, full_matrices=False)
    basis = left[:, sizes > 1e-7 * sizes.max().clamp_min(torch.finfo(sizes.dtype).tiny)]
    left_over: Tensor = torch.eye(len(matrix), dtype=matrix.dtype) - basis @ basis.T
    return left_over


def _solved(layer: Layer, drive: tuple[Tensor, Tensor], matrix: Tensor, wanted: Tensor) -> Tensor | None:
    """Return the layer's input from the equations of its output and gradient, or None if they are too few or disagree.

    Args:
        layer: the layer whose input is wanted.
        drive: the layer's output, and the weight of each entry: saturated entries are less certain.
        matrix: (R, entries of a channel), from a channel of the input to its gradient.
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
    """Return the private images' own gradients (T, ...) by name, with the additional entries that `projected` needs."""
    result: dict[str, Tensor] = {}
    for name, tensor in gradients.items():
        rows, keeps, matrices = [], [], []
        for target, told in enumerate(found):
            mine = told.own.get(name)
            there = told.known.get(name, torch.tensor(mine is not None))
            rows.append(torch.zeros_like(tensor[target]) if mine is None else mine.to(tensor) * there.to(tensor))
            keeps.append(there.to(tensor).expand(tensor.shape[1:]))
            matrices.append(told.project.get(name))
        result[name] = torch.stack(rows)
        result[KEEP + name] = torch.stack(keeps)
        if any(matrix is not None for matrix in matrices):
            size = by_channel(tensor).shape[2]
            all_ = torch.eye(size, dtype=tensor.dtype, device=tensor.device)
            result[PROJECT + name] = torch.stack([all_ if m is None else m.to(tensor) for m in matrices])
    return result
