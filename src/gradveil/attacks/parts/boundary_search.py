"""Distances of many images to a network's decision boundary, found by querying labels only."""

import math
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.subspace import Subspace
from gradveil.progress import tell

CHUNK = 512
"""Images that pass through the network at once; more do not fit the caches."""
TRIES = 10
"""Noise images tried as a start if no other image has a different label."""
HALVINGS = 8
"""How often a step that ends on the wrong side of the boundary is halved before giving up."""
LEAST = 10
"""The least number of queries for an estimate of the boundary's direction."""
FEWEST = 64
"""Queries that are always enough for a start and the first walk to the boundary."""


@dataclass(frozen=True)
class Found:
    """The nearest points found beyond the boundary.

    Attributes:
        distances: (N,) Euclidean distance from each image to the nearest point found beyond the boundary; 0 if the
            network misclassifies the image itself, the space's diagonal if no point was found.
        points: (N, C, H, W) the points, in [0, 1]; the image itself if none was found.
        asked: (N,) number of labels queried per image.
    """

    distances: Tensor
    points: Tensor
    asked: Tensor


class QueriedLabels:
    """Access to a network's predicted labels only, with a count of the queries per image."""

    def __init__(self, network: nn.Module, truth: Tensor, most: int) -> None:
        self._network, self._truth, self._most = network, truth, most
        self.asked = torch.zeros(len(truth), dtype=torch.int64)

    def ask(self, images: Tensor) -> Tensor:
        """Return the network's labels (M,) of images (M, C, H, W), without counting the queries."""
        pieces = torch.split(images.contiguous(memory_format=torch.channels_last), CHUNK)
        return torch.cat([self._network(piece).argmax(1) for piece in pieces])

    def beyond(self, points: Tensor, owners: Tensor) -> Tensor:
        """Return whether points (n, k, C, H, W) have other labels than their images ``owners`` (n,), as (n, k)."""
        self.asked[owners.cpu()] += points.shape[1]
        return self.ask(points.flatten(0, 1)).view(points.shape[:2]) != self._truth[owners][:, None]

    def left(self, owners: Tensor) -> Tensor:
        """Return how many queries each image has left, (n,)."""
        return self._most - self.asked[owners.cpu()]


@torch.no_grad()
def find_boundary(
    network: nn.Module,
    images: Tensor,
    truth: Tensor,
    subspace: Subspace,
    *,
    queries: int,
    estimates: int,
    rng: torch.Generator,
) -> Found:
    r"""Run HopSkipJump with random directions from a subspace, on all images in parallel.

    Each image starts at the nearest other image with a different label, or else at noise, and walks back to the
    boundary. There, :math:`b` random directions :math:`u_i` estimate the direction away from the image's class,

    .. math:: g = \sum_i (\varphi_i - \bar\varphi)\,u_i, \qquad \varphi_i = \pm 1 \text{ as } x_t + \delta u_i
        \text{ is labelled differently or not},

    a step along :math:`g / \|g\|` is halved until it ends beyond the boundary, and the walk back is repeated. In round
    :math:`t`, :math:`b` is ``estimates`` times :math:`\sqrt t`, and the first step is :math:`\|x_t - x\| / \sqrt t`. A
    round that ends farther away than it began is undone. All images share the same directions.

    Args:
        network: the network, in evaluation mode; only the position of its largest output is used.
        images: (N, C, H, W) in [0, 1].
        truth: (N,) the images' labels.
        subspace: source of the directions; its dimension m sets how closely the boundary is approached
            (:math:`m^{-3/2}` of the distance) and :math:`\delta = \|x_t - x\| / m`.
        queries: at most this many labels are queried per image.
        estimates: directions in the first round.
        rng: source of all random draws.
    """
    labels = QueriedLabels(network, truth, queries)
    first = labels.ask(images)
    labels.asked += 1
    points = _starts(labels, images, first, truth, rng)
    far = _lengths(points - images)
    lost = (first == truth) & (far == 0)
    halvings = math.ceil(1.5 * math.log2(max(subspace.dimension, 2)))
    going = far.nonzero()[:, 0]
    points[going] = _back(labels, images[going], points[going], going, halvings)
    for number in count(1):
        going = going[(labels.left(going) >= LEAST + HALVINGS + halvings).to(going.device)]
        if not len(going):
            break
        spare = int(labels.left(going).min()) - HALVINGS - halvings
        directions = subspace.directions(min(int(estimates * number**0.5), spare), rng).to(images)
        here, distance = points[going], _lengths(points[going] - images[going])
        away = _away(labels, here, distance / subspace.dimension, directions, going)
        stepped, moved = _step(labels, here, away, distance / number**0.5, going)
        mine = going[moved]
        back = _back(labels, images[mine], stepped[moved], mine, halvings)
        closer = _lengths(back - images[mine]) < distance[moved]
        points[mine[closer]] = back[closer]
        tell(min(1.0, float(labels.asked[going.cpu()].double().mean()) / queries))
    diagonal = math.sqrt(images[0].numel()) if len(images) else 0.0
    distances = torch.where(lost, diagonal, _lengths(points - images))
    return Found(distances, points, labels.asked)


def _starts(labels: QueriedLabels, images: Tensor, first: Tensor, truth: Tensor, rng: torch.Generator) -> Tensor:
    """Return a point with a different label per image; the image itself if it is misclassified or none is found."""
    flat, starts = images.flatten(1), images.clone()
    asking = (first == truth).nonzero()[:, 0]
    ways = torch.cdist(flat[asking], flat).masked_fill(first[None] == truth[asking, None], torch.inf)  # (n, N)
    if ways.numel():
        way, nearest = ways.min(1)
        starts[asking] = torch.where(_column(way.isfinite(), images), images[nearest], starts[asking])
        asking = asking[~way.isfinite()]
    for _ in range(TRIES):
        if not len(asking):
            break
        noise = torch.rand(images.shape[1:], generator=rng).to(images).expand(len(asking), *images.shape[1:])
        beyond = labels.beyond(noise[:, None], asking)[:, 0]
        starts[asking[beyond]] = noise[beyond]
        asking = asking[~beyond]
    return starts


def _back(labels: QueriedLabels, images: Tensor, points: Tensor, owners: Tensor, halvings: int) -> Tensor:
    """Return the point nearest to each image on the line to a point beyond the boundary, by bisection."""
    low, high = torch.zeros(len(images)).to(images), torch.ones(len(images)).to(images)
    for _ in range(halvings):
        middle = (low + high) / 2
        beyond = labels.beyond(_between(images, points, middle)[:, None], owners)[:, 0]
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return torch.where(_column(high < 1, points), _between(images, points, high), points)


def _away(labels: QueriedLabels, here: Tensor, delta: Tensor, directions: Tensor, owners: Tensor) -> Tensor:
    """Return the estimated direction (n, C, H, W) across the boundary, of length 1.

    Points outside [0, 1] are clamped first, and count for the direction in which they then lie.
    """
    found = torch.empty_like(here)
    size = max(1, CHUNK // len(directions))
    for start in range(0, len(here), size):
        some = slice(start, start + size)
        origin = here[some, None]
        points = (origin + delta[some].view(-1, 1, 1, 1, 1) * directions).clamp(0, 1)  # (n, b, C, H, W)
        signs = labels.beyond(points, owners[some]).to(here) * 2 - 1  # (n, b)
        mean = signs.mean(1, keepdim=True)
        weights = torch.where(mean.abs() == 1, signs, signs - mean)
        found[some] = (weights[:, None] @ (points - origin).flatten(2)).view_as(found[some])
    return found / _column(_lengths(found).clamp_min(1e-12), found)


def _step(labels: QueriedLabels, here: Tensor, away: Tensor, size: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Halve each step until it ends beyond the boundary; return the end points and for which images it succeeded."""
    stepped, waiting = here.clone(), torch.arange(len(here), device=here.device)
    moved = torch.zeros(len(here), dtype=torch.bool, device=here.device)
    for _ in range(HALVINGS):
        if not len(waiting):
            break
        tried = (here[waiting] + _column(size[waiting], here) * away[waiting]).clamp(0, 1)
        beyond = labels.beyond(tried[:, None], owners[waiting])[:, 0]
        stepped[waiting[beyond]], moved[waiting[beyond]] = tried[beyond], True
        waiting, size = waiting[~beyond], size / 2
    return stepped, moved


def _between(images: Tensor, points: Tensor, share: Tensor) -> Tensor:
    return torch.lerp(images, points, _column(share, images)).clamp(0, 1)


def _lengths(images: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(images.flatten(1), dim=1)
    return lengths


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))
