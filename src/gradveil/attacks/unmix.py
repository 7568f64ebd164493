"""Unmix: recover private images from many mixtures of them, against Mixup and InstaHide."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.decoder import Decoder
from gradveil.attacks.parts.unmixing import (
    Encoder,
    Mixtures,
    Solution,
    agreed_signs,
    estimated_coefficients,
    likely_sign,
    similarities,
    solved,
    train_similarity,
)
from gradveil.defences import member, required
from gradveil.defences.instahide import Instahide
from gradveil.defences.mixup import Mixup, coefficients
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Unmix(Decoder):
    r"""Find which of a client's encodings share an image and in what proportions, then solve for the images.

    .. math:: \arg\min_{X, M} \big\| \mathrm{abs}(M X) - \mathrm{abs}(E) \big\|_2^2

    E are a client's encodings, guessed by another attack in several rounds (one round has too few), X the client's
    images, and the rows of M the coefficients. First a small network learns from public images, mixed as the defence
    does, how similar two encodings are that share images. Then M is fitted to the similarities of the private
    encodings, starting from an even assignment. Then X and M are refined in turn. InstaHide's absolute values leave
    one sign per pixel open, common to all images: neighbours should vary alike, and public images give the overall
    sign.

    Needs: the defence, the number of examples, public images, and what ``inner`` needs.
    Fails: with few rounds; with encodings that gradient inversion blurred; if public images are in the mixtures, only
    rough shapes are recovered.
    Reference: Carlini et al. 2020, https://arxiv.org/abs/2011.05315; as used by Wan et al. 2022 (LODA),
    https://arxiv.org/abs/2206.00769, Eq. 3, on 50 encodings of each image.
    Differs from the paper: the network embeds each encoding separately, where Carlini et al. compare pairs;
    coefficients are estimated and refined, not assumed equal; X is found by alternating least squares, not by Adam;
    signs are made consistent.

    Attributes:
        inner: the attack whose guesses are decoded; by default the granted encodings.
        train: steps of Adam for training the similarity network.
        width: channels of the similarity network.
        restarts: initial estimates of M; the one that explains the encodings best after a few rounds is refined.
        rounds: how often X and M are solved in turn.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset(
        {Knowledge.DEFENCE, Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA}
    )

    train: int = 200
    width: int = 16
    restarts: int = 4
    rounds: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("train", 0), ("width", 1), ("restarts", 1), ("rounds", 1)):
            in_range(name, getattr(self, name), low)

    def unfit(self, seen: Observation) -> list[str]:
        """Return what is missing: a defence that mixes images, or enough mixtures of several images."""
        if member(seen.defence, Mixup) is None:
            return ["mixup or instahide"]
        enough = seen.num_images >= 2 and seen.rounds * seen.num_examples >= 2 * seen.num_images
        return [] if enough else ["several rounds of encodings"]

    def decode(self, found: Reconstruction, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Recover each client's images from all its rounds."""
        defence, images = required(seen.defence, Mixup), seen.num_images
        encodings = 2 * found.images.detach().cpu().reshape(-1, seen.rounds * seen.num_examples, *seen.shape) - 1
        flipped = isinstance(defence, Instahide) and 0 < defence.flip < 1
        public = 2 * seen.public_data.images.cpu().float() - 1
        encoder = _encoder(defence, public, flipped=flipped)
        network = train_similarity(
            public, encoder, num_images=images, steps=self.train, width=self.width, batch=48, rng=rng
        )
        solutions = [self._solve(each, network, defence, public, images, flipped, rng) for each in encodings]
        residual = torch.tensor([solution.residual for solution in solutions])
        pictures = torch.stack([solution.images.view(-1, *seen.shape) for solution in solutions])
        device = found.images.device
        return Reconstruction(
            images=((pictures + 1) / 2).clamp(0, 1).to(device),
            labels=_labels(solutions, seen).to(device),
            loss=residual.to(device),
            converged=(residual < _CONVERGED * encodings.nan_to_num().flatten(1).std(1)).to(device),
            why=tuple("no encoding to decode" if loss != loss else "" for loss in residual.tolist()),
        )

    def _solve(
        self,
        encodings: Tensor,
        network: nn.Module,
        defence: Mixup,
        public: Tensor,
        num_images: int,
        flipped: bool,
        rng: torch.Generator,
    ) -> Solution:
        """Recover one client's images."""
        usable = encodings.flatten(1).isfinite().all(1)
        if int(usable.sum()) < 2 * num_images:
            nothing = torch.full((num_images, encodings[0].numel()), torch.nan)
            return Solution(nothing, torch.full((len(encodings), num_images), torch.nan), torch.nan)
        shown = encodings[usable].abs() if flipped else encodings[usable]
        with torch.no_grad():
            similarity = similarities(network, shown)
        own = defence.own / (defence.own + defence.k - 1)
        mixes_public = defence.num_private < defence.k
        background = public.flatten(1).mean(0) if mixes_public else torch.zeros(encodings[0].numel())
        share = defence.num_private / defence.k

        mixtures = Mixtures(shown.flatten(1), flipped, defence.num_private, background)
        tried = []
        for _ in range(self.restarts):
            first = share * estimated_coefficients(similarity, num_images, own=own, steps=200, rng=rng)
            tried.append(solved(mixtures, first, rounds=_TRIAL, restarts=4, rng=rng))
        best = min(tried, key=lambda solution: solution.residual)
        solution = solved(mixtures, best.coefficients, rounds=self.rounds, restarts=8, rng=rng)
        whole = torch.full((len(encodings), num_images), torch.nan)
        whole[usable] = solution.coefficients
        solution = solution._replace(coefficients=whole)
        if not flipped:
            return solution
        channels, height, width = encodings.shape[1:]
        upright = solution.images * agreed_signs(solution.images, (channels, height, width))
        return solution._replace(images=upright * likely_sign(upright.view(-1, *encodings.shape[1:]), public, rng))


_TRIAL = 4
"""Rounds after which restarts are compared."""
_CONVERGED = 0.1
"""A client has converged if at most this share of the encodings' standard deviation is unexplained."""


def _encoder(defence: Mixup, public: Tensor, *, flipped: bool) -> Encoder:
    """Return a function that mixes an attacker's images as the defence does; each is the main image in turn."""

    def encode(images: Tensor, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        parts = defence.num_private
        weights = coefficients(count, defence.k, defence.own, defence.cap, rng)
        keys = torch.rand(count, len(images), generator=rng)
        keys[torch.arange(count), torch.arange(count) % len(images)] = -1.0
        chosen = keys.argsort(1)[:, :parts]  # the main image first
        mixing = torch.zeros(count, len(images)).scatter_(1, chosen, weights[:, :parts])
        mixed = torch.einsum("en,n...->e...", mixing, images)
        for rest in weights[:, parts:].T:
            strangers = public[torch.randint(len(public), (count,), generator=rng)]
            mixed = mixed + rest.view(-1, 1, 1, 1) * strangers
        return (mixed.abs() if flipped else mixed), mixing

    return encode


def _labels(solutions: list[Solution], seen: Observation) -> Tensor:
    """Return the labels (T, N) whose mixtures the known soft labels are, or -1 if soft labels are not known."""
    none = torch.full((len(solutions), seen.num_images), -1)
    told = seen.labels if seen.knows(Knowledge.LABELS) else None
    if told is None and seen.knows(Knowledge.ENCODINGS):
        told = seen.encodings.labels
    if told is None or not told.is_floating_point():
        return none
    soft = told.cpu().view(len(solutions), -1, seen.num_classes)
    for row, (solution, labels) in enumerate(zip(solutions, soft, strict=True)):
        there = solution.coefficients.isfinite().all(1)
        if bool(there.any()):
            shares = torch.linalg.lstsq(solution.coefficients[there], labels[there]).solution
            none[row] = shares.argmax(1)
    return none
