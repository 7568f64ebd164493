"""Imitate an inversion: a decoder learns from images with the errors that it will meet, without inverting them all.

An attack that inverts gradients blurs images, shrinks their contrast and leaves noise. An attacker who knows the
defence plays a few clients with public images, inverts their updates, and compares what it gets with what the played
networks saw. `Imitation` then makes such errors in any number of other images.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.parts.stages import Inversion
from gradveil.metrics import align
from gradveil.threat import Knowledge, Observation, ThreatModel
from gradveil.threat.rehearsal import rehearse, unplayable
from gradveil.types import Batch

Filter = Callable[[Tensor], Tensor]
"""A map from images (N, C, H, W) to images of the same shape."""
_SIDE = 5
"""Pixels on a side of a filter's patch."""


@dataclass(frozen=True)
class Imitation:
    r"""Change images as an attack that inverts them would.

    .. math:: \tilde x = \mathrm{clip}_{[0,1]}\big(K\,\mathrm{patch}(x) + b + r\big)

    The filter K, b is fitted to exact and inverted images. The rest r is drawn from what the filter leaves unexplained
    in them, as a whole image, since errors of neighbours and colours belong together.

    Attributes:
        blurred: the filter.
        rests: (K, C, H, W) what it leaves unexplained.
    """

    blurred: Filter
    rests: Tensor

    @staticmethod
    def of(exact: Tensor, inverted: Tensor) -> "Imitation":
        """Learn from images (K, C, H, W) and what the attack made of them."""
        blurred = learned_filter(exact, inverted)
        return Imitation(blurred, inverted - blurred(exact))

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Return images (N, C, H, W) in [0, 1] with errors of their own."""
        chosen = torch.randint(len(self.rests), (len(images),), generator=rng)
        return (self.blurred(images.cpu()) + self.rests[chosen]).clamp(0, 1).to(images)


def imitated(
    invert: Inversion, seen: Observation, count: int, rng: torch.Generator, keep: float = 1.0
) -> Imitation | None:
    """Learn the errors of an attack from updates of played clients, or return None if it has no guess for any.

    Args:
        invert: the attack.
        seen: what the server saw; `unrehearsable` must be "".
        count: number of played clients; one update of each is inverted.
        rng: source of all draws.
        keep: share of the updates to learn from, those with the least loss of the attack.
    """
    public, images = seen.public_data, seen.num_images
    device = next(iter(seen.updates.values())).device
    clients = [_some(public, images, rng).to(device) for _ in range(count)]
    looks = 1 if seen.num_examples == images else 2  # a client that uses some of its images per round has several
    told = ThreatModel(seen.threat.knows | {Knowledge.ENCODINGS})  # the attacker made these encodings itself
    seed = int(torch.randint(2**62, (), generator=rng))
    played = rehearse(replace(seen, threat=told), clients, seed, looks).only(range(0, looks * count, looks))
    found = invert(played.without(Knowledge.ENCODINGS), rng)
    kept = least_loss(found.loss.detach().cpu(), keep, fewest=1)
    exact = played.encodings.images.detach().cpu().view(count, -1, *seen.shape)[kept]
    pairs = zip(exact, found.images.detach().cpu()[kept], strict=True)
    truth, guess = exact.flatten(0, 1), torch.cat([align(own, guesses) for own, guesses in pairs])
    usable = guess.flatten(1).isfinite().all(1)
    return Imitation.of(truth[usable], guess[usable]) if bool(usable.any()) else None


def least_loss(loss: Tensor, share: float, fewest: int) -> Tensor:
    """Return a mask (E,) of the share with the least loss, of at least ``fewest``; of all if losses are equal.

    Example:
        >>> least_loss(torch.tensor([3.0, 1.0, torch.nan, 2.0]), 0.5, fewest=1)
        tensor([False,  True, False,  True])
    """
    loss = loss.nan_to_num(torch.inf)
    count = max(fewest, round(share * len(loss)))
    if bool((loss == loss[0]).all()):
        return torch.ones(len(loss), dtype=torch.bool)
    mask = torch.zeros(len(loss), dtype=torch.bool)
    mask[loss.argsort(stable=True)[:count]] = True
    return mask


def unrehearsable(seen: Observation) -> str:
    """Return why an attacker can't learn from played clients, or "" if it can."""
    if not seen.knows(Knowledge.PUBLIC_DATA) or len(seen.public_data) < seen.num_images:
        return f"a played client needs {seen.num_images} public images"
    if min(seen.shape[1:]) <= _SIDE // 2:
        return f"images of {seen.shape[1]} by {seen.shape[2]} pixels are too small to learn a filter"
    if not seen.single_step:
        return "updates of several local steps show different images"
    return unplayable(seen)


def learned_filter(known: Tensor, wanted: Tensor, side: int = _SIDE) -> Filter:
    """Return the linear map from patches of images (N, C, H, W) to the wanted pixel in the middle, by ridge regression.

    Example:
        >>> images = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        >>> bool((learned_filter(1 - images, images)(1 - images) - images).abs().max() < 1e-2)
        True
    """

    def rows(images: Tensor) -> Tensor:
        padded = F.pad(images, (side // 2,) * 4, mode="reflect")
        patches = F.unfold(padded, side).transpose(1, 2)  # (N, pixels, C * side * side)
        return torch.cat([patches, torch.ones_like(patches[..., :1])], 2)

    given, pixels = rows(known).flatten(0, 1), wanted.flatten(2).transpose(1, 2).flatten(0, 1)
    square = given.T @ given
    ridge = 1e-4 * square.diagonal().mean() * torch.eye(len(square)).to(square)
    solution: Tensor = torch.linalg.solve(square + ridge, given.T @ pixels)

    def apply(images: Tensor) -> Tensor:
        return (rows(images) @ solution).transpose(1, 2).reshape(images.shape)

    return apply


def _some(public: Batch, count: int, rng: torch.Generator) -> Batch:
    """Return a client's images: random public ones, each once."""
    return public[torch.randperm(len(public), generator=rng)[:count].to(public.images.device)]
