"""Work out one cell of an audit. A cell that fails leaves rows that say why."""

import copy
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks import build_any_attack
from gradveil.attacks.base import needs_message
from gradveil.attacks.parts.combined import SECRETS
from gradveil.attacks.shadow import ShadowAttack
from gradveil.audits.membership import membership_cell
from gradveil.audits.plan import Cell, Rows, attacks_together, facts_of
from gradveil.audits.privacy import attack_cell
from gradveil.audits.scale import left_out
from gradveil.audits.settings import AuditSettings
from gradveil.audits.shadows import RoundShadows
from gradveil.audits.tapping import attacked_clients
from gradveil.audits.utility import price_cell
from gradveil.audits.views import public_images
from gradveil.data import Dataset, load_dataset
from gradveil.data.auxiliary import joined, refuse_overlap
from gradveil.data.federated import federate
from gradveil.defences import Defence, build_defence
from gradveil.engines.canaries import Canaries
from gradveil.engines.devices import defended, make_network
from gradveil.engines.simulation import check_output, chosen_normalisation
from gradveil.engines.training import single_thread
from gradveil.errors import ConfigError, GradveilError
from gradveil.federated.client import check_trainable
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import Protocol
from gradveil.own import told_error
from gradveil.scratch import scratch_in
from gradveil.threat import Knowledge, ThreatModel

SCRATCH = "scratch"
"""The folder of an audit for what attacks prepare from public data; it is deleted when the audit is finished."""


def run_cell(
    cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None, out: Path | None = None
) -> tuple[Rows, dict[str, Tensor]]:
    """Return the cell's rows, and its pictures by name, worked out on one torch thread.

    The result depends on the settings alone. ``root`` is the data root, which holds the weights of metrics; ``out`` is
    the audit's folder, for the private files of clients that train and for the taps of trainings.
    """
    try:
        with single_thread(), scratch_in(None if out is None else out / SCRATCH):
            if cell.kind == "utility":
                return price_cell(cell, settings, dataset, root, out), {}
            if cell.kind == "membership":
                return membership_cell(cell, settings, dataset, root), {}
            return attack_cell(cell, settings, dataset, root, out)
    except GradveilError as error:
        return failed_rows(cell, f"{type(error).__name__}: {error}", settings), {}
    except Exception as error:  # a user's own component, or torch out of memory: the other cells still run
        return failed_rows(cell, told_error(error), settings), {}


def check(settings: AuditSettings, dataset: Dataset, root: Path | None = None) -> None:
    """Raise ConfigError before any work if model, partition, defences or the attacks' needs would make cells fail.

    Attacked clients can use test images as public ones; clients that train have those of ``--aux`` only.
    """
    knows = ThreatModel.of(*settings.knows).knows
    secrets = [secret.value for secret in SECRETS if secret in knows and not settings.adaptive]
    if secrets:
        raise ConfigError(
            f"knows must not name {', '.join(secrets)} without --adaptive, got {','.join(settings.knows)}: only an "
            "attacker who knows the defence can use its secrets. Add --adaptive."
        )
    training = settings.training("none", settings.seed)
    without = left_out(settings, dataset)
    for spec in (spec for spec in settings.attacks if spec not in without):
        _check_shadows(spec, settings, dataset)
        _check_public(spec, dataset)
        granted = knows | {Knowledge.DEFENCE} if settings.adaptive else knows
        several = _several(settings, dataset)
        needs = build_any_attack(spec).needs_for(single_step=not several)
        if not needs <= granted:
            raise ConfigError(needs_message(spec, needs, granted))
        if several and Knowledge.ENCODINGS in build_any_attack(spec).needs:
            raise ConfigError(
                f"Attack {spec!r} needs updates of a single step, got several local steps. Use --protocol lab."
            )
    defences = [build_defence(spec) for spec in settings.defences]
    public = [defence for defence in defences if defence.uses_aux]
    if settings.aux and public:
        aux = load_dataset(settings.aux, root)
        both = joined(dataset, aux, labelled=any(defence.aux_labels for defence in public))
        count = len(dataset.train)
        refuse_overlap(both, np.arange(count), np.arange(count, len(both)))
    normalisation = chosen_normalisation(settings.normalise, dataset)
    network = make_network(training, dataset.shape, dataset.num_classes, normalisation)
    check_output(network, dataset.shape, dataset.num_classes, torch.device("cpu"))
    for defence in defences:
        defence.early_clients(settings.clients)
        images = settings.images if settings.protocol == "lab" else _fewest(settings, dataset)
        defence.check_images(images, aux=bool(settings.aux) or not settings.rounds)
        changed = defended(copy.deepcopy(network), defence, settings.seed, "server")
        check_output(changed, dataset.shape, dataset.num_classes, torch.device("cpu"))
        defence.check(changed, dataset.shape)
        check_trainable(changed, defence, Protocol.of(training).local)
        if settings.canaries:
            own = settings.training(defence.spec, settings.seed)
            Canaries.beside(own, defence, FlatModel(changed), _sizes(settings, dataset), dataset.shape)
    _check_trainings(settings, dataset, defences)
    _check_together(settings, dataset)


def _check_public(spec: str, dataset: Dataset) -> None:
    """Raise if there are fewer public images than an attack needs."""
    needed, there = build_any_attack(spec).fewest_public, len(public_images(dataset))
    if there < needed:
        raise ConfigError(
            f"Attack {spec!r} needs at least {needed} public images, which are a part of the test images, got {there}. "
            "Use a data set with more test images, or drop the attack."
        )


def _check_shadows(spec: str, settings: AuditSettings, dataset: Dataset) -> None:
    """Raise if an attack on membership can't play its shadow models under one of the defences."""
    attack = build_any_attack(spec)
    if not isinstance(attack, ShadowAttack):
        return
    for defence in map(build_defence, settings.defences):
        known = settings.adaptive and attack.adapts_to(defence)
        training = settings.training(defence.spec, settings.seed)
        RoundShadows(attack, training, dataset, defence, known).check(_fewest(settings, dataset))


def _check_together(settings: AuditSettings, dataset: Dataset) -> None:
    """Raise if an attack takes tapped rounds together that are not of the same images."""
    specs = [spec for spec in settings.attacks if attacks_together(build_any_attack(spec))]
    if not specs:
        return
    if len(settings.taps) < 2 or not settings.rounds:
        raise ConfigError(f"together needs two tapped rounds or more, got one for attack {specs[0]!r}. Raise --tap.")
    if settings.looks > 1:
        raise ConfigError(f"looks must be 1 with together, got {settings.looks}. Drop --looks.")
    most = max(_sizes(settings, dataset))
    if settings.protocol == "lab" and most > settings.images:
        raise ConfigError(
            f"together needs rounds of the same images, got clients with {most} images that send the gradient of "
            f"{settings.images}. Add --partition iid:images={settings.images}, or use --protocol fedavg."
        )


def _check_trainings(settings: AuditSettings, dataset: Dataset, defences: Iterable[Defence]) -> None:
    """Raise if clients of a training have too few images, or a round has too few clients to attack."""
    if not settings.rounds:
        return
    for defence in defences:
        defence.check_images(_fewest(settings, dataset), aux=True)
    most = max(_sizes(settings, dataset))
    if settings.protocol == "lab" and settings.images > most:
        raise ConfigError(
            f"images must be at most the images of a client ({most:,}), got {settings.images:,}. Lower --images or "
            "--clients."
        )
    for seed in settings.all_seeds:
        for spec in settings.defences:
            attacked_clients(settings, seed, spec)


def _several(settings: AuditSettings, dataset: Dataset) -> bool:
    """Return whether clients take several local steps per round."""
    how = Protocol.of(settings.training("none", settings.seed)).local
    return how.algorithm == "fedavg" and how.num_steps(_fewest(settings, dataset)) > 1


def _fewest(settings: AuditSettings, dataset: Dataset) -> int:
    """Return the number of images of the client that has fewest."""
    if not settings.rounds:
        return settings.images
    return min(_sizes(settings, dataset))


def _sizes(settings: AuditSettings, dataset: Dataset) -> list[int]:
    """Return the number of images of each client."""
    return federate(dataset, settings.partition, settings.clients, settings.sensitive, settings.seed).sizes


def failed_rows(cell: Cell, why: str, settings: AuditSettings) -> Rows:
    """Return the rows of a cell that failed: they have every field, but no figures."""
    schema = settings.schema
    common = schema.blank(cell.kind) | facts_of(cell) | {"why": why, "failed": True}
    if cell.kind == "utility":
        return [schema.row(cell.kind, common)]
    if cell.kind == "membership":
        return [schema.row(cell.kind, common | {"knows": []})]
    more = {"converged": False, "knows": []}
    return [schema.row(cell.kind, common | more | {"target": target}) for target in range(cell.first, cell.last)]
