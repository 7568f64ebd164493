"""Leak scores without an attack: how well anyone could know images from their update, under each defence."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.attacks.parts.countermoves import countermoves
from gradveil.audits.cells import check
from gradveil.audits.plan import Cell, finite
from gradveil.audits.settings import AuditSettings, make_audit_settings
from gradveil.audits.views import observed, private_batches, public_images
from gradveil.data import Dataset, load_dataset
from gradveil.data.auxiliary import joined as with_aux
from gradveil.data.pixels import to_batch
from gradveil.defences import Countermove, build_defence, planned_defence
from gradveil.errors import ConfigError, DefenceError
from gradveil.runs.image_prior import MOST, ImagePrior, image_prior
from gradveil.runs.score_view import View
from gradveil.threat import Observation, ThreatModel
from gradveil.threat.seen import joined
from gradveil.types import Batch

SCORED = (
    "dataset", "model", "defences", "targets", "images", "aggregation", "clients", "knows", "weights", "normalise",
    "lr", "batch_norm", "aux", "seed", "seeds", "device",
)  # fmt: skip
"""The settings of an audit that a score has use for."""
TARGETS = 4
"""Scored updates by default."""
SLACK = 2.0
"""By how much, in dB, attackers may pass ``psnr_cap`` who know about images what its priors say, that neighbouring
pixels are alike, and that pixels are in [0, 1]; measured and rounded up. The bound is of first order, and pixels that
are clamped are not normal."""
LEARNED_SLACK = 6.0
"""The same for attackers with a learned prior that is not normal, such as a denoiser. Digits are far from normal: most
of their pixels are black or white."""


def score_settings(values: Mapping[str, object]) -> AuditSettings:
    """Return the settings of an audit whose first updates are scored; a score trains nothing."""
    rounds = 1 if values.get("aggregation") == "secure" else 0  # only rounds have a secure mean
    return make_audit_settings({"targets": TARGETS, **values, "rounds": rounds, "adaptive": True})


def score(
    settings: AuditSettings,
    *,
    data_root: Path | None = None,
    progress: Callable[[float, str], None] = lambda share, doing: None,
) -> list[dict[str, Any]]:
    """Return a row per defence and target: the best PSNR of any guess from one update, to first order.

    The attacker knows the labels, the defence and what the threat model grants. Of images it knows the variance of
    pixels (``white``), or the covariance of public images within classes (``covariance``). Both bounds are in the row;
    ``psnr_cap`` is the larger.

    The network, the protocol and the targets are those of an audit with the same settings and without training: each
    target is the gradient of ``images`` images, or, with ``aggregation=secure``, the mean of the gradients of
    ``clients`` clients. Each countermove of a defence models what arrives; whatever it leaves unexplained at the true
    images, such as added noise, counts as noise. The countermove that reveals most counts. See
    `gradveil.runs.cramer_rao.leak` for the limits of the bound.
    """
    if settings.protocol != "lab" or settings.looks != 1:
        raise ConfigError("A score is of single gradients, got other updates. Leave out protocol and looks.")
    dataset = load_dataset(settings.dataset, data_root)
    bounded = tuple(spec for spec in settings.defences if not build_defence(spec).hides_images)
    check(replace(settings, defences=bounded or ("none",)), dataset, data_root)  # the others have no score anyway
    prior = image_prior(_public(settings, dataset, data_root))
    private = _private(settings, dataset)
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

        found = _scored(cell, settings, dataset, private[target], prior, data_root, tell)
        seconds = round(time.perf_counter() - started, 3)
        rows.append({"kind": "score", "defence": defence, "seed": seed, "target": target, **found, "seconds": seconds})
    return rows


def _private(settings: AuditSettings, dataset: Dataset) -> list[list[Batch]]:
    """Return the batches of the clients behind each update: one client, or all of them for a secure mean."""
    if settings.aggregation == "none":
        return [[batch] for batch in private_batches(settings, dataset)]
    clients, there = settings.sampled or settings.clients, len(dataset.train)
    if clients * settings.images > there:
        raise ConfigError(
            f"clients times images must be at most the {there:,} training images, got {clients * settings.images:,}. "
            "Lower --clients or --images."
        )
    return [private_batches(replace(settings, aggregation="none", targets=clients), dataset)]


def _public(settings: AuditSettings, dataset: Dataset, root: Path | None) -> Batch:
    """Return public images: test images that are not private, or those of ``aux`` if there are none."""
    found = public_images(dataset, MOST)
    if len(found) or not settings.aux:
        return found
    both = with_aux(dataset, load_dataset(settings.aux, root), labelled=False)
    images = both.images[len(dataset.train) :][:MOST]
    return to_batch(images, np.zeros(len(images), np.int64))  # its classes may be others


def _scored(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    private: list[Batch],
    prior: ImagePrior,
    root: Path | None,
    tell: Callable[[float], None],
) -> dict[str, Any]:
    defence = planned_defence(settings.training(cell.defence, cell.seed))
    threat = ThreatModel.of(*settings.knows, "defence")
    row = _blank(prior, private) | {"knows": threat.names}
    if defence.hides_images:
        return row | {"why": "clients train on other images than their own; audit what decoders make of those"}
    try:
        seen = observed(cell, settings, dataset, private, defence, None, root)
    except DefenceError as error:
        return row | {"why": str(error)}
    moves = {name: move for name, move in (countermoves(seen) or {"": Countermove()}).items() if not move.decoys}
    if why := _unfit(seen, moves):
        return row | {"why": why}
    whole = joined(private)
    views = [View.of(seen, move, whole, cell.seed) for move in moves.values()]
    leaks = [view.leaks(prior.named, partial(_share, tell, number, len(views))) for number, view in enumerate(views)]
    best = min(range(len(leaks)), key=lambda place: min(one.mse for one in leaks[place].values()))
    found = leaks[best]
    caps = {f"psnr_cap_{name}": _psnr(one.mse) for name, one in found.items()}
    return row | caps | {
        "psnr_cap": _psnr(min(one.mse for one in found.values())),
        "seen": found["white"].seen,
        "bits": round(found["white"].bits, 1),
        "fisher_loss": finite(found["white"].fisher_loss),
        "countermove": list(moves)[best] or None,
    }  # fmt: skip


def _blank(prior: ImagePrior, private: Sequence[Batch]) -> dict[str, Any]:
    """Return the row of a target before anything is known about its update."""
    unseen = {name: float(_variances(one).mean()) for name, one in prior.named.items()}
    return {
        **dict.fromkeys(("psnr_cap", "psnr_cap_white", "psnr_cap_covariance")),
        "psnr_unseen": _psnr(min(unseen.values())),
        **{f"psnr_unseen_{name}": _psnr(unseen[name]) if name in unseen else None for name in ("white", "covariance")},
        **dict.fromkeys(("seen", "bits", "fisher_loss", "countermove")),
        "directions": sum(batch.images.numel() for batch in private),
        "images": sum(map(len, private)),
        "clients": len(private),
        "why": "",
    }


def _unfit(seen: Observation, moves: Mapping[str, Countermove]) -> str:
    """Return why an update has no score, or ""."""
    if not moves:
        return "an image behind decoys has no first-order figure; audit it"
    if seen.clients == 1:
        return ""
    if any(move.unknowns for move in moves.values()):
        return "the clients of a mean have different secrets, which a score does not tell apart; audit it"
    if seen.batch_norm != "freeze" and any(isinstance(layer, _BatchNorm) for layer in seen.network.modules()):
        return "each client of a mean normalises its own batch; add --batch-norm freeze, or audit it"
    return ""


def _variances(prior: torch.Tensor) -> torch.Tensor:
    return prior if prior.dim() == 1 else prior.diagonal()


def _share(tell: Callable[[float], None], number: int, parts: int, share: float) -> None:
    tell((number + share) / parts)


def _psnr(mse: float) -> float | None:
    return round(-10 * math.log10(mse), 2) if mse > 0 else None


AVERAGED = (
    "psnr_cap", "psnr_cap_white", "psnr_cap_covariance", "psnr_unseen", "psnr_unseen_white", "psnr_unseen_covariance",
    "seen", "directions", "bits",
)  # fmt: skip
"""The fields of rows that a summary averages."""


def summarise_scores(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over seeds and targets, one line per defence."""
    lines = []
    for defence in dict.fromkeys(row["defence"] for row in rows):
        own = [row for row in rows if row["defence"] == defence]
        line: dict[str, Any] = {"defence": defence, "n": len(own)}
        for key in AVERAGED:
            values = [row[key] for row in own if row[key] is not None]
            line[key] = sum(values) / len(values) if values else None
        lines.append(line | {"why": own[0]["why"]})
    return lines
