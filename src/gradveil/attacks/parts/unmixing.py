"""From many mixtures of the same images back to the images: who shares an image, in what shares, and then what it is.

Pixels are scaled to [-1, 1] here. An `Encoder` says how mixtures are made, so that an attacker can make its own from
public images. Where signs were flipped, only absolute values count.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree
from torch import Tensor, nn

Encoder = Callable[[Tensor, int, torch.Generator], tuple[Tensor, Tensor]]
"""From images (N, C, H, W) and a count to encodings (count, C, H, W) and their coefficients (count, N)."""

_TINY = 1e-12
_SIGN_TURNS = 30
"""Turns of signs and images; fewer where both are nearly there."""


def similarity_network(channels: int, width: int) -> nn.Sequential:
    """A small network whose outputs for two encodings are the more alike, the more of their images they share."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.Flatten(),
    )


def similarities(network: nn.Module, encodings: Tensor) -> Tensor:
    """(E, E): the cosine of what the network makes of each two encodings, about their mean."""
    found = torch.cat([network(some) for some in torch.split(encodings, 256)])
    found = found - found.mean(0)
    return overlaps(found)


def overlaps(coefficients: Tensor) -> Tensor:
    """(E, E): the cosine of the coefficients (E, N) of each two encodings, which the network learns to tell."""
    unit = F.normalize(coefficients, dim=1, eps=_TINY)
    return unit @ unit.T


def train_similarity(
    public: Tensor, encoder: Encoder, *, num_images: int, steps: int, width: int, batch: int, rng: torch.Generator
) -> nn.Module:
    """Learn similarities from encodings that the attacker makes of public images; Adam on the squared error.

    Args:
        public: (M, C, H, W) in [-1, 1].
        encoder: the defence's way to mix, as the attacker then looks at it.
        num_images: that share encodings in a batch, as among the private ones.
        steps: of Adam.
        width: channels of the network.
        batch: encodings a step.
        rng: of the draws; weights too.
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
    """The cosines of vectors about their mean, from the cosines of the vectors themselves."""
    mean = gram.mean(0, keepdim=True)
    about = gram - mean - mean.T + gram.mean()
    size = about.diagonal().clamp_min(_TINY).sqrt()
    return about / size[:, None] / size[None]


def estimated_coefficients(
    similarity: Tensor, num_images: int, *, own: float, steps: int, rng: torch.Generator
) -> Tensor:
    """(E, N) coefficients whose overlaps are the similarities, up to the order of the images.

    Deals the encodings evenly to images by their largest part (`dealt`), whose share is about ``own``, and goes on from
    there by Adam on rows of a softmax.
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
    """(E,) which image each encoding is mostly of: clusters of even size, by assignment.

    Starts from encodings that are least alike; then deals all encodings to the clusters' means, and again.
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


class Solution(NamedTuple):
    """Images (N, D) in [-1, 1], the coefficients (E, N), and the root mean square of what they leave unexplained."""

    images: Tensor
    coefficients: Tensor
    residual: float


def solved(
    encodings: Tensor,
    coefficients: Tensor,
    *,
    flipped: bool,
    parts: int,
    background: Tensor,
    rounds: int,
    restarts: int,
    rng: torch.Generator,
) -> Solution:
    r"""Eq. 3 of the LODA paper: :math:`\min_X \| |MX| - |E| \|^2`, with M searched too, by turns.

    Given M and the signs of MX, X is a least-squares problem with one matrix for all pixels; given X, so is M, with
    coefficients that are not negative and at most ``parts`` of them. Signs are those of the last MX; each pixel tries
    several random ones, first, half-way and last, and keeps what explains it best. What M leaves of one is of the
    ``background``.

    Args:
        encodings: (E, D); absolute values where ``flipped``.
        coefficients: (E, N), a first estimate.
        flipped: whether signs are unknown.
        parts: images of the N in an encoding at most.
        background: (D,), the mean of what else was mixed in; zero where nothing was.
        rounds: of turns.
        restarts: random signs that each pixel tries.
        rng: of these.
    """
    mixing, images = coefficients, torch.zeros(coefficients.shape[1], encodings.shape[1])
    for turn in range(rounds):
        if flipped:
            starts = restarts if turn in (0, rounds // 2, rounds - 1) else 1
            images = _signed_images(encodings, mixing, background, images, starts, rng)
        else:
            images = _images(encodings, mixing, background)
        if turn < rounds - 1:
            mixing = _mixing(encodings, images, background, mixing, flipped=flipped, parts=parts)
    fit = mixing @ images + (1 - mixing.sum(1, keepdim=True)) * background
    residual = ((fit.abs() if flipped else fit) - encodings).square().mean().sqrt()
    return Solution(images.clamp(-1, 1), mixing, float(residual))


def _images(targets: Tensor, mixing: Tensor, background: Tensor) -> Tensor:
    """Least squares with a slight ridge, so that images nobody shows stay finite."""
    wanted = targets - (1 - mixing.sum(1, keepdim=True)) * background
    square = mixing.T @ mixing
    ridge = 1e-4 * square.diagonal().mean() * torch.eye(len(square))
    found: Tensor = torch.linalg.solve(square + ridge, mixing.T @ wanted)
    return found


def _signed_images(
    sizes: Tensor, mixing: Tensor, background: Tensor, images: Tensor, restarts: int, rng: torch.Generator
) -> Tensor:
    """Signs and images by turns, pixel by pixel the best of several beginnings."""
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


def _mixing(
    encodings: Tensor, images: Tensor, background: Tensor, mixing: Tensor, *, flipped: bool, parts: int
) -> Tensor:
    """Coefficients given the images: projected gradient steps, the largest few kept, rows of one at most."""
    shapes = images - background  # a share of an image replaces as much of the background
    wanted = encodings
    length = torch.linalg.matrix_norm(shapes @ shapes.T, 2).clamp_min(_TINY)
    for _ in range(40):
        fit = mixing @ shapes + background
        if flipped:
            wanted = torch.where(fit < 0, -1.0, 1.0) * encodings
        mixing = (mixing - (fit - wanted) @ shapes.T / length).clamp_min(0)
        if parts < mixing.shape[1]:
            edge = mixing.topk(parts, dim=1).values[:, -1:]
            mixing = mixing.where(mixing >= edge, torch.zeros(()))
        total = mixing.sum(1, keepdim=True)
        whole = not bool(background.any())
        mixing = mixing / total.clamp_min(_TINY) if whole else mixing / total.clamp_min(1)
    return mixing


def agreed_signs(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(D,) signs of -1 and 1 for the pixels of images (N, D), so that neighbours vary alike from image to image.

    Absolute values fix each pixel of all images up to one common sign. Those of neighbours, in the picture and among
    channels, are compared where they agree most (a maximum spanning tree), so that one sign of all is left open.
    """
    channels, height, width = shape
    number = torch.arange(channels * height * width).view(shape)
    pairs = [(number[:, 1:], number[:, :-1]), (number[:, :, 1:], number[:, :, :-1]), (number[1:], number[:-1])]
    first, second = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    unit = images / images.norm(dim=0, keepdim=True).clamp_min(_TINY)
    alike = (unit[:, first] * unit[:, second]).sum(0)
    size = len(number.flatten())
    weights = (2 - alike.abs()).double().numpy()  # never zero, which would be no edge
    tree = minimum_spanning_tree(coo_matrix((weights, (first.numpy(), second.numpy())), shape=(size, size)))
    order, before = breadth_first_order(tree, 0, directed=False)
    vectors = images.T.numpy()
    signs = np.ones(size, dtype=np.float32)
    for pixel in order[1:]:
        parent = before[pixel]
        signs[pixel] = signs[parent] * (1 if vectors[pixel] @ vectors[parent] >= 0 else -1)
    return torch.from_numpy(signs)


def likely_sign(images: Tensor, public: Tensor, rng: torch.Generator) -> float:
    """The sign that makes images (N, C, H, W) likelier, by a small network that tells public ones from negatives."""
    network = train_sign(public, rng)
    with torch.no_grad():
        odds = network(images) - network(-images)
    return 1.0 if float(odds.sum()) >= 0 else -1.0


def train_sign(public: Tensor, rng: torch.Generator) -> nn.Module:
    """Learn the logit of being an image, not its negative."""
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
    """The network with first weights of this generator."""
    for parameter in network.parameters():
        bound = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.0
        parameter.data = (2 * torch.rand(parameter.shape, generator=rng) - 1) * bound
    return network
