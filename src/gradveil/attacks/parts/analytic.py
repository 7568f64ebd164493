r"""Parts of the analytic attacks: the first Linear layer, a block before a network, and images read off its rows.

The gradient of row i of a Linear layer with bias is :math:`\sum_j \delta_{ij} x_j^T`, and that of its bias
:math:`\sum_j \delta_{ij}`, over the images j that activate it. Their ratio is the image itself if there is one, and a
mixture if there are several. Changes of weights serve as well as gradients, because a common factor cancels.
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.base import Scene
from gradveil.errors import ConfigError
from gradveil.models.base import move_input_hooks, normalisation_of
from gradveil.models.trunk import trunk_of
from gradveil.networks.space import Space
from gradveil.networks.watch import inputs_of
from gradveil.threat import Observation, Reconstruction

WHERE = ("inserted", "first")
"""Where a malicious server puts its rows: in a block before the network, or in the network's own first layer."""
INSERTED = "inserted"
_RANGE = 0.01
"""Root mean square by which an image may leave [0, 1]; a ratio of rounding errors leaves it by far."""
_TWIN = 1e-3
"""Two rows closer than this root mean square distance saw the same single image."""
_SAME = 0.02
"""Two guesses closer than this root mean square distance are of the same image."""
_GRID = 0.2
"""Largest root mean square distance to whole 8-bit values; random numbers have 0.29."""
_ENOUGH = 16
"""Pixels between black and white that are needed to recognise 8-bit values."""
_FAINT = 1e-6
"""Rows whose bias changed by a smaller share of the largest change hold only rounding errors."""


class Block(nn.Module):
    """A Linear layer on the image, a ReLU, and a slight shift of the image; the network after it keeps working.

    Attributes:
        rows: Linear from D pixels to one number per row.
        act: ReLU; or, with ``cap``, a ramp from 0 to ``cap`` that is constant on both sides.
        shift: Linear from these numbers back to D pixels.
    """

    def __init__(self, rows: int, shape: tuple[int, int, int], cap: float | None = None) -> None:
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.rows = nn.Linear(size, rows, device="meta").to_empty(device="cpu")  # no random draw
        self.act = nn.ReLU() if cap is None else nn.Hardtanh(0, cap)
        self.shift = nn.Linear(rows, size, device="meta").to_empty(device="cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Return images (N, C, H, W) plus a slight shift."""
        added: Tensor = self.shift(self.act(self.rows(images.flatten(1))))
        return images + added.view_as(images)


def insert(network: nn.Module, block: Block) -> nn.Module:
    """Return the network with the block before it; the network's normalisation now happens before the block."""
    whole = nn.Sequential(OrderedDict({INSERTED: block, "network": network})).to(next(network.parameters()))
    move_input_hooks(network, whole)
    return whole.train(network.training)


def set_rows(layer: nn.Linear, rows: Tensor, thresholds: Tensor, space: Space) -> None:
    """Make a layer on normalised pixels compute ``rows @ pixels - thresholds`` for pixels in [0, 1]."""
    black = space.from_pixels(torch.zeros(space.shape)).double().flatten()
    white = space.from_pixels(torch.ones(space.shape)).double().flatten()
    weight = rows.double() / (white - black)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-weight @ black - thresholds.double())


def set_shift(block: Block, columns: Tensor, pictures: Tensor, size: float) -> None:
    """Make a block add ``columns`` (D, rows), scaled to ``size`` times the contrast of normalised pictures (N, D).

    The mean of what it adds is subtracted.
    """
    with torch.no_grad():
        reached = block.act(block.rows(pictures.to(block.rows.weight))).cpu().double()  # (N, rows)
        added = (reached - reached.mean(0)) @ columns.double().T
        contrast = (pictures.double() - pictures.double().mean(0)).square().mean().sqrt()
        spread = added.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        scaled = columns.double() * (size * contrast / spread)
        block.shift.weight.copy_(scaled)
        block.shift.bias.copy_(-scaled @ reached.mean(0))


def public_images(scene: Scene) -> Tensor | None:
    """Return the public images, or None if they are too few to be representative."""
    if scene.public_data is None or len(scene.public_data) < _PUBLIC:
        return None
    return scene.public_data.images.cpu()


_PUBLIC = 20


def likely_pictures(network: nn.Module, scene: Scene, rng: torch.Generator, count: int = 500) -> Tensor:
    """Return images (N, C, H, W) in [0, 1] that resemble the private ones: public images, if there are enough.

    Otherwise smooth noise of several scales, with the mean and contrast of the network's normalisation, or of common
    photographs. At least a fifth of its variance is the brightness of whole images, as in photographs.
    """
    if (public := public_images(scene)) is not None:
        return public
    channels, height, width = scene.shape
    side, fields = 1, list[Tensor]()
    while side <= max(height, width):
        grey = torch.randn(count, 1, side, side, generator=rng)
        colour = torch.randn(count, channels, side, side, generator=rng)
        noise = 0.9**0.5 * grey + 0.1**0.5 * colour
        grown = F.interpolate(noise, (height, width), mode="bilinear", align_corners=True)
        fields.append(grown / grown.std())
        side *= 2
    rest = 0.8 / max(1, len(fields) - 1)
    shares = [0.2] + [rest] * (len(fields) - 1)
    field = sum((share**0.5 * one for share, one in zip(shares, fields, strict=True)), torch.zeros(()))
    normalisation = normalisation_of(network)
    mean, std = (normalisation.mean, normalisation.std) if normalisation else ((0.45,), (0.26,))
    return (field * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)).clamp(0, 1)


def first_linear(network: nn.Module, shape: tuple[int, int, int]) -> str:
    """Return the name of the first layer, a Linear with bias whose input is the flattened, normalised image.

    Raises:
        ConfigError: if there is none.
    """
    probe = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    like = next(network.parameters())
    layers = [
        (name, layer)
        for name, layer in network.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    names: list[str] = [name for name, layer in layers if isinstance(layer, nn.Linear) and layer.bias is not None]
    training = network.training
    with torch.no_grad(), inputs_of(network, names) as reached:
        network.eval()(probe.to(like))
        network.train(training)
    wanted = Space(network, shape, like).from_pixels(probe).flatten(1)
    for name in names:
        if name in reached and reached[name].shape == wanted.shape and torch.equal(reached[name], wanted):
            return name
    first = type(layers[0][1]).__name__ if layers else "nothing"
    way_out = "Use --model mlp or --model logistic, or an attack that inserts a layer, such as imprint."
    if trunk_of(network) is not None:
        first, way_out = (
            "a head on frozen features",
            "Use --attacks linear,posterior,lti, which find the way back from features.",
        )
    raise ConfigError(
        f"The network's first layer must be a Linear with bias on the flattened image, got {first}. {way_out}"
    )


def two_linears(network: nn.Module, shape: tuple[int, int, int]) -> tuple[nn.Linear, nn.Linear]:
    """Return the first two Linear layers of a network that begins with Linear, ReLU and Linear on the flattened image.

    Raises:
        ConfigError: if it does not.
    """
    name = first_linear(network, shape)
    leaves = [layer for layer in network.modules() if not list(layer.children())]
    at = leaves.index(network.get_submodule(name))
    here, *rest = [layer for layer in leaves[at:] if not isinstance(layer, (nn.Flatten, nn.Identity, nn.Dropout))]
    if (
        len(rest) > 1
        and isinstance(here, nn.Linear)
        and isinstance(rest[0], nn.ReLU)
        and isinstance(rest[1], nn.Linear)
    ):
        return here, rest[1]
    kinds = ", ".join(type(layer).__name__ for layer in (here, *rest)[:3])
    raise ConfigError(
        f"where=first needs a network that begins with Linear, ReLU and Linear, got {kinds}. "
        "Use --model mlp:activation=relu, or where=inserted."
    )


class Rows(NamedTuple):
    """The change of a Linear layer on the image, for T targets, in double precision.

    Attributes:
        weight: (T, rows, D), change of the weight.
        bias: (T, rows), change of the bias.
    """

    weight: Tensor
    bias: Tensor


def rows_of(seen: Observation, name: str) -> Rows:
    """Return the changes of a layer.

    Raises:
        ConfigError: if the layer was not sent.
    """
    keys = [f"{name}.weight", f"{name}.bias"]
    missing = [key for key in keys if key not in seen.updates]
    if missing:
        raise ConfigError(
            f"The update must hold the change of {keys[0]} and {keys[1]}, got none of {', '.join(missing)}. "
            "Let the client train on what the attack's alter gives, and keep this layer shared."
        )
    return Rows(*(seen.updates[key].double().cpu() for key in keys))


def ratios(rows: Rows, space: Space) -> Tensor:
    """Return the image or mixture (T, rows, D) that each row saw, in pixels; 0 if it saw nothing."""
    there = rows.bias != 0
    normalised = rows.weight / torch.where(there, rows.bias, 1)[..., None]
    pixels = space.to_pixels(normalised.view(*normalised.shape[:2], *space.shape)).flatten(2)
    return torch.where(there[..., None], pixels, 0)


class Candidates(NamedTuple):
    """K images that one target's update may hold.

    Attributes:
        images: (K, D) in pixels, not clamped.
        strength: (K,) change of the bias by each.
        support: (K,) number of equal candidates, itself included.
    """

    images: Tensor
    strength: Tensor
    support: Tensor


def strong(images: Tensor, strength: Tensor, most: int | None = None) -> Candidates:
    """Return the candidates (K, D) above rounding errors, the strongest first, and at most ``most`` of them."""
    order = strength.argsort(descending=True, stable=True)
    kept = order[strength[order] > _FAINT * strength.max()][:most]
    return Candidates(images[kept], strength[kept], torch.ones(len(kept), dtype=torch.int64))


def supported(found: Candidates) -> Candidates:
    """Return the candidates with their support: rows often agree on a single image, but hardly ever on a mixture."""
    size = found.images.shape[1] ** 0.5
    distance = torch.cdist(found.images, found.images) / size  # (K, K)
    return found._replace(support=(distance < _TWIN).sum(1).clamp_min(1))


def outside(images: Tensor) -> Tensor:
    """Return the root mean square by which images (K, D) leave [0, 1].

    Example:
        >>> outside(torch.tensor([[0.5, 1.0], [0.5, 2.0]]))
        tensor([0.0000, 0.7071])
    """
    return (images - images.clamp(0, 1)).square().mean(1).sqrt()


def on_grid(images: Tensor) -> Tensor:
    """Return whether images (K, D) have whole 8-bit values, as single pictures have and mixtures do not."""
    scaled = images * 255
    inner = (scaled > 0.5) & (scaled < 254.5)  # a black background is black in mixtures too
    off = torch.where(inner, scaled - scaled.round(), 0).square().sum(1) / inner.sum(1).clamp_min(1)
    return (off.sqrt() < _GRID) & (inner.sum(1) >= _ENOUGH)


def best(found: Candidates, count: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of at most ``count`` different candidates, best first, and whether each is surely one image.

    Candidates with whole 8-bit values come first, then those inside [0, 1], by support and strength.
    """
    alone = on_grid(found.images) & (outside(found.images) < _RANGE)
    sure = alone | ((found.support > 1) & (outside(found.images) < _RANGE))
    keys = (found.strength, found.support, outside(found.images) < _RANGE, sure, alone)  # the last counts most
    order = torch.arange(len(found.images))
    for key in keys:
        order = order[key[order].to(torch.float64).argsort(descending=True, stable=True)]
    kept = list[int]()
    for number in order.tolist():
        if len(kept) == count:
            break
        others = found.images[kept]
        if not len(others) or (others - found.images[number]).square().mean(1).sqrt().min() >= _SAME:
            kept.append(number)
    chosen = torch.tensor(kept, dtype=torch.int64)
    return chosen, sure[chosen]


def collect(seen: Observation, found: list[Candidates], mixed: str) -> Reconstruction:
    """Return each target's best candidates, and no guess for its other images.

    ``mixed`` describes in ``why`` what guesses may be that are not surely single images.
    """
    like = next(iter(seen.updates.values()))
    images = torch.full((seen.num_targets, seen.num_examples, *seen.shape), torch.nan, dtype=torch.float64)
    loss = torch.full((seen.num_targets,), torch.nan, dtype=torch.float64)
    why, converged = list[str](), list[bool]()
    for target, some in enumerate(found):
        chosen, sure = best(some, seen.num_examples)
        guesses = some.images[chosen]
        images[target, : len(chosen)] = guesses.view(-1, *seen.shape).clamp(0, 1)
        if len(chosen):
            loss[target] = outside(guesses).mean()
        converged.append(len(chosen) > 0 and bool((outside(guesses) < _RANGE).all()))
        why.append(_remark(seen.num_examples, len(chosen), int(sure.sum()), mixed))
    return Reconstruction(
        images=images.to(like),
        labels=torch.full(images.shape[:2], -1, device=like.device),
        loss=loss.to(like),
        converged=torch.tensor(converged, device=like.device),
        why=tuple(why),
    )


def _remark(wanted: int, given: int, sure: int, mixed: str) -> str:
    if wanted == given == 1 or sure == wanted:
        return ""
    return f"{given} guesses for {wanted} images, {sure} surely single ones; the others may be {mixed}"


def nothing(seen: Observation, count: int, reason: str) -> Reconstruction:
    """Return no guess for any target, for a reason that ``why`` states."""
    like = next(iter(seen.updates.values()))
    return Reconstruction(
        images=like.new_full((seen.num_targets, count, *seen.shape), torch.nan),
        labels=torch.full((seen.num_targets, count), -1, device=like.device),
        loss=like.new_full((seen.num_targets,), torch.nan),
        converged=torch.zeros(seen.num_targets, dtype=torch.bool, device=like.device),
        why=(reason,) * seen.num_targets,
    )


def exact_remark(wanted: int, given: int, sure: int) -> str:
    """Return what to say of a batch of which ``given`` images were rebuilt, ``sure`` of them exactly; "" if all."""
    if sure == wanted:
        return ""
    drowned = f"; {wanted - given} of {wanted} images do not stand out from noise or rounding" if given < wanted else ""
    return f"{sure} of {wanted} images surely exact{drowned}"
