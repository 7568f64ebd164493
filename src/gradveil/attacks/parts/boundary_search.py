"""How far images are from a network's decision boundary, felt for with questions for labels only; many at once."""

import math
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.subspace import Subspace
from gradveil.progress import tell

CHUNK = 512
"""Images that go through the network at once: many, but not more than the caches hold."""
TRIES = 10
"""Images of noise that are tried as a start, where no other image is answered differently."""
HALVINGS = 8
"""How often a step that falls back over the boundary is halved before it is given up."""
LEAST = 10
"""An estimate of the boundary's direction from fewer questions is not worth a step."""
FEWEST = 64
"""Questions that suffice for a start and the first way to the boundary, whatever the image."""


@dataclass(frozen=True)
class Found:
    """What was felt of the boundary.

    Attributes:
        distances: (N,) Euclidean length of the way from each image to the nearest point found beyond the boundary; 0
            where the network is wrong about the image itself, the space's diagonal where no such point was found.
        points: (N, C, H, W) those points, in [0, 1]; the image itself where there is none.
        asked: (N,) how many labels were asked for, for each image.
    """

    distances: Tensor
    points: Tensor
    asked: Tensor


class Labels:
    """The network to one who gets nothing but its labels; keeps count of what is asked for which image."""

    def __init__(self, network: nn.Module, truth: Tensor, most: int) -> None:
        self._network, self._truth, self._most = network, truth, most
        self.asked = torch.zeros(len(truth), dtype=torch.int64)

    def ask(self, images: Tensor) -> Tensor:
        """(M,) the network's labels of images (M, C, H, W); not counted for anyone yet."""
        pieces = torch.split(images.contiguous(memory_format=torch.channels_last), CHUNK)
        return torch.cat([self._network(piece).argmax(1) for piece in pieces])

    def beyond(self, points: Tensor, owners: Tensor) -> Tensor:
        """(n, k) whether points (n, k, C, H, W), asked for ``owners`` (n,), are labelled other than their owner is."""
        self.asked[owners.cpu()] += points.shape[1]
        return self.ask(points.flatten(0, 1)).view(points.shape[:2]) != self._truth[owners][:, None]

    def left(self, owners: Tensor) -> Tensor:
        """(n,) how many questions each may still ask."""
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
    r"""HopSkipJump with random directions from a subspace, on all images side by side.

    Each image begins at the nearest other one that is labelled differently, else at noise, and walks back to the
    boundary. There :math:`b` random directions :math:`u_i` say where it leads away from the image,

    .. math:: g = \sum_i (\varphi_i - \bar\varphi)\,u_i, \qquad \varphi_i = \pm 1 \text{ as } x_t + \delta u_i
        \text{ is labelled differently or not},

    a step along :math:`g / \|g\|` is halved until it ends beyond the boundary, and the walk back begins again. In the
    :math:`t`-th time, :math:`b` is ``estimates`` times :math:`\sqrt t` and the step :math:`\|x_t - x\| / \sqrt t`
    before it is halved. What ends farther away than it began is taken back. All images share the same directions.

    Args:
        network: in evaluation mode; only the largest of its outputs is looked at.
        images: (N, C, H, W) in [0, 1].
        truth: (N,) their labels.
        subspace: where directions are drawn from; its dimension m sets how closely the boundary is approached
            (:math:`m^{-3/2}` of the way) and :math:`\delta = \|x_t - x\| / m`.
        queries: labels that may be asked for each image; never exceeded.
        estimates: directions of the first round.
        rng: for all random draws.
    """
    labels = Labels(network, truth, queries)
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


def _starts(labels: Labels, images: Tensor, first: Tensor, truth: Tensor, rng: torch.Generator) -> Tensor:
    """For each image a point that is labelled differently; the image itself if it is, or if none is found."""
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


def _back(labels: Labels, images: Tensor, points: Tensor, owners: Tensor, halvings: int) -> Tensor:
    """The nearest point to each image on the straight way back from a point beyond the boundary, by bisection."""
    low, high = torch.zeros(len(images)).to(images), torch.ones(len(images)).to(images)
    for _ in range(halvings):
        middle = (low + high) / 2
        beyond = labels.beyond(_between(images, points, middle)[:, None], owners)[:, 0]
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return torch.where(_column(high < 1, points), _between(images, points, high), points)


def _away(labels: Labels, here: Tensor, delta: Tensor, directions: Tensor, owners: Tensor) -> Tensor:
    """(n, C, H, W) of length 1: the estimated direction in which points near the boundary lie beyond it.

    Points that left [0, 1] are brought back first, and count for the direction in which they then lie.
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


def _step(labels: Labels, here: Tensor, away: Tensor, size: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Where a step ends beyond the boundary, halved until it does, and for which images it does."""
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
