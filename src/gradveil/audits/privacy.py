"""The privacy cell of an audit: attack the updates of some clients at once, and score the guesses."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.attacks import Attack, build_attack
from gradveil.attacks.parts.analytic import Block
from gradveil.audits.blind import Yardstick, judged, yardstick
from gradveil.audits.knowing import played
from gradveil.audits.plan import Cell, Rows, facts_of, finite
from gradveil.audits.settings import AuditSettings
from gradveil.audits.stage import Imageless, views
from gradveil.audits.views import CellView, private_batches, threat_of
from gradveil.data import Dataset
from gradveil.data.pixels import to_bytes, to_unit
from gradveil.defences import Defence, planned_defence
from gradveil.engines.tripwire import inspect
from gradveil.federated.budgets import budget_fields
from gradveil.metrics import align, label_accuracy, score_targets
from gradveil.metrics.base import is_guess
from gradveil.metrics.recognition import OTHER_IMAGES
from gradveil.randomness import stream
from gradveil.secret_stream import SecretStream
from gradveil.storage import load_tensors
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.types import Batch

ITERATES = 12
"""Intermediate pictures to keep of an attack that can keep any."""

NO_PICTURES = {"images_recognisable": None, "identified": None, "blind_identified": None, "candidates": None}
"""Fields about pictures in the rows of an attack that looks for none."""


def attack_cell(
    cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None, out: Path | None = None
) -> tuple[Rows, dict[str, Tensor]]:
    """Attack and score one cell's targets; return their rows, and their pictures by name.

    ``out`` is the audit's folder, which holds the taps of the training.
    """
    defence = planned_defence(settings.training(cell.defence, cell.seed))
    attack = build_attack(cell.attack).keeping(ITERATES)
    started = time.perf_counter()
    rule = yardstick(dataset, _every_target(settings, dataset, out), settings.seed)
    seen, empty = views(cell, settings, dataset, defence, attack, root, out)
    parts = [_attacked(view, cell, settings, defence, attack, rule, root) for view in seen]
    parts += [_nothing(empty, cell, settings, dataset)] if empty else []
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
    result = played(attack, seen, lambda: stream(cell.seed, "attack", *names), view.spare)
    entries = sum(tensor[0].numel() for tensor in seen.updates.values())
    truth = torch.stack([batch.images.cpu() for batch in private])
    guess = torch.stack([align(*pair) for pair in zip(truth, result.images.cpu(), strict=True)])
    scores = _scores(truth, guess, settings, root)
    informed = [seen.knows(Knowledge.LABELS) or bool((guessed >= 0).any()) for guessed in result.labels]
    labels = torch.stack([batch.labels.cpu() for batch in private])
    compared = judged(truth, guess, labels, informed, rule, settings, root)
    if attack.seeks != "pictures":
        compared = [own | NO_PICTURES for own in compared]
    bounds, alarms = _certified(view, cell, defence), _alarms(seen, private)
    common = facts_of(cell) | {
        "knows": [name for name in seen.threat.names if name not in attack.ignores],
        "seeks": attack.seeks,
        "local_steps": view.local_steps,
        "batch_norm": view.local.batch_norm,
        "branched": view.branched,
        "attack_steps": result.steps[-1] if result.steps else None,
        "seconds": None,
        "failed": False,
    }
    rows = []
    for number, batch in enumerate(private):
        found = _found(result, number, batch, guess[number])
        budget = defence.budget(view.local.releases(view.sizes[number], seen.rounds + len(seen.later), entries))
        own = {
            "target": view.targets[number],
            "client": view.clients[number],
            "update_sha256": view.digests[number],
            "later_sha256": (view.later_digests[number] if view.later_digests else None) or None,
            "signal_to_noise": finite(view.noise[number]),
            "certificate": bounds[number],
            "tripwire": alarms[number],
            **dict.fromkeys(("epsilon", "delta")),
            **budget_fields(budget),
            "why": "; ".join(filter(None, [found["why"], *scores[number]["unmeasured"]])),
        }
        told = list(result.flags[number]) if result.flags else []
        own["flags"] = compared[number]["flags"] + told + [OTHER_IMAGES] * _drawn_anew(defence, view, number)
        rows.append(settings.schema.row("privacy", common | found | compared[number] | scores[number] | own))
    return rows, _pictures(private, guess, result)


def _nothing(
    empty: list[Imageless], cell: Cell, settings: AuditSettings, dataset: Dataset
) -> tuple[Rows, dict[str, Tensor]]:
    """Return the rows and pictures of targets that have no images to rebuild."""
    common = settings.schema.blank("privacy") | facts_of(cell) | {
        "knows": threat_of(cell, settings, None).names,
        "images": 0,
        "images_recognisable": 0,
        "flags": [],
        "why": "the client drew no image for this update, so there is nothing to rebuild",
        "failed": False,
    }  # fmt: skip
    own = [
        {
            "target": each.target,
            "client": each.client,
            "update_sha256": each.digest,
            "epsilon": finite(each.budget.epsilon if each.budget else None),
            "delta": each.budget.delta if each.budget else None,
        }
        for each in empty
    ]
    none, labels = torch.zeros(len(empty), 0, *dataset.shape, dtype=torch.uint8), torch.zeros(len(empty), 0).long()
    pictures = {
        "images": none,
        "guessed": torch.zeros(len(empty), 0, dtype=torch.uint8),
        "iterates": none[None][:0],
        "labels": labels,
        "truth": none,
        "truth_labels": labels,
        "steps": torch.zeros(0, dtype=torch.int64),
    }
    return [settings.schema.row("privacy", common | each) for each in own], pictures


def _drawn_anew(defence: Defence, view: CellView, number: int) -> bool:
    """Return whether the update may be of other images of the client than those that are scored.

    A tap knows which images a defence drew, unless these were also changed before the network saw them.
    """
    return defence.draws_own_batch and defence.hides_images and view.sizes[number] > len(view.private[number])


def _merged(parts: list[dict[str, Tensor]], places: Tensor) -> dict[str, Tensor]:
    """Return the pictures of all views in the order of their targets; shorter batches end in no guess."""
    most = max(1, *(part["images"].shape[1] for part in parts))
    if len(parts) == 1 and parts[0]["images"].shape[1]:
        return parts[0]
    whole = {
        name: torch.cat([_padded(part[name], 1, most, blank) for part in parts])[places]
        for name, blank in PER_TARGET.items()
    }
    ways = [_padded(part["iterates"], 2, most) for part in _with_steps(parts)]
    same = len({len(way) for way in ways}) == 1
    iterates = torch.cat(ways, 1)[:, places] if same else whole["images"].new_empty(0, *whole["images"].shape)
    return whole | {"iterates": iterates, "steps": parts[0]["steps"][: len(iterates)]}


def _with_steps(parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the pictures with as many blank iterates for targets without images as the others have."""
    count = max(len(part["iterates"]) for part in parts)
    return [
        part if part["images"].shape[1] else part | {"iterates": part["images"].expand(count, *part["images"].shape)}
        for part in parts
    ]


PER_TARGET = {"images": 0, "guessed": 0, "labels": -1, "truth": 0, "truth_labels": -1}
"""Pictures with one entry per target, and what stands for an image that a shorter batch does not have."""


def _padded(tensor: Tensor, axis: int, size: int, blank: int = 0) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([tensor, tensor.new_full(shape, blank)], axis)


def _certified(view: CellView, cell: Cell, defence: Defence) -> list[float | None]:
    """Return the least distance that the defence certifies for any image of each target, from its own batch."""
    network = view.seen.network
    device = next(network.parameters()).device
    found = [
        defence.certificate(network, batch.to(device), SecretStream(cell.seed, "certificate", target))
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
