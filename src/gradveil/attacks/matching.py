"""Gradient matching: find images whose gradient is the one seen. The loop that DLG, iDLG, GS and their kin share."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.optimisers import BatchedLbfgs, Closure, decay, signed
from gradveil.attacks.parts.priors import total_variation
from gradveil.grads import example_gradients
from gradveil.models.base import Normalisation, normalisation_of
from gradveil.threat import Observation, Reconstruction


@dataclass(frozen=True)
class Search:
    """How guesses are searched; see the attacks for the published settings.

    Attributes:
        iterations: steps of the optimiser (for L-BFGS, of up to 20 inner iterations each).
        optimiser: adam or lbfgs.
        lr: its rate.
        schedule: constant, steps or cosine (adam).
        sign: none, hard or soft (adam): what becomes of the gradient first.
        boxed: whether guesses are kept inside [0, 1].
        tv: weight of total variation.
        restarts: searches from different starts; the one with the least loss is kept.
        stop_below: a chunk is done when each of its targets has a restart with a loss below this.
        chunk: targets (times restarts) taken together; more do not fit a CPU's cache.
        keep: iterates kept for the report.
    """

    iterations: int
    optimiser: str = "adam"
    lr: float = 0.1
    schedule: str = "steps"
    sign: str = "hard"
    boxed: bool = True
    tv: float = 0.0
    restarts: int = 1
    stop_below: float = 0.0
    chunk: int = 32
    keep: int = 0
    objective: Objective = field(default_factory=Objective)


def match_gradients(
    seen: Observation, batch_size: int, labels: Tensor | None, search: Search, rng: torch.Generator
) -> Reconstruction:
    """Search images (and soft labels, where ``labels`` (T, B) is None) for all targets; restarts run side by side."""
    targets, restarts = seen.num_targets, search.restarts
    wanted = {name: tensor.repeat_interleave(restarts, 0) for name, tensor in seen.gradients.items()}
    known = None if labels is None else labels.repeat_interleave(restarts, 0)
    pieces = []
    together = max(1, search.chunk // restarts) * restarts  # the restarts of a target stay in one chunk
    for some in torch.split(torch.arange(targets * restarts), together):
        part = {name: tensor[some] for name, tensor in wanted.items()}
        pieces.append(_search(seen, part, batch_size, None if known is None else known[some], search, rng))
    images, soft, loss = (torch.cat([piece[i] for piece in pieces]) for i in range(3))
    iterates = torch.cat([piece[3] for piece in pieces], 1)
    best = loss.view(targets, restarts).argmin(1) + torch.arange(targets) * restarts
    return Reconstruction(
        images=images[best],
        labels=soft[best].argmax(2) if labels is None else labels,
        loss=loss[best],
        converged=loss[best] <= max(search.stop_below, 1e-3),
        iterates=iterates[:, best],
    )


def _search(
    seen: Observation,
    wanted: dict[str, Tensor],
    batch_size: int,
    labels: Tensor | None,
    search: Search,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One chunk: best images (T, B, C, H, W) in [0, 1], soft labels, losses (T,), and iterates."""
    count = len(next(iter(wanted.values())))
    like = next(iter(wanted.values()))
    space = _Space(seen.network, seen.shape, like)
    num_pixels = batch_size * space.size
    variables = torch.randn(count, num_pixels, generator=rng, dtype=like.dtype).to(like.device)
    if labels is None:
        logits = torch.randn(count, batch_size * seen.num_classes, generator=rng, dtype=like.dtype).to(like.device)
        variables = torch.cat([variables, logits], 1)

    def split(flat: Tensor) -> tuple[Tensor, Tensor]:
        images = flat[:, :num_pixels].view(-1, *seen.shape)
        if labels is not None:
            return images, labels.reshape(-1)
        return images, flat[:, num_pixels:].view(-1, seen.num_classes).softmax(1)

    def closure(flat: Tensor) -> tuple[Tensor, Tensor]:
        leaf = flat.detach().requires_grad_()
        images, targets = split(leaf)
        guess = example_gradients(
            seen.network, space.to_pixels(images), targets, group_size=batch_size, create_graph=True
        )
        loss = search.objective(guess, wanted)
        if search.tv:
            loss = loss + search.tv * total_variation(images).view(count, batch_size).mean(1)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    best = _Best(variables)
    shown: list[Tensor] = []
    every = max(1, search.iterations // search.keep) if search.keep else 0
    for step, (flat, loss) in enumerate(_descend(variables, closure, search, space, num_pixels)):
        best.offer(flat, loss)
        if every and step % every == 0:
            shown.append(space.to_pixels(split(best.variables)[0]).clamp(0, 1).view(count, batch_size, *seen.shape))
        if bool((best.loss.view(-1, search.restarts).amin(1) <= search.stop_below).all()):
            break
    images, targets = split(best.variables)
    pictures = space.to_pixels(images).clamp(0, 1).view(count, batch_size, *seen.shape)
    soft = targets.view(count, batch_size, -1)
    empty = pictures.new_empty(0, *pictures.shape)
    return pictures, soft, best.loss, torch.stack(shown) if shown else empty


def _descend(
    variables: Tensor, closure: Closure, search: Search, space: "_Space", num_pixels: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each iterate with its loss."""
    if search.optimiser == "lbfgs":
        lbfgs = BatchedLbfgs(variables, lr=search.lr)
        for _ in range(search.iterations):
            before = lbfgs.variables
            yield before, lbfgs.step(closure)
        yield lbfgs.variables, closure(lbfgs.variables)[0]
        return
    leaf = variables.clone()
    adam = torch.optim.Adam([leaf], lr=search.lr)
    for step in range(search.iterations):
        loss, gradient = closure(leaf)
        yield leaf, loss
        leaf.grad = signed(gradient, search.sign, step / search.iterations)
        adam.param_groups[0]["lr"] = search.lr * decay(search.schedule, step, search.iterations)
        adam.step()
        if search.boxed:
            with torch.no_grad():
                leaf[:, :num_pixels] = space.box(leaf[:, :num_pixels])
    yield leaf, closure(leaf)[0]


class _Best:
    """The best iterate of each target so far, by the attacker's own loss."""

    def __init__(self, variables: Tensor) -> None:
        self.variables = variables.detach().clone()
        self.loss = torch.full((len(variables),), torch.inf, dtype=variables.dtype, device=variables.device)

    def offer(self, variables: Tensor, loss: Tensor) -> None:
        better = loss < self.loss
        self.variables = torch.where(better[:, None], variables.detach(), self.variables)
        self.loss = torch.where(better, loss, self.loss)


class _Space:
    """The space that is searched: normalised pixels, as the network's first layer sees them."""

    def __init__(self, network: nn.Module, shape: tuple[int, int, int], like: Tensor) -> None:
        normalisation = normalisation_of(network) or Normalisation((0.0,) * shape[0], (1.0,) * shape[0])
        self.size = shape[0] * shape[1] * shape[2]
        self._shape = shape
        self._mean = like.new_tensor(normalisation.mean).view(-1, 1, 1)
        self._std = like.new_tensor(normalisation.std).view(-1, 1, 1)

    def to_pixels(self, images: Tensor) -> Tensor:
        """Images in [0, 1] from normalised ones (N, C, H, W)."""
        return images * self._std + self._mean

    def box(self, flat: Tensor) -> Tensor:
        """Clamp flat normalised images to what [0, 1] allows."""
        images = flat.view(-1, *self._shape)
        low, high = -self._mean / self._std, (1 - self._mean) / self._std
        return torch.minimum(torch.maximum(images, low), high).view_as(flat)
