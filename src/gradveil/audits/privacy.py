"""The privacy cell of an audit: attack the updates of some clients at once, and score the guesses."""

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, Scene, build_attack
from gradveil.attacks.parts.analytic import Block
from gradveil.audits.blind import judged, yardstick
from gradveil.audits.plan import Cell, Rows, facts_of, finite
from gradveil.audits.settings import AuditSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.auxiliary import image_keys, joined
from gradveil.data.pixels import to_batch, to_bytes, to_unit
from gradveil.defences import Defence, build_defence
from gradveil.engines.devices import local_settings, make_network
from gradveil.engines.simulation import chosen_normalisation, usable_device
from gradveil.engines.tripwire import inspect
from gradveil.errors import ConfigError
from gradveil.federated.protocol import ONE_GRADIENT, LocalSettings, Protocol
from gradveil.metrics import align, label_accuracy, score_targets
from gradveil.metrics.base import is_guess
from gradveil.randomness import derive_seed, stream
from gradveil.threat import Knowledge, Observation, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

ITERATES = 12
"""Intermediate pictures to keep of an attack that can keep any."""
GUARDED = 64
"""Images at most of a guard that trains locally."""
PUBLIC_IMAGES = 500
"""Test images that stand for public data of the same kind."""
SECRETS = (Knowledge.KEY, Knowledge.LOCK, Knowledge.PRIVATE_STATE)
"""Secrets of a defence, useless to an attacker who does not know the defence."""


def attack_cell(
    cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None
) -> tuple[Rows, dict[str, Tensor]]:
    """Attack and score one cell's targets; return their rows, and their pictures by name."""
    every = private_batches(settings, dataset)
    private = every[cell.first : cell.last]
    defence, attack = build_defence(cell.defence), build_attack(cell.attack).keeping(ITERATES)
    started = time.perf_counter()
    seen = observed(cell, settings, dataset, private, defence, attack, root)
    result = attack(seen, stream(cell.seed, "attack", cell.first))
    share = (time.perf_counter() - started) / len(private)
    entries = sum(tensor[0].numel() for tensor in seen.updates.values())
    budget = defence.budget(_local(settings, cell).releases(settings.images, entries=entries))
    truth = torch.stack([batch.images for batch in private])
    guess = torch.stack([align(*pair) for pair in zip(truth, result.images.cpu(), strict=True)])
    scores = _scores(truth, guess, settings, root)
    rule = yardstick(dataset, torch.cat([batch.images for batch in every]), settings.seed)
    labels = torch.stack([batch.labels for batch in private])
    informed = [seen.knows(Knowledge.LABELS) or bool((guessed >= 0).any()) for guessed in result.labels]
    compared = judged(truth, guess, labels, informed, rule, settings, root)
    bounds, alarms = _certified(cell, seen, private, defence), _alarms(seen, private)
    common = facts_of(cell) | {
        "knows": seen.threat.names,
        "epsilon": finite(budget.epsilon if budget else None),
        "delta": budget.delta if budget else None,
        "attack_steps": result.steps[-1] if result.steps else None,
        "seconds": round(share, 3),
        "failed": False,
    }
    rows = []
    for number, batch in enumerate(private):
        found = _found(result, number, batch, guess[number])
        found |= compared[number]
        checks = {"target": cell.first + number, "certificate": bounds[number], "tripwire": alarms[number]}
        why = "; ".join(filter(None, [found["why"], *scores[number]["unmeasured"]]))
        rows.append(settings.schema.row("privacy", common | found | scores[number] | checks | {"why": why}))
    return rows, _pictures(truth, guess, result)


def refuse_known(attacks: Iterable[Attack], private: list[Batch], dataset: Dataset) -> None:
    """Raise ConfigError if an attack was prepared on a target."""
    for attack in attacks:
        known = attack.prepared_on(dataset.shape, dataset.num_classes)
        targets = image_keys(torch.cat([batch.images for batch in private]).numpy()).tolist() if known else []
        same = sum(key in known for key in targets)
        if same:
            raise ConfigError(
                f"Attack {attack.name!r} must not be prepared on its targets, got {same} of {len(targets)} that its "
                "generator was trained on. Train it on other images: gradveil train-generator --split test."
            )


def _certified(cell: Cell, seen: Observation, private: list[Batch], defence: Defence) -> list[float | None]:
    """Return the least distance that the defence certifies for any image of each target, from its own batch."""
    device = next(seen.network.parameters()).device
    found = [
        defence.certificate(seen.network, batch.to(device), stream(cell.seed, "certificate", cell.first + number))
        for number, batch in enumerate(private)
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


def observed(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    private: list[Batch],
    defence: Defence,
    attack: Attack | None,
    root: Path | None,
) -> Observation:
    """Return what a server sees of these clients, each of which sends an update of the network that all received.

    ``attack`` may alter that network.
    """
    device = usable_device(settings.device)
    aux = _auxiliary(settings, dataset, root, defence).to(device) if defence.uses_aux else None
    training = settings.training(cell.defence, cell.seed)
    normalisation = chosen_normalisation(settings.normalise, dataset)
    network: nn.Module = make_network(training, dataset.shape, dataset.num_classes, normalisation).to(device)
    altering = attack if attack is not None and Knowledge.ALTERS_MODEL in attack.needs else None
    useless = {*([] if altering else [Knowledge.ALTERS_MODEL]), *([] if cell.adaptive else SECRETS)}
    knows = [name for name in settings.knows if name not in useless]
    public = _public(dataset, device)
    scene = Scene(dataset.shape, dataset.num_classes, public if Knowledge.PUBLIC_DATA in knows else None)
    return observe(
        network,
        [batch.to(device) for batch in private],
        threat=ThreatModel.of(*knows, *(["defence"] if cell.adaptive else [])),
        num_classes=dataset.num_classes,
        defence=defence,
        protocol=_protocol(settings, cell),
        public=PublicKnowledge(
            public, _class_averages(dataset, device) if "class-averages" in settings.knows else None
        ),
        federation=Federation(
            guards=_guards(settings, defence, aux),
            aux=aux,
            num_clients=settings.clients,
            first_client=cell.first,
            seed=cell.seed,
            alter=(lambda net: altering.alter(net, scene, stream(cell.seed, "alter"))) if altering else None,
        ),
    )


def _auxiliary(settings: AuditSettings, dataset: Dataset, root: Path | None, defence: Defence) -> Batch:
    """Return public images for the defence: those of ``aux``, or the last test images that are not private."""
    if settings.aux:
        split = joined(dataset, load_dataset(settings.aux, root), labelled=defence.aux_labels)
        chosen = np.arange(len(dataset.train), len(split))[:PUBLIC_IMAGES]
    else:
        split, chosen = dataset.test, _nobodys(dataset)[-PUBLIC_IMAGES:]
        if not len(chosen):
            raise ConfigError(
                "Public images must not be private ones, got only test images that are also training images. Add --aux."
            )
    return to_batch(split.images[chosen], split.labels[chosen])


def _nobodys(dataset: Dataset) -> np.ndarray:
    """Return the positions of the test images that are not among the training images."""
    return np.flatnonzero(~np.isin(image_keys(dataset.test.images), image_keys(dataset.train.images)))


def _guards(settings: AuditSettings, defence: Defence, aux: Batch | None) -> list[Batch]:
    """Return the images of the defence's guards, taken from the public ones.

    If clients send gradients, a guard has as many images as they have; if they train locally, it has more.
    """
    count = len(defence.early_clients(settings.clients))
    if not count or aux is None:
        return []
    wanted = count * (settings.images if settings.update == "gradient" else GUARDED)
    return [aux[slice(number, wanted, count)] for number in range(count)]


def _protocol(settings: AuditSettings, cell: Cell) -> Protocol:
    """Return how the attacked clients train, and in how many rounds the server looks at them."""
    lr = settings.lr if settings.update == "local" else 1.0
    return Protocol(_local(settings, cell), lr, rounds=settings.looks)


def _local(settings: AuditSettings, cell: Cell) -> LocalSettings:
    """Return how the attacked clients train: one gradient of all their images, or as in the training."""
    if settings.update == "gradient":
        return ONE_GRADIENT
    how = local_settings(settings.training(cell.defence, cell.seed))
    return dataclasses.replace(how, batch_size=0) if how.algorithm == "fedsgd" else how


def _public(dataset: Dataset, device: torch.device) -> Batch:
    """Return test images that are not private."""
    free = _nobodys(dataset)[:PUBLIC_IMAGES]
    return to_batch(dataset.test.images[free], dataset.test.labels[free]).to(device)


def _class_averages(dataset: Dataset, device: torch.device) -> Tensor:
    """Return the mean test image of each class, (classes, C, H, W); of all images if a class has none."""
    images, labels = to_unit(dataset.test.images), torch.from_numpy(dataset.test.labels)
    means = [images[labels == c] if bool((labels == c).any()) else images for c in range(dataset.num_classes)]
    return torch.stack([some.mean(0) for some in means]).to(device)


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
        "label_accuracy": label_accuracy(private.labels, labels) if bool((labels >= 0).any()) else None,
        "guessed": float(is_guess(guess).float().mean()),
        "converged": bool(result.converged[number]),
        "attacker_loss": finite(loss),
        "countermove": (result.answers[number] or None) if result.answers else None,
        "not_decoded": (result.not_decoded[number] or None) if result.not_decoded else None,
        "why": result.why[number] if result.why else "",
    }


def _pictures(truth: Tensor, guess: Tensor, result: Reconstruction) -> dict[str, Tensor]:
    """Return guesses and intermediate pictures as bytes, in the order of the truth."""
    steps = result.iterates.cpu() if result.iterates.numel() else guess.new_empty(0, *guess.shape)
    ways = [torch.stack([align(*pair) for pair in zip(truth, step, strict=True)]) for step in steps[:-1]]
    iterates = torch.stack([*ways, guess]) if len(steps) else steps
    return {
        "images": to_bytes(guess),
        "guessed": guess.flatten(2).isfinite().all(2).to(torch.uint8),
        "iterates": to_bytes(iterates),
        "labels": result.labels.cpu(),
        "steps": torch.tensor(result.steps, dtype=torch.int64),
    }


def private_batches(settings: AuditSettings, dataset: Dataset) -> list[Batch]:
    """Return the private images, one batch per target, drawn from the training images by the first seed."""
    wanted, there = settings.targets * settings.images, len(dataset.train)
    if wanted > there:
        raise ConfigError(
            f"targets times images must be at most the {there:,} training images, got {wanted:,}. Lower --targets."
        )
    order = np.random.default_rng(derive_seed(settings.seed, "targets")).permutation(there)[:wanted]
    marks = np.ones(wanted, bool)  # a client would mark the images that are attacked
    whole = to_batch(dataset.train.images[order], dataset.train.labels[order], marks)
    return [whole[slice(start, start + settings.images)] for start in range(0, wanted, settings.images)]
