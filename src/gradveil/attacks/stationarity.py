"""Stationarity: recover the private image from an obscured one, against LODA."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.parts.imitation import Imitation, learned_filter
from gradveil.attacks.parts.priors import total_variation
from gradveil.attacks.rehearsing import RehearsingDecoder
from gradveil.defences import member, required
from gradveil.defences.loda import Loda
from gradveil.networks.features import Features
from gradveil.progress import tell
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range, one_of

WEIGHTS = {"stationarity": (0.0, 1.0, 5.0, 10.0, 20.0), "features": (1e-3, 1e-2, 1e-1, 1.0)}
"""Values that ``search`` tries: c of Eq. 6, in addition to the defence's own, or the weight of total variation."""
STEPS = (50, 100, 200, 400)


@dataclass(frozen=True)
class Stationarity(RehearsingDecoder):
    r"""Find the image for which the obscured one is a stationary point of LODA's objective, or has similar features.

    .. math:: \text{stationarity:} \quad \arg\min_{x \in [0,1]^D} \|\nabla g(x')^T (g(x') - g(x)) - c (x' - x)\|_2^2

    .. math:: \text{features:} \quad \arg\min_{x \in [0,1]^D} \frac{\|g(x) - g(x')\|_2^2}{\|g(x')\|_2^2} + w\,TV(x)

    .. math:: \text{learned:} \quad x = A\,\mathrm{patch}(x') + b, \quad A, b = \arg\min \sum_{\text{public } z}
        \|z - A\,\mathrm{patch}(\mathcal E(z)) - b\|_2^2

    x' is another attack's guess of what the network saw. The first two losses vanish at x = x' itself, so the search
    starts elsewhere; it uses Adam and keeps the best iterate by the loss. The third way is a filter of 5x5 pixels,
    learned from public images that the attacker obscures itself: pixels that LODA moved still depend on the original.

    Needs: the defence with its extractor, and what ``inner`` needs; public images for ``search`` or ``start=public``.
    Fails: for a large c: then the features of x' differ from those of the image, and most pixels of x' are at 0 or 1,
    where the gradient need not vanish.
    Reference: Wan et al. 2022 (LODA), https://arxiv.org/abs/2206.00769, Eq. 6, with c = 1 and 100 steps, chosen from
    grids.
    Differs from the paper: the paper names neither optimiser nor start, and chose c and steps by the true images;
    ``search`` chooses them on public images that the attacker obscures itself. ``features``, ``learned`` and ``bounds``
    are ours.

    Attributes:
        inner: the attack whose guesses are decoded; by default the granted encodings.
        way: stationarity, features or learned.
        c: the weight c in Eq. 6.
        tv: w, weight of total variation, for ``features``.
        steps: steps of Adam.
        lr: Adam's learning rate.
        start: where a search begins: grey, noise (uniform) or public.
        bounds: whether pixels of x' at 0 or 1 only require a gradient that points outwards.
        search: number of public images on which c (or tv) and steps are chosen first; 0 uses the settings. For
            ``learned``, the number of images to learn from.
        rehearsals: updates of played clients from which the errors of ``inner`` are learned, so that the images of
            ``search`` have them; 0 learns from exact images, as is always done if encodings are granted. The default
            is 0, since rehearsing did not help with CIFAR-10 images that ``gs`` inverted.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.DEFENCE})

    way: str = "stationarity"
    c: float = 1.0
    tv: float = 0.1
    steps: int = 100
    lr: float = 0.05
    start: str = "grey"
    bounds: bool = False
    search: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("way", self.way, [*WEIGHTS, "learned"])
        one_of("start", self.start, ["grey", "noise", "public"])
        in_range("c", self.c, 0)
        in_range("tv", self.tv, 0)
        in_range("steps", self.steps, 1)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("search", self.search, 1 if self.way == "learned" or self.rehearsals else 0)
        if self.search or self.start == "public":
            object.__setattr__(self, "needs", self.needs | {Knowledge.PUBLIC_DATA})

    def unfit(self, seen: Observation) -> list[str]:
        """Return loda if the defence does not obscure images."""
        return ["loda"] if member(seen.defence, Loda) is None else []

    def decode(
        self, found: Reconstruction, seen: Observation, rng: torch.Generator, imitate: Imitation | None = None
    ) -> Reconstruction:
        """Decode each guess separately."""
        defence = required(seen.defence, Loda)
        features = defence.features(seen.network, seen.shape)
        obscured = found.images.flatten(0, 1)
        usable = obscured.flatten(1).isfinite().all(1)
        if self.way == "learned":
            examples = _examples(defence, features, seen, self.search, rng, imitate)
            images = learned_filter(*examples)(obscured).clamp(0, 1)
            return replace(found, images=images.view_as(found.images))
        chosen = self._searched(defence, features, seen, rng, imitate) if self.search else self
        begun = self._begin(obscured, seen, rng)
        how = _How(features, mean=defence.mean_squares)
        _, before = chosen._descend(how, obscured.nan_to_num(0.5), begun, (0,))
        (images,), loss = chosen._descend(how, obscured.nan_to_num(0.5), begun, (chosen.steps,))
        images = torch.where(usable.view(-1, 1, 1, 1), images, torch.nan)
        fell = (loss < CONVERGED * before).view(len(found.images), -1).all(1)
        return replace(
            found,
            images=images.view_as(found.images),
            loss=loss.view(len(found.images), -1).mean(1).to(found.loss),
            converged=found.converged & fell.to(found.converged.device),
        )

    def _descend(
        self, how: "_How", obscured: Tensor, begun: Tensor, stops: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the best images after each number of steps in ``stops``, and their losses at the end."""
        parts = [
            self._descend_some(how, some, start, stops)
            for some, start in zip(torch.split(obscured, _TOGETHER), torch.split(begun, _TOGETHER), strict=True)
        ]
        images = [torch.cat([shown[number] for shown, _ in parts]) for number in range(len(stops))]
        return images, torch.cat([loss for _, loss in parts])

    def _descend_some(
        self, how: "_How", obscured: Tensor, begun: Tensor, stops: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        goal = _Goal.of(how.features, obscured)
        x = begun.clone().requires_grad_()
        optimiser = torch.optim.Adam([x], lr=self.lr)
        best, least, shown = begun, torch.full((len(begun),), torch.inf).to(begun), []
        with torch.enable_grad():
            for step in range(max(stops) + 1):
                loss = self._loss(how, goal, x)
                better = loss.detach() < least
                best = torch.where(better.view(-1, 1, 1, 1), x.detach(), best)
                least = torch.where(better, loss.detach(), least)
                if step in stops:
                    shown.append(best)
                if step < max(stops):
                    x.grad = torch.autograd.grad(loss.sum(), x)[0]
                    optimiser.step()
                    x.data.clamp_(0, 1)
                tell(step / max(1, *stops))
        return shown, least

    def _loss(self, how: "_How", goal: "_Goal", x: Tensor) -> Tensor:
        """Return the loss (N,) of each image."""
        if self.way == "features":
            return how.features.distance(x, goal.features) / goal.size + self.tv * total_variation(x)
        pairs = zip(goal.features, how.features(x), strict=True)
        difference = [(there - here) * how.scale(here, x) for there, here in pairs]
        pulled = torch.autograd.grad(goal.outputs, goal.at, difference, create_graph=True, retain_graph=True)[0]
        residual = pulled - self.c * (goal.at.detach() - x)
        if self.bounds:
            low, high = goal.at.detach() <= _EDGE, goal.at.detach() >= 1 - _EDGE
            residual = torch.where(low, residual.clamp(max=0), torch.where(high, residual.clamp(min=0), residual))
        return residual.square().flatten(1).sum(1)

    def _begin(self, obscured: Tensor, seen: Observation, rng: torch.Generator) -> Tensor:
        if self.start == "public":
            public = seen.public_data.images
            return public[torch.randint(len(public), (len(obscured),), generator=rng)].to(obscured)
        if self.start == "noise":
            return torch.rand(obscured.shape, generator=rng).to(obscured)
        return torch.full_like(obscured, 0.5)

    def _searched(
        self,
        defence: Loda,
        features: Features,
        seen: Observation,
        rng: torch.Generator,
        imitate: Imitation | None = None,
    ) -> "Stationarity":
        """Return the attack with the weight and steps that work best on public images that the attacker obscures."""
        obscured, truth = _examples(defence, features, seen, self.search, rng, imitate)
        begun = self._begin(obscured, seen, rng)
        best, least = self, torch.inf
        own = (defence.c,) if self.way == "stationarity" else ()
        for weight in dict.fromkeys((*WEIGHTS[self.way], *own)):
            tried = replace(self, c=weight) if self.way == "stationarity" else replace(self, tv=weight)
            shown, _ = tried._descend(_How(features, mean=defence.mean_squares), obscured, begun, STEPS)
            for steps, images in zip(STEPS, shown, strict=True):
                error = float((images - truth).square().mean())
                if error < least:
                    best, least = replace(tried, steps=steps), error
        return best


def _examples(
    defence: Loda,
    features: Features,
    seen: Observation,
    count: int,
    rng: torch.Generator,
    imitate: Imitation | None,
) -> tuple[Tensor, Tensor]:
    """Return public images obscured as the defence does, with the errors of an inversion, and the originals."""
    public = seen.public_data.images
    order = torch.randperm(len(public), generator=rng)
    truth, begun = public[order[:count]], public[order.flip(0)[: min(count, len(public))]]
    pairs = zip(torch.split(truth, _TOGETHER), torch.split(begun, _TOGETHER), strict=True)
    obscured = torch.cat([defence.obscured(features, *pair) for pair in pairs])
    return (obscured if imitate is None else imitate(obscured, rng)), truth


CONVERGED = 0.1
"""A descent has converged when its loss is at most this share of the initial loss."""
_TOGETHER = 16
"""Images searched at once; more do not fit a CPU's cache."""
_EDGE = 1e-3


class _How(NamedTuple):
    """The map g, and whether the defence uses mean squares, which weight features by their number."""

    features: Features
    mean: bool

    def scale(self, output: Tensor, images: Tensor) -> float:
        """Return the weight of a layer's features relative to pixels."""
        return images[0].numel() / output[0].numel() if self.mean else 1.0


class _Goal(NamedTuple):
    """Obscured images ``at``, their features with and without the graph, and the features' squared norm."""

    at: Tensor
    outputs: list[Tensor]
    features: list[Tensor]
    size: Tensor

    @staticmethod
    def of(features: Features, obscured: Tensor) -> "_Goal":
        with torch.enable_grad():
            at = obscured.detach().clone().requires_grad_()
            outputs = features(at)
        plain = [output.detach() for output in outputs]
        size = torch.stack([output.square().flatten(1).sum(1) for output in plain]).sum(0)
        return _Goal(at, outputs, plain, size.clamp_min(torch.finfo(size.dtype).tiny))
