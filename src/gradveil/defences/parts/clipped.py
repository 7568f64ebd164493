"""Sums of clipped per-example gradients on a grid, and networks for which clipping does not bound anything."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from gradveil.defences.parts.grid import in_steps, toward_zero
from gradveil.errors import DefenceError
from gradveil.models.trunk import FeatureNetwork
from gradveil.networks.grads import example_gradients
from gradveil.networks.mixing import mixing_layer
from gradveil.networks.watch import input_of
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Tensors, Update

_MOST_ENTRIES, _MOST_EXAMPLES = 2**25, 64
_BLOCK = 2**18
"""Entries of gradients that are scaled and added together; more do not fit a processor's cache."""
_ROWS = 256
"""Images of a head that are summed together; more do not fit a processor's cache."""
BELOW = 1 - 2.0**-20
"""Gradients are clipped to this share of the bound, so that rounding never exceeds it."""


def clipped_sum(
    network: nn.Module, batch: Batch, like: Tensors, bound: float, grid: float, clip: float, copies: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Return the sum of per-example gradients, each scaled to a norm of at most ``bound``, and the share clipped.

    A gradient with NaN or infinity counts as zero. An error would tell the server, without any noise, that some image
    overflows under the weights that it chose.

    Args:
        network: in the mode in which it trains; it must treat each image by itself.
        batch: may be empty.
        like: tensors with the names and shapes of the trained parameters.
        bound: largest norm of a gradient, over all parameters together.
        grid: gradients are rounded toward zero to whole steps of this length, which have an exact sum; the result is
            in steps. 0 leaves them as they are.
        clip: the norm from which on a gradient counts as clipped.
        copies: entries of the batch that belong to one image and follow each other; their mean gradient is clipped.
    """
    entries = sum(tensor.numel() for tensor in like.values())
    size = max(1, min(_MOST_EXAMPLES // copies, _MOST_ENTRIES // max(entries, 1)))
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in like.items()}
    clipped = 0.0
    count = len(batch) // copies
    for start in range(0, count, size):
        part = batch[slice(start * copies, (start + size) * copies)]
        each = per_example_gradients(network, part, copies)  # (N, ...) by name
        norms = _norms(each)  # (N,)
        clipped += float(norms.gt(clip).sum())
        factors = 1 / (norms / bound).clamp(min=1.0)
        total = {name: tensor + _scaled_sum(each[name], factors, grid) for name, tensor in total.items()}
    return total, clipped / count if count else 0.0


def head_sum(network: FeatureNetwork, batch: Batch, bound: float, grid: float) -> tuple[Tensor, float]:
    r"""Return what `clipped_sum` does for a head on frozen features, in closed form by one product: (classes, D).

    The gradient of an image is the outer product of r = (probabilities - label) and its features f, with norm
    :math:`\|r\| \|f\|`. Both are rounded toward zero to whole steps of a power of two, which makes no norm larger,
    and so small that the product of matrices is exact in float64: no result lies beyond :math:`2^{53}`. The sum is
    rounded to the grid at the end. That can move two neighbouring sums apart by one step in each entry, so the bound
    is lowered by the norm of such a move.

    Args:
        network: the head and its trunk.
        batch: may be empty.
        bound: largest norm of a gradient.
        grid: step of the result.
    """
    head = network.head.weight
    if not len(batch):
        return torch.zeros_like(head, dtype=torch.float64), 0.0
    bound -= grid * math.sqrt(head.numel())
    if bound <= 0:
        raise DefenceError("The noise must be fine enough for a head of this size; lower the noise or the model.")
    fine = 2.0 ** -min(20, (52 - math.ceil(math.log2(max(2.0, len(batch) * bound)))) // 2)
    with torch.no_grad():
        features, labels = input_of(network, "head", batch.images), _one_hot(batch.labels, len(head))
        total, clipped = torch.zeros_like(head, dtype=torch.float64), 0
        for some, wanted in zip(torch.split(features, _ROWS), torch.split(labels, _ROWS), strict=True):
            part, count = _head_part(head.double(), some.to(torch.float64, copy=True), wanted, bound, fine)
            total, clipped = total + part, clipped + count
    return in_steps(total * fine**2, grid), clipped / len(batch)


def _head_part(weight: Tensor, features: Tensor, labels: Tensor, bound: float, fine: float) -> tuple[Tensor, int]:
    """Return some images' part of `head_sum`, in units of ``fine`` squared, and how many of them were clipped.

    Logits are float64, too: in float32, the other images of a batch could change the bits of an image's gradient.
    ``features`` are overwritten: more copies do not fit a processor's cache.
    """
    left = torch.softmax(features @ weight.T, 1).sub_(labels)  # (N, classes)
    lengths = left.norm(dim=1)
    bad = ~lengths.isfinite()  # features that are not finite have no finite logits
    if bool(bad.any()):
        left[bad], lengths[bad], features[bad] = 0.0, 0.0, 0.0
    right = toward_zero(features.div_(fine)).double()  # (N, D), whole numbers
    norms = lengths * right.norm(dim=1) * fine
    factors = 1 / (norms / bound).clamp(min=1.0)
    whole: Tensor = in_steps(left.mul_(factors[:, None]).mul_(BELOW), fine).T @ right  # whole numbers
    return whole, int((factors < 1).sum())


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    return labels if labels.is_floating_point() else F.one_hot(labels, classes)


def per_example_gradients(network: nn.Module, batch: Batch, copies: int = 1) -> dict[str, Tensor]:
    """Return the gradient of each image, the mean over its copies, in the network's current mode.

    They are computed one by one if layers draw random numbers.
    """
    if not any(isinstance(layer, _DropoutNd) and layer.training for layer in network.modules()):
        try:
            with torch.random.fork_rng(devices=[]):
                return example_gradients(network, batch.images, batch.labels, group_size=copies)
        except RuntimeError as error:
            if "randomness error mode" not in str(error):  # torch.func's error for a network that draws random numbers
                raise
    wanted = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    rows = []
    for index in range(0, len(batch), copies):
        one = batch[slice(index, index + copies)]
        with torch.enable_grad():
            loss = F.cross_entropy(network(one.images), one.labels)
        rows.append(torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True))
    return {name: torch.stack(column) for name, column in zip(wanted, zip(*rows, strict=True), strict=True)}


def refuse_mixing(defence: str, network: nn.Module, images: Tensor) -> None:
    """Raise `DefenceError` if an image's result depends on the others: then clipping would not bound its effect."""
    layer = mixing_layer(network, images)
    if layer is not None:
        raise DefenceError(
            f"Defence {defence!r} needs a network that treats each image by itself, but {layer} mixes the images of a "
            "batch. Use a network without statistics over the batch (--batch-norm freeze, or norm=group "
            "in the model's text)."
        )


def refuse_mixing_layers(defence: str, network: nn.Module) -> None:
    """Raise `DefenceError` if a layer mixes the images of a batch in training, or tracks their statistics."""
    for name, layer in network.named_modules():
        mixes = isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
        tracks = isinstance(layer, _NormBase) and layer.training and layer.running_mean is not None
        if mixes or tracks:
            raise DefenceError(
                f"Defence {defence!r} needs per-example gradients, but {name!r} ({type(layer).__name__}) mixes "
                "images or tracks their statistics. Train with --batch-norm freeze, or use a model with GroupNorm, "
                "such as resnet20:norm=group."
            )


def refuse_moved_buffers(defence: str, update: Update) -> None:
    """Raise `DefenceError` if local training changed buffers, which would be sent without noise."""
    moved = [name for name, change in update.buffers.items() if bool(change.any())]
    if moved:
        raise DefenceError(
            f"Defence {defence!r} protects gradients only, but local training also changed {', '.join(moved[:3])}, "
            "which would be sent. Freeze these layers (--batch-norm freeze), or use a model with GroupNorm."
        )


def augmented(batch: Batch, copies: int, flip: bool, rng: SecretStream) -> Batch:
    """Return each image ``copies`` times in a row, shifted by up to an eighth of its sides and perhaps mirrored.

    Pixels that come in from outside are mirror images of those inside.
    """
    many = Batch(*(part.repeat_interleave(copies, 0) for part in (batch.images, batch.labels, batch.sensitive)))
    count, _, height, width = many.images.shape
    if not count:
        return many
    edges = [side // 8 for side in (height, width)]
    padded = F.pad(many.images, (edges[1], edges[1], edges[0], edges[0]), mode="reflect")
    rows, columns = (
        rng.integers(0, 2 * edge + 1, (count, 1)) + torch.arange(side)
        for edge, side in zip(edges, (height, width), strict=True)
    )
    if flip:
        columns = torch.where(rng.bernoulli(0.5, (count, 1)), columns.flip(1), columns)
    device = padded.device
    places = torch.arange(count)[:, None, None].to(device), rows[:, :, None].to(device), columns[:, None, :].to(device)
    moved = padded.permute(0, 2, 3, 1)[places].permute(0, 3, 1, 2)  # (N * copies, C, H, W)
    return Batch(moved, many.labels, many.sensitive)


def _scaled_sum(each: Tensor, factors: Tensor, grid: float) -> Tensor:
    """Return the sum of one tensor's per-example gradients (N, ...), each times its factor, in steps.

    All of it is in float64: a tiny factor has few digits in float32, so that its product could exceed the bound. The
    step is a power of two, by which factors can be divided beforehand without any rounding.
    """
    total = torch.zeros(each[0].numel(), dtype=torch.float64, device=each.device)
    for rows, scale in _blocks(each, factors / grid if grid else factors):
        scaled = rows.to(torch.float64, copy=True).mul_(scale[:, None])
        if bool(scale.eq(0).any()):  # also of gradients with NaN or infinity
            scaled.masked_fill_(scale.eq(0)[:, None], 0.0)
        total += toward_zero(scaled).sum(0) if grid else scaled.sum(0)
    return total.view(each.shape[1:])


def _norms(each: Tensors) -> Tensor:
    """Return the norms (N,) of per-example gradients (N, ...) in float64; infinity for one with NaN or infinity."""
    parts = [
        torch.cat([rows.double().norm(dim=1) for rows, _ in _blocks(tensor, torch.zeros(len(tensor)))])
        for tensor in each.values()
    ]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return norms.nan_to_num(nan=math.inf, posinf=math.inf)


def _blocks(each: Tensor, factors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows (n, entries) of per-example gradients and their factors (n,), few enough for a processor's cache."""
    rows = each.reshape(len(each), -1)
    size = max(1, _BLOCK // max(rows.shape[1], 1))
    return zip(torch.split(rows, size), torch.split(factors, size), strict=True)
