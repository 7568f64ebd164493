"""Recover images from many mixtures of them: first which mixtures share images, then the shares, then the images.

Pixels are scaled to [-1, 1] here. An `Encoder` makes mixtures as the defence does, so that an attacker can make its own
from public images. If the defence flips signs, only absolute values are compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree
from torch import Tensor, nn

Encoder = Callable[[Tensor, int, torch.Generator], tuple[Tensor, Tensor]]
"""A function from images (N, C, H, W) and a count to encodings (count, C, H, W) and coefficients (count, N)."""

_TINY = 1e-12
_SIGN_TURNS = 30
"""How often signs and images are alternated; a third of it if there is only one start."""


def similarity_network(channels: int, width: int) -> nn.Sequential:
    """Return a small network whose outputs for two encodings are more alike the more of their images they share."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.Flatten(),
    )


def similarities(network: nn.Module, encodings: Tensor) -> Tensor:
    """Return the cosine (E, E) of the network's outputs for each pair of encodings, after subtracting their mean."""
    found = torch.cat([network(some) for some in torch.split(encodings, 256)])
    found = found - found.mean(0)
    return overlaps(found)


def overlaps(coefficients: Tensor) -> Tensor:
    """Return the cosine (E, E) of the coefficients (E, N) of each pair of encodings, which the network learns."""
    unit = F.normalize(coefficients, dim=1, eps=_TINY)
    return unit @ unit.T


def train_similarity(
    public: Tensor, encoder: Encoder, *, num_images: int, steps: int, width: int, batch: int, rng: torch.Generator
) -> nn.Module:
    """Train a similarity network on encodings that the attacker makes of public images, by Adam on the squared error.

    Args:
        public: (M, C, H, W) in [-1, 1].
        encoder: mixes images as the defence does.
        num_images: images behind a batch of encodings, as many as a client has.
        steps: steps of Adam.
        width: channels of the network.
        batch: encodings per step.
        rng: source of all draws, initial weights included.
    """
    network = _seeded(similarity_network(public.shape[1], width), rng)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    off = ~torch.eye(batch, dtype=torch.bool)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = public[torch.randperm(len(public), generator=rng)[:num_images]]
            encodings, coefficients = encoder(chosen, batch, rng)
            error = similarities(network, encodings) - _centred(overlaps(coefficients))
            optimiser.zero_grad()
            error[off].square().mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            scheduler.step()
    return network.eval().requires_grad_(False)


def _centred(gram: Tensor) -> Tensor:
    """Return the cosines of vectors after subtracting their mean, from the cosines of the vectors themselves."""
    mean = gram.mean(0, keepdim=True)
    about = gram - mean - mean.T + gram.mean()
    size = about.diagonal().clamp_min(_TINY).sqrt()
    return about / size[:, None] / size[None]


def estimated_coefficients(
    similarity: Tensor, num_images: int, *, own: float, steps: int, rng: torch.Generator
) -> Tensor:
    """Return coefficients (E, N) whose overlaps equal the similarities, up to the order of the images.

    Starts from an even assignment of encodings to their main image (`dealt`), whose share is about ``own``, and refines
    it by Adam on the logits of each row.
    """
    off = ~torch.eye(len(similarity), dtype=torch.bool)
    owner = dealt(similarity, num_images, rng)
    first = torch.full((len(owner), num_images), (1 - own) / max(1, num_images - 1))
    first[torch.arange(len(owner)), owner] = own
    logits = (first + 1e-3).log().requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.05)
    with torch.enable_grad():
        for _ in range(steps):
            loss = (_centred(overlaps(logits.softmax(1))) - similarity)[off].square().mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return logits.detach().softmax(1)


def dealt(similarity: Tensor, num_images: int, rng: torch.Generator, rounds: int = 12) -> Tensor:
    """Return the main image (E,) of each encoding: clusters of even size, by optimal assignment.

    Starts from the encodings that are least alike; then assigns all encodings to the clusters' means, repeatedly.
    """
    count = len(similarity)
    heads = [int(torch.randint(count, (), generator=rng))]
    while len(heads) < num_images:
        heads.append(int(similarity[:, heads].amax(1).argmin()))
    closeness = similarity[:, heads]
    seats = np.repeat(np.arange(num_images), -(-count // num_images))
    owner = torch.zeros(count, dtype=torch.long)
    for _ in range(rounds):
        rows, columns = linear_sum_assignment(-closeness.numpy()[:, seats])
        new = torch.empty_like(owner)
        new[torch.from_numpy(rows)] = torch.from_numpy(seats[columns])
        if torch.equal(new, owner):
            break
        owner = new
        members = F.one_hot(owner, num_images).to(similarity)
        others = members.sum(0) - members
        plain = similarity - torch.diag(similarity.diagonal())
        closeness = plain @ members / others.clamp_min(1)
    return owner


class SoftLabels(NamedTuple):
    """What soft labels tell about mixtures: the shares of a class's images add up to the class's probability.

    Attributes:
        shares: (E, classes) the encodings' soft labels.
        classes: (N,) the class of each image.
    """

    shares: Tensor
    classes: Tensor

    @staticmethod
    def of(shares: Tensor, num_images: int) -> "SoftLabels | None":
        """Return how many images each class must have, as all are mixed in equally often; None if nothing fits.

        Example:
            >>> SoftLabels.of(torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.7, 0.3, 0.0]]), 3).classes
            tensor([0, 0, 1])
        """
        expected = num_images * shares.mean(0)
        counts = torch.where(shares.amax(0) > _PRESENT, expected.round().clamp_min(1), torch.zeros(()))
        while float(counts.sum()) != num_images:
            sign = 1.0 if float(counts.sum()) < num_images else -1.0
            open_ = counts > (0 if sign > 0 else 1)
            if not bool(open_.any()):
                return None
            counts[torch.where(open_, sign * (expected - counts), -torch.inf).argmax()] += sign
        return SoftLabels(shares, torch.arange(len(counts)).repeat_interleave(counts.long()))

    def fitted(self, mixing: Tensor) -> Tensor:
        """Return the coefficients (E, N), scaled so that those of each class have the right sum."""
        members = F.one_hot(self.classes, self.shares.shape[1]).to(mixing)  # (N, classes)
        totals = mixing @ members
        even = (self.shares / members.sum(0).clamp_min(1))[:, self.classes]
        scaled = mixing * (self.shares / totals.clamp_min(_TINY))[:, self.classes]
        return torch.where(totals[:, self.classes] > _TINY, scaled, even)


_PRESENT = 1e-3
"""A class is among the images if its share reaches this in some encoding."""


def labelled_coefficients(similarity: Tensor, labels: SoftLabels, *, steps: int, rng: torch.Generator) -> Tensor:
    """Return coefficients (E, N) with the labels' sums whose overlaps equal the similarities.

    An image whose class is its own has the class's probability as its coefficient. Images of one class share theirs,
    in proportions found by Adam from a random start.
    """
    logits = torch.randn(len(similarity), len(labels.classes), generator=rng).requires_grad_()
    if len(set(labels.classes.tolist())) == len(labels.classes):
        return labels.fitted(logits.detach().exp())
    off = ~torch.eye(len(similarity), dtype=torch.bool)
    optimiser = torch.optim.Adam([logits], lr=0.05)
    with torch.enable_grad():
        for _ in range(steps):
            loss = (_centred(overlaps(labels.fitted(logits.exp()))) - similarity)[off].square().mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return labels.fitted(logits.detach().exp())


@dataclass(frozen=True)
class Mixtures:
    """Encodings of one client, and how they were mixed.

    Attributes:
        encodings: (E, D) in [-1, 1]; absolute values if ``flipped``.
        flipped: whether the signs of pixels are unknown.
        parts: at most this many of the client's images are in one encoding.
        background: (D,) mean of the other images that were mixed in, or zero if there are none.
        labels: known soft labels that the coefficients must agree with, or None.
        known: whether the first coefficients are the true ones.
    """

    encodings: Tensor
    flipped: bool
    parts: int
    background: Tensor
    labels: SoftLabels | None = None
    known: bool = False


class Solution(NamedTuple):
    """The images behind a client's encodings.

    Attributes:
        images: (N, D) in [-1, 1].
        coefficients: (E, N) share of each image in each encoding.
        residual: root mean square of what images and coefficients do not explain.
    """

    images: Tensor
    coefficients: Tensor
    residual: float


def solved(mixtures: Mixtures, coefficients: Tensor, *, rounds: int, restarts: int, rng: torch.Generator) -> Solution:
    r"""Solve Eq. 3 of the LODA paper, :math:`\min_X \| |MX| - |E| \|^2`, alternating between X and M.

    Given M and the signs of MX, X is a least-squares problem with one matrix for all pixels. Given X, so is M, whose
    rows have at most ``parts`` positive coefficients and no negative ones. Signs are those of the last MX; in the
    first, the middle and the last round each pixel also tries several random signs and keeps those that explain it
    best. The background fills what a row of M leaves of one. If M is known, only X and the signs are searched.

    Args:
        mixtures: the encodings.
        coefficients: (E, N), a first estimate of M.
        rounds: how often X and M are solved.
        restarts: random signs that each pixel tries.
        rng: source of the random signs.
    """
    mixing, images = coefficients, torch.zeros(coefficients.shape[1], mixtures.encodings.shape[1])
    for turn in range(rounds):
        if mixtures.flipped:
            starts = restarts if turn in (0, rounds // 2, rounds - 1) else 1
            images = _signed_images(mixtures, mixing, images, starts, rng)
        else:
            images = _images(mixtures.encodings, mixing, mixtures.background)
        if turn < rounds - 1 and not mixtures.known:
            mixing = _mixing(mixtures, images, mixing)
    fit = mixing @ images + (1 - mixing.sum(1, keepdim=True)) * mixtures.background
    residual = ((fit.abs() if mixtures.flipped else fit) - mixtures.encodings).square().mean().sqrt()
    return Solution(images.clamp(-1, 1), mixing, float(residual))


def _images(targets: Tensor, mixing: Tensor, background: Tensor) -> Tensor:
    """Return the least-squares images, with a slight ridge that keeps images in no encoding finite."""
    wanted = targets - (1 - mixing.sum(1, keepdim=True)) * background
    square = mixing.T @ mixing
    ridge = 1e-4 * square.diagonal().mean() * torch.eye(len(square))
    found: Tensor = torch.linalg.solve(square + ridge, mixing.T @ wanted)
    return found


def _signed_images(mixtures: Mixtures, mixing: Tensor, images: Tensor, restarts: int, rng: torch.Generator) -> Tensor:
    """Alternate between signs and images, and keep for each pixel the best of several starts."""
    sizes, background = mixtures.encodings, mixtures.background
    best, least = images, torch.full((sizes.shape[1],), torch.inf)
    rest = (1 - mixing.sum(1, keepdim=True)) * background
    for attempt in range(restarts):
        found = images if attempt == 0 and bool(images.any()) else 0.5 * torch.randn(images.shape, generator=rng)
        for _ in range(_SIGN_TURNS if restarts > 1 else _SIGN_TURNS // 3):
            signs = (mixing @ found + rest).sign()
            found = _images(torch.where(signs == 0, 1.0, signs) * sizes, mixing, background)
        error = ((mixing @ found + rest).abs() - sizes).square().mean(0)
        better = error < least
        best, least = torch.where(better, found, best), torch.where(better, error, least)
    return best


def _mixing(mixtures: Mixtures, images: Tensor, mixing: Tensor) -> Tensor:
    """Return the coefficients for given images: projected gradient steps that keep the largest ones.

    A row sums to at most 1, or to exactly 1 if there is no background.
    """
    background, parts = mixtures.background, mixtures.parts
    shapes = images - background  # a share of an image replaces as much of the background
    wanted = mixtures.encodings
    length = torch.linalg.matrix_norm(shapes @ shapes.T, 2).clamp_min(_TINY)
    for _ in range(40):
        fit = mixing @ shapes + background
        if mixtures.flipped:
            wanted = torch.where(fit < 0, -1.0, 1.0) * mixtures.encodings
        mixing = (mixing - (fit - wanted) @ shapes.T / length).clamp_min(0)
        if parts < mixing.shape[1]:
            edge = mixing.topk(parts, dim=1).values[:, -1:]
            mixing = mixing.where(mixing >= edge, torch.zeros(()))
        total = mixing.sum(1, keepdim=True)
        whole = not bool(background.any())
        mixing = mixing / total.clamp_min(_TINY) if whole else mixing / total.clamp_min(1)
        if mixtures.labels is not None:
            mixing = mixtures.labels.fitted(mixing)
    return mixing


def agreed_signs(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return signs (D,) of -1 and 1 for the pixels of images (N, D) that make neighbours vary alike across images.

    Absolute values determine a pixel in all images up to one common sign. The signs of neighbours, in space and among
    channels, are aligned along the pairs that agree most (a maximum spanning tree). One overall sign remains open.
    """
    channels, height, width = shape
    number = torch.arange(channels * height * width).view(shape)
    pairs = [(number[:, 1:], number[:, :-1]), (number[:, :, 1:], number[:, :, :-1]), (number[1:], number[:-1])]
    first, second = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    unit = images / images.norm(dim=0, keepdim=True).clamp_min(_TINY)
    alike = (unit[:, first] * unit[:, second]).sum(0)
    size = len(number.flatten())
    weights = (2 - alike.abs()).double().numpy()  # never zero, which would mean no edge
    tree = minimum_spanning_tree(coo_matrix((weights, (first.numpy(), second.numpy())), shape=(size, size)))
    order, before = breadth_first_order(tree, 0, directed=False)
    vectors = images.T.numpy()
    signs = np.ones(size, dtype=np.float32)
    for pixel in order[1:]:
        parent = before[pixel]
        signs[pixel] = signs[parent] * (1 if vectors[pixel] @ vectors[parent] >= 0 else -1)
    return torch.from_numpy(signs)


def likely_sign(images: Tensor, public: Tensor, rng: torch.Generator) -> float:
    """Return the sign that makes images (N, C, H, W) likelier, by a network trained on public images and negatives."""
    network = train_sign(public, rng)
    with torch.no_grad():
        odds = network(images) - network(-images)
    return 1.0 if float(odds.sum()) >= 0 else -1.0


def train_sign(public: Tensor, rng: torch.Generator) -> nn.Module:
    """Train a network to give the logit of an image being upright rather than negated."""
    network = _seeded(_sign_network(public.shape[1:]), rng)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    with torch.enable_grad():
        for _ in range(_SIGN_STEPS):
            some = public[torch.randint(len(public), (32,), generator=rng)]
            upright = torch.randint(2, (32, 1), generator=rng).float()
            logits = network(some * (2 * upright - 1)[:, :, None, None])
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(logits, upright).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return network.eval().requires_grad_(False)


_SIGN_STEPS = 400


def _sign_network(shape: torch.Size) -> nn.Sequential:
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * -(-height // 8) * -(-width // 8), 1),
    )


def _seeded(network: nn.Sequential, rng: torch.Generator) -> nn.Sequential:
    """Draw the network's initial weights from the generator."""
    for parameter in network.parameters():
        bound = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.0
        parameter.data = (2 * torch.rand(parameter.shape, generator=rng) - 1) * bound
    return network
