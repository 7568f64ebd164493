"""Leak scores without an attack: how well anyone could know an image from its update, under each defence."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks.parts.countermoves import countermoves
from gradveil.attacks.parts.local_training import Replay, replay_of
from gradveil.audits.cells import check
from gradveil.audits.plan import Cell, finite
from gradveil.audits.settings import AuditSettings
from gradveil.audits.views import observed, private_batches
from gradveil.data import Dataset, load_dataset
from gradveil.defences import Countermove, build_defence
from gradveil.errors import ConfigError, DefenceError
from gradveil.randomness import stream
from gradveil.runs.cramer_rao import Leak, leak
from gradveil.threat import Observation, ThreatModel
from gradveil.types import Batch, Tensors

MOST_NUMBERS = 10**9
"""Largest number of entries of a Jacobian: 8 GB."""
DRAWS = 256
"""Number of draws of a client's secret numbers, to estimate their variance."""
ROUNDING = 5e-7
"""Rounding error of a float32 gradient, in units of the tensor's root mean square; about the error measured here."""


def score(
    settings: AuditSettings,
    *,
    data_root: Path | None = None,
    progress: Callable[[float, str], None] = lambda share, doing: None,
) -> list[dict[str, Any]]:
    """Return a row per defence and target: the best mean PSNR of any guess from one gradient, to first order.

    The attacker knows the label, the defence, what the threat model grants, and the variance of images. The network and
    the targets, one image each, are those of an audit with the same settings. Each countermove of a defence models what
    arrives; whatever it leaves unexplained at the true image, such as added noise, counts as noise. The countermove
    that reveals most counts. See `gradveil.runs.cramer_rao.leak` for the limits of the bound.
    """
    if settings.images != 1 or settings.protocol != "lab" or settings.looks != 1:
        raise ConfigError(
            "A score is of the gradient of one image, got other updates. Leave out images, protocol and looks."
        )
    settings = replace(settings, lr=1.0, batch_norm="freeze")
    dataset = load_dataset(settings.dataset, data_root)
    bounded = tuple(spec for spec in settings.defences if not build_defence(spec).hides_images)
    check(replace(settings, defences=bounded or ("none",)), dataset, data_root)  # the others have no score anyway
    private = private_batches(settings, dataset)
    parts = [
        (seed, defence, t) for seed in settings.all_seeds for defence in settings.defences for t in range(len(private))
    ]
    rows = []
    for number, (seed, defence, target) in enumerate(parts):
        doing = f"{defence}, target {target + 1}"
        cell = Cell("score", "privacy", defence, seed, adaptive=True, first=target, last=target + 1)
        started = time.perf_counter()

        def tell(share: float, number: int = number, doing: str = doing) -> None:
            progress((number + share) / len(parts), doing)

        found = _scored(cell, settings, dataset, private[target : target + 1], data_root, tell)
        seconds = round(time.perf_counter() - started, 3)
        rows.append({"kind": "score", "defence": defence, "seed": seed, "target": target, **found, "seconds": seconds})
    return rows


def _scored(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    private: list[Batch],
    root: Path | None,
    tell: Callable[[float], None],
) -> dict[str, Any]:
    defence, threat = build_defence(cell.defence), ThreatModel.of(*settings.knows, "defence")
    prior = torch.tensor(dataset.std, dtype=torch.float64).square().repeat_interleave(math.prod(dataset.shape[1:]))
    row: dict[str, Any] = {
        **dict.fromkeys(("psnr_cap", "seen", "bits", "fisher_loss", "countermove")),
        "psnr_unseen": _psnr(float(prior.mean())), "directions": len(prior), "knows": threat.names, "why": "",
    }  # fmt: skip
    if defence.hides_images:
        return row | {"why": "clients train on other images than their own; audit what decoders make of those"}
    try:
        seen = observed(cell, settings, dataset, private, defence, None, root)
    except DefenceError as error:
        return row | {"why": str(error)}
    moves = {name: move for name, move in (countermoves(seen) or {"": Countermove()}).items() if not move.decoys}
    if not moves:
        return row | {"why": "an image behind decoys has no first-order figure; audit it"}
    views = [View.of(seen, move, private[0], cell.seed) for move in moves.values()]
    leaks = [view.leak(prior, partial(_share, tell, number, len(views))) for number, view in enumerate(views)]
    best = min(range(len(leaks)), key=lambda place: leaks[place].mse)
    return row | {
        "psnr_cap": _psnr(leaks[best].mse),
        "seen": leaks[best].seen,
        "bits": round(leaks[best].bits, 1),
        "fisher_loss": finite(leaks[best].fisher_loss),
        "countermove": list(moves)[best] or None,
    }


def _share(tell: Callable[[float], None], number: int, parts: int, share: float) -> None:
    tell((number + share) / parts)


def _psnr(mse: float) -> float | None:
    return round(-10 * math.log10(mse), 2) if mse > 0 else None


@dataclass(frozen=True)
class View:
    """What an attacker who plays one countermove compares, as a function of the image and the client's secrets.

    Attributes:
        replay: the client's step, in float64.
        move: the countermove.
        wanted: the gradient that arrived, (1, ...) by name.
        label: (1,).
        image: (1, C, H, W), the point at which derivatives are taken.
        secrets: values (numbers,) and variances of each module's output that the attacker does not know. The values are
            drawn as the client draws its own.
    """

    replay: Replay
    move: Countermove
    wanted: Tensors
    label: Tensor
    image: Tensor
    secrets: Mapping[str, tuple[Tensor, Tensor]]

    @staticmethod
    def of(seen: Observation, move: Countermove, private: Batch, seed: int) -> "View":
        """Return the view of one target, at its private image."""
        rng = stream(seed, "score")
        network = copy.deepcopy(seen.network).cpu().double()
        wanted = {name: tensor.cpu().double() for name, tensor in seen.mean_gradients.items()}
        replay = replace(replay_of(replace(seen, network=network), "once", rng), penalties=move.penalties)
        secrets = {}
        for name, draw in move.unknowns.items():
            drawn = draw(DRAWS, rng).cpu().double()
            secrets[name] = (drawn[0], drawn.var(0))
        return View(replay, move, wanted, private.labels.cpu(), private.images.cpu().double(), secrets)

    def __call__(self, point: Tensor) -> dict[str, Tensor]:
        """Return what arrives, by name, for an image and secrets that are given as one vector."""
        sizes = [self.image.numel(), *(len(value) for value, _ in self.secrets.values())]
        pixels, *others = torch.split(point, sizes)
        outputs = {name: value.double() for name, value in self.move.outputs.items()}
        outputs |= {name: value[None] for name, value in zip(self.secrets, others, strict=True)}
        guess: Tensors = self.replay(pixels.view_as(self.image), self.label, self.wanted, outputs)
        if self.move.sent is not None:
            guess = self.move.sent(guess, self.wanted)
        return {name: tensor for name, tensor in guess.items() if self.move.weights.get(name, 1.0)}

    def leak(self, prior: Tensor, tell: Callable[[float], None]) -> Leak:
        """Return how much the view reveals about the image."""
        values = [value for value, _ in self.secrets.values()]
        point = torch.cat([self.image.flatten(), *values]).requires_grad_()
        with torch.enable_grad():
            arrived = self(point)
            jacobian = _jacobian(torch.cat([tensor.flatten() for tensor in arrived.values()]), point, tell)
        compared = self.wanted if self.move.look is None else self.move.look(self.wanted)
        noise = torch.cat([self._noise(name, tensor.detach(), compared[name]) for name, tensor in arrived.items()])
        known = noise > 0
        varying = torch.cat([variance for _, variance in self.secrets.values()]) if self.secrets else None
        return leak(jacobian[known], noise[known], prior, varying)

    def _noise(self, name: str, tensor: Tensor, compared: Tensor) -> Tensor:
        """Return the standard deviation of each number, (numbers,); 0 for a tensor of zeros, which reveals nothing.

        It is what the model leaves unexplained, but for secrets, which are not the client's own here. Laplace noise has
        twice the Fisher information of normal noise as large.
        """
        stated = math.hypot(self.move.noise.get(name, 0.0), ROUNDING * _size(tensor))
        size = stated if self.secrets else _size(compared - tensor)
        laplace = self.move.distance == "l1" and name in self.move.noise
        return torch.full((tensor.numel(),), size / math.sqrt(2) if laplace else size, dtype=torch.float64)


def _size(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _jacobian(values: Tensor, point: Tensor, tell: Callable[[float], None]) -> Tensor:
    """Return the Jacobian (values, point), column by column: a network has more weights than an image has pixels."""
    if values.numel() * point.numel() > MOST_NUMBERS:
        raise ConfigError(
            f"A score takes at most {MOST_NUMBERS:,} derivatives, got {values.numel():,} numbers of an update times "
            f"{point.numel():,} of an image. Use a smaller model or smaller images."
        )
    pull = torch.zeros_like(values, requires_grad=True)
    (pulled,) = torch.autograd.grad(values, point, pull, create_graph=True)  # linear in pull
    columns = values.new_empty(point.numel(), values.numel())
    for place in range(point.numel()):
        (columns[place],) = torch.autograd.grad(pulled[place], pull, retain_graph=True)
        if place % 64 == 0:
            tell(place / point.numel())
    return columns.T


def summarise_scores(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over seeds and targets, one line per defence."""
    lines = []
    for defence in dict.fromkeys(row["defence"] for row in rows):
        own = [row for row in rows if row["defence"] == defence]
        line: dict[str, Any] = {"defence": defence, "n": len(own)}
        for key in ("psnr_cap", "psnr_unseen", "seen", "directions", "bits"):
            values = [row[key] for row in own if row[key] is not None]
            line[key] = sum(values) / len(values) if values else None
        lines.append(line | {"why": own[0]["why"]})
    return lines
