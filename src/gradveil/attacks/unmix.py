"""Unmix: recover private images from many mixtures of them, against Mixup and InstaHide."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.imitation import Imitation, least_loss
from gradveil.attacks.parts.played_mixtures import corrected, encoder
from gradveil.attacks.parts.unmixing import (
    Mixtures,
    SoftLabels,
    Solution,
    agreed_signs,
    estimated_coefficients,
    labelled_coefficients,
    likely_sign,
    similarities,
    solved,
    train_similarity,
)
from gradveil.attacks.rehearsing import RehearsingDecoder
from gradveil.defences import member, required
from gradveil.defences.instahide import Instahide
from gradveil.defences.mixup import Mixup
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Unmix(RehearsingDecoder):
    r"""Find which of a client's encodings share an image and in what proportions, then solve for the images.

    .. math:: \arg\min_{X, M} \big\| \mathrm{abs}(M X) - \mathrm{abs}(E) \big\|_2^2

    E are a client's encodings, guessed by another attack in several rounds (one round has too few), X the client's
    images, and the rows of M the coefficients. First a small network learns from public images, mixed as the defence
    does, how similar two encodings are that share images. Then M is fitted to the similarities of the private
    encodings, starting from an even assignment. Then X and M are refined in turn. InstaHide's absolute values leave
    one sign per pixel open, common to all images: neighbours should vary alike, and public images give the overall
    sign.

    Known soft labels are sums of the rows of M by class: M starts from them and stays in agreement with them, so that
    an image whose class is its own has its coefficients at once. If M itself is granted, only X is solved for. Guesses
    differ in quality, which the loss of ``inner`` tells, so the worst of them are left out.

    If ``inner`` inverts gradients, it first inverts some of clients that the attacker plays with public images. The
    network then learns from mixtures with errors of this kind, and a filter that undoes what these errors do to X is
    learned from public images that were mixed by M, shown with such errors, and decoded. If signs of pixels are
    unknown, only the network learns.

    Needs: the defence, the number of examples, public images, and what ``inner`` needs. Labels and the mixing are used
    if they are granted.
    Fails: with few rounds; with encodings that gradient inversion blurred, as after a few hundred steps (give gs about
    3,000); if public images are in the mixtures, only rough shapes are recovered.
    Reference: Carlini et al. 2020, https://arxiv.org/abs/2011.05315; as used by Wan et al. 2022 (LODA),
    https://arxiv.org/abs/2206.00769, Eq. 3, on 50 encodings of each image.
    Differs from the paper: the network embeds each encoding separately, where Carlini et al. compare pairs;
    coefficients are estimated and refined, not assumed equal; X is found by alternating least squares, not by Adam;
    signs are made consistent; guesses are chosen by their loss; errors of inversions are rehearsed. GradAttack's
    decoder, https://arxiv.org/abs/2112.00059, which Wan et al. may have used, is given M, as here with
    ``--knows ...,mixing``.

    Attributes:
        inner: the attack whose guesses are decoded; by default the granted encodings.
        train: steps of Adam for training the similarity network.
        width: channels of the similarity network.
        restarts: initial estimates of M; the one that explains the encodings best after a few rounds is refined.
        rounds: how often X and M are solved in turn.
        keep: share of the guesses that are used, those with the least loss of ``inner``; all if their losses are equal,
            as those of granted encodings are.
        rehearsals: updates of played clients from which the errors of ``inner`` are learned; 0 learns from exact
            mixtures, as is always done if encodings are granted.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset(
        {Knowledge.DEFENCE, Knowledge.NUM_EXAMPLES, Knowledge.PUBLIC_DATA}
    )

    train: int = 400
    width: int = 16
    restarts: int = 8
    rounds: int = 40
    keep: float = 0.75
    rehearsals: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("train", 0), ("width", 1), ("restarts", 1), ("rounds", 1)):
            in_range(name, getattr(self, name), low)
        in_range("keep", self.keep, 0, 1, open_low=True)

    @property
    def share_used(self) -> float:
        """The share of guesses that are decoded: ``keep``."""
        return self.keep

    def unfit(self, seen: Observation) -> list[str]:
        """Return what is missing: a defence that mixes images, or enough mixtures of several images."""
        if member(seen.defence, Mixup) is None:
            return ["mixup or instahide"]
        enough = seen.num_images >= 2 and seen.rounds * seen.num_examples >= 2 * seen.num_images
        return [] if enough else ["several rounds of encodings"]

    def decode(
        self, found: Reconstruction, seen: Observation, rng: torch.Generator, imitate: Imitation | None = None
    ) -> Reconstruction:
        """Recover each client's images from all its rounds."""
        defence, images = required(seen.defence, Mixup), seen.num_images
        encodings = 2 * found.images.detach().cpu().reshape(-1, seen.rounds * seen.num_examples, *seen.shape) - 1
        flipped = isinstance(defence, Instahide) and 0 < defence.flip < 1
        public = 2 * seen.public_data.images.cpu().float() - 1
        encode = encoder(defence, public, flipped=flipped, imitate=imitate)
        network = train_similarity(
            public, encode, num_images=images, steps=self.train, width=self.width, batch=48, rng=rng
        )
        losses = found.loss.detach().cpu().view(-1, seen.rounds).repeat_interleave(seen.num_examples, 1)
        told = _Told.of(seen, len(encodings))
        task = _Task(network, defence, public, images, flipped, imitate)
        solutions = [
            self._solve(each, least_loss(loss, self.keep, 2 * images), own, task, rng)
            for each, loss, own in zip(encodings, losses, told, strict=True)
        ]
        residual = torch.tensor([solution.residual for solution in solutions])
        pictures = torch.stack([solution.images.view(-1, *seen.shape) for solution in solutions])
        device = found.images.device
        return Reconstruction(
            images=((pictures + 1) / 2).clamp(0, 1).to(device),
            labels=_labels(solutions, told, seen).to(device),
            loss=residual.to(device),
            converged=(residual < _CONVERGED * encodings.nan_to_num().flatten(1).std(1)).to(device),
            why=tuple("no encoding to decode" if loss != loss else "" for loss in residual.tolist()),
        )

    def _solve(self, encodings: Tensor, kept: Tensor, told: "_Told", task: "_Task", rng: torch.Generator) -> Solution:
        """Recover one client's images from the encodings (E, C, H, W) that are ``kept`` (E,)."""
        usable, count = encodings.flatten(1).isfinite().all(1) & kept, task.num_images
        if int(usable.sum()) < 2 * count:
            nothing = torch.full((count, encodings[0].numel()), torch.nan)
            return Solution(nothing, torch.full((len(encodings), count), torch.nan), torch.nan)
        shown = encodings[usable].abs() if task.flipped else encodings[usable]
        mixing, labels = told.of_some(usable, count)
        mixtures = Mixtures(
            shown.flatten(1), task.flipped, task.defence.num_private, task.background,
            labels=None if task.mixes_public else labels, known=mixing is not None,
        )  # fmt: skip
        if mixing is None:
            mixing = self._estimate(mixtures, shown, labels, task, rng)
        solution = solved(mixtures, mixing, rounds=self.rounds, restarts=8, rng=rng)
        if task.imitate is not None and not task.flipped:
            solution = corrected(solution, mixtures, task.defence, task.public, task.imitate, rng)
        whole = torch.full((len(encodings), count), torch.nan)
        whole[usable] = solution.coefficients
        solution = solution._replace(coefficients=whole)
        if not task.flipped:
            return solution
        channels, height, width = encodings.shape[1:]
        upright = solution.images * agreed_signs(solution.images, (channels, height, width))
        sign = likely_sign(upright.view(-1, *encodings.shape[1:]), task.public, rng)
        return solution._replace(images=upright * sign)

    def _estimate(
        self, mixtures: Mixtures, shown: Tensor, labels: SoftLabels | None, task: "_Task", rng: torch.Generator
    ) -> Tensor:
        """Return the estimate of M (E, N) that explains the encodings best after a few rounds, of several."""
        with torch.no_grad():
            similarity = similarities(task.network, shown)
        own = task.defence.own / (task.defence.own + task.defence.k - 1)
        share = task.defence.num_private / task.defence.k
        tried = []
        for _ in range(self.restarts):
            if labels is None:
                first = estimated_coefficients(similarity, task.num_images, own=own, steps=200, rng=rng)
            else:
                first = labelled_coefficients(similarity, labels, steps=200, rng=rng)
            tried.append(solved(mixtures, share * first, rounds=_TRIAL, restarts=4, rng=rng))
        return min(tried, key=lambda solution: solution.residual).coefficients


@dataclass(frozen=True)
class _Task:
    """What is common to all clients.

    Attributes:
        network: the trained similarity network.
        defence: the clients' defence.
        public: public images in [-1, 1].
        num_images: N, images per client.
        flipped: whether the signs of pixels are unknown.
        imitate: makes the errors of the guesses in other mixtures, or None if they are taken as exact.
    """

    network: nn.Module
    defence: Mixup
    public: Tensor
    num_images: int
    flipped: bool
    imitate: Imitation | None = None

    @property
    def mixes_public(self) -> bool:
        """Whether public images are in the mixtures."""
        return self.defence.num_private < self.defence.k

    @property
    def background(self) -> Tensor:
        """The mean (D,) of the public images that were mixed in, or zero if there are none."""
        mean = self.public.flatten(1).mean(0)
        return mean if self.mixes_public else torch.zeros_like(mean)


class _Told(NamedTuple):
    """What is known about one client's mixtures: soft labels (E, classes) and coefficients (E, N), or None."""

    soft: Tensor | None
    mixing: Tensor | None

    @staticmethod
    def of(seen: Observation, clients: int) -> "list[_Told]":
        """Return what is granted, per client. Encodings are granted with their labels."""
        soft = seen.labels if seen.knows(Knowledge.LABELS) else None
        if soft is None and seen.knows(Knowledge.ENCODINGS):
            soft = seen.encodings.labels
        mixing = seen.mixing if seen.knows(Knowledge.MIXING) else None
        parts = (None if soft is None or not soft.is_floating_point() else soft, mixing)
        each = [
            [None] * clients if part is None else [*part.cpu().reshape(clients, -1, part.shape[-1])] for part in parts
        ]
        return [_Told(*both) for both in zip(*each, strict=True)]

    def of_some(self, rows: Tensor, num_images: int) -> tuple[Tensor | None, SoftLabels | None]:
        """Return coefficients and labels of some encodings."""
        mixing = None if self.mixing is None else self.mixing[rows]
        return mixing, None if self.soft is None else SoftLabels.of(self.soft[rows], num_images)


_TRIAL = 4
"""Rounds after which restarts are compared."""
_CONVERGED = 0.1
"""A client has converged if at most this share of the encodings' standard deviation is unexplained."""


def _labels(solutions: list[Solution], told: list[_Told], seen: Observation) -> Tensor:
    """Return the labels (T, N) whose mixtures the known soft labels are, or -1 if soft labels are not known."""
    found = torch.full((len(solutions), seen.num_images), -1)
    for row, (solution, own) in enumerate(zip(solutions, told, strict=True)):
        there = solution.coefficients.isfinite().all(1)
        if own.soft is not None and bool(there.any()):
            shares = torch.linalg.lstsq(solution.coefficients[there], own.soft[there]).solution
            found[row] = shares.argmax(1)
    return found
