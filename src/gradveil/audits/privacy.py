"""The privacy cell of an audit: attack the updates of some clients at once, and score the guesses."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks import Attack, build_attack
from gradveil.attacks.parts.analytic import Block
from gradveil.audits.blind import Yardstick, judged, yardstick
from gradveil.audits.plan import Cell, Rows, facts_of, finite
from gradveil.audits.settings import AuditSettings
from gradveil.audits.views import CellView, private_batches, views
from gradveil.data import Dataset
from gradveil.data.pixels import to_bytes, to_unit
from gradveil.defences import Defence, build_defence
from gradveil.engines.tripwire import inspect
from gradveil.metrics import align, label_accuracy, score_targets
from gradveil.metrics.base import is_guess
from gradveil.metrics.recognition import OTHER_IMAGES
from gradveil.randomness import stream
from gradveil.storage import load_tensors
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.types import Batch

ITERATES = 12
"""Intermediate pictures to keep of an attack that can keep any."""


def attack_cell(
    cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None, out: Path | None = None
) -> tuple[Rows, dict[str, Tensor]]:
    """Attack and score one cell's targets; return their rows, and their pictures by name.

    ``out`` is the audit's folder, which holds the taps of the training.
    """
    defence, attack = build_defence(cell.defence), build_attack(cell.attack).keeping(ITERATES)
    started = time.perf_counter()
    rule = yardstick(dataset, _every_target(settings, dataset, out), settings.seed)
    parts = [
        _attacked(view, cell, settings, defence, attack, rule, root)
        for view in views(cell, settings, dataset, defence, attack, root, out)
    ]
    rows = sorted((row for own, _ in parts for row in own), key=lambda row: row["target"])
    share = round((time.perf_counter() - started) / len(rows), 3)
    places = torch.tensor([row["target"] for own, _ in parts for row in own]).argsort()
    return [row | {"seconds": share} for row in rows], _merged([pictures for _, pictures in parts], places)


def _every_target(settings: AuditSettings, dataset: Dataset, out: Path | None) -> Tensor:
    """Return the images behind all attacked updates of the audit, (N, C, H, W)."""
    if out is not None and (out / "truth.safetensors").exists():
        return to_unit(load_tensors(out / "truth.safetensors")["images"].flatten(0, 1))
    return torch.cat([batch.images for batch in private_batches(settings, dataset)])


def _attacked(
    view: CellView,
    cell: Cell,
    settings: AuditSettings,
    defence: Defence,
    attack: Attack,
    rule: Yardstick,
    root: Path | None,
) -> tuple[Rows, dict[str, Tensor]]:
    """Attack and score the targets of one view."""
    seen, private = view.seen, view.private
    names = (cell.round, view.targets[0]) if cell.needs else (cell.first,)
    result = attack(seen, stream(cell.seed, "attack", *names))
    entries = sum(tensor[0].numel() for tensor in seen.updates.values())
    truth = torch.stack([batch.images.cpu() for batch in private])
    guess = torch.stack([align(*pair) for pair in zip(truth, result.images.cpu(), strict=True)])
    scores = _scores(truth, guess, settings, root)
    informed = [seen.knows(Knowledge.LABELS) or bool((guessed >= 0).any()) for guessed in result.labels]
    labels = torch.stack([batch.labels.cpu() for batch in private])
    compared = judged(truth, guess, labels, informed, rule, settings, root)
    bounds, alarms = _certified(view, cell, defence), _alarms(seen, private)
    common = facts_of(cell) | {
        "knows": seen.threat.names,
        "local_steps": view.local.num_steps(len(private[0])),
        "batch_norm": view.local.batch_norm,
        "branched": view.branched,
        "attack_steps": result.steps[-1] if result.steps else None,
        "seconds": None,
        "failed": False,
    }
    rows = []
    for number, batch in enumerate(private):
        found = _found(result, number, batch, guess[number])
        budget = defence.budget(view.local.releases(view.sizes[number], entries=entries))
        own = {
            "target": view.targets[number],
            "client": view.clients[number],
            "update_sha256": view.digests[number],
            "signal_to_noise": finite(view.noise[number]),
            "certificate": bounds[number],
            "tripwire": alarms[number],
            "epsilon": finite(budget.epsilon if budget else None),
            "delta": budget.delta if budget else None,
            "why": "; ".join(filter(None, [found["why"], *scores[number]["unmeasured"]])),
        }
        own["flags"] = compared[number]["flags"] + [OTHER_IMAGES] * _drawn_anew(defence, view, number)
        rows.append(settings.schema.row("privacy", common | found | compared[number] | scores[number] | own))
    return rows, _pictures(private, guess, result)


def _drawn_anew(defence: Defence, view: CellView, number: int) -> bool:
    """Return whether the update may be of other images of the client than those that are scored."""
    return defence.draws_own_batch and view.sizes[number] > len(view.private[number])


def _merged(parts: list[dict[str, Tensor]], places: Tensor) -> dict[str, Tensor]:
    """Return the pictures of all views in the order of their targets; shorter batches end in no guess."""
    if len(parts) == 1:
        return parts[0]
    most = max(part["images"].shape[1] for part in parts)
    whole = {name: torch.cat([_padded(part[name], 1, most) for part in parts])[places] for name in PER_TARGET}
    ways = [_padded(part["iterates"], 2, most) for part in parts]
    same = len({len(way) for way in ways}) == 1
    iterates = torch.cat(ways, 1)[:, places] if same else whole["images"].new_empty(0, *whole["images"].shape)
    return whole | {"iterates": iterates, "steps": parts[0]["steps"][: len(iterates)]}


PER_TARGET = ("images", "guessed", "labels", "truth", "truth_labels")
"""Pictures with one entry per target."""


def _padded(tensor: Tensor, axis: int, size: int) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)


def _certified(view: CellView, cell: Cell, defence: Defence) -> list[float | None]:
    """Return the least distance that the defence certifies for any image of each target, from its own batch."""
    network = view.seen.network
    device = next(network.parameters()).device
    found = [
        defence.certificate(network, batch.to(device), stream(cell.seed, "certificate", target))
        for target, batch in zip(view.targets, view.private, strict=True)
    ]
    return [None if bounds is None else finite(float(bounds.min())) for bounds in found]


def _alarms(seen: Observation, private: list[Batch]) -> list[list[str] | None]:
    """Return what the tripwire finds in an altered model with each client's images, or None if the model is honest.

    The architecture is not compared: a client that compares it finds every inserted layer. Findings in the layers that
    only keep the network working behind the inserted rows are left out, since an attack could do without them.
    """
    if not seen.knows(Knowledge.ALTERS_MODEL):
        return [None] * len(private)
    device = next(seen.network.parameters()).device
    behind = {f"{name}.shift" for name, layer in seen.network.named_modules() if isinstance(layer, Block)}
    return [[f.title for f in inspect(seen.network, batch.to(device)) if f.layer not in behind] for batch in private]


def _scores(truth: Tensor, guess: Tensor, settings: AuditSettings, root: Path | None) -> Rows:
    """Return the figures of each target by field, None if a metric was not measured, and ``unmeasured``: why not.

    Metrics that were not asked for are None without a reason.
    """
    figures, reasons = score_targets(truth, guess, root, settings.metrics)
    every = [column.key for column in settings.schema.metrics]
    return [dict.fromkeys(every) | own | {"unmeasured": why} for own, why in zip(figures, reasons, strict=True)]


def _found(result: Reconstruction, number: int, private: Batch, guess: Tensor) -> dict[str, Any]:
    """Return what an attack says of one target, and how much of it there is to score."""
    loss, labels = float(result.loss[number]), result.labels[number].cpu()
    return {
        "label_accuracy": label_accuracy(private.labels.cpu(), labels) if bool((labels >= 0).any()) else None,
        "guessed": float(is_guess(guess).float().mean()),
        "converged": bool(result.converged[number]),
        "attacker_loss": finite(loss),
        "countermove": (result.answers[number] or None) if result.answers else None,
        "not_decoded": (result.not_decoded[number] or None) if result.not_decoded else None,
        "why": result.why[number] if result.why else "",
    }


def _pictures(private: list[Batch], guess: Tensor, result: Reconstruction) -> dict[str, Tensor]:
    """Return guesses, intermediate pictures and the truth as bytes, in the order of the truth."""
    truth = torch.stack([batch.images.cpu() for batch in private])
    steps = result.iterates.cpu() if result.iterates.numel() else guess.new_empty(0, *guess.shape)
    ways = [torch.stack([align(*pair) for pair in zip(truth, step, strict=True)]) for step in steps[:-1]]
    iterates = torch.stack([*ways, guess]) if len(steps) else steps
    return {
        "images": to_bytes(guess),
        "guessed": guess.flatten(2).isfinite().all(2).to(torch.uint8),
        "iterates": to_bytes(iterates),
        "labels": result.labels.cpu(),
        "truth": to_bytes(truth),
        "truth_labels": torch.stack([batch.labels.cpu() for batch in private]),
        "steps": torch.tensor(result.steps, dtype=torch.int64),
    }
