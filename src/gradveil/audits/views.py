"""What a server sees in a cell of an audit, and first updates, which belong to no training."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, Scene
from gradveil.attacks.parts.combined import SECRETS
from gradveil.audits.plan import Cell
from gradveil.audits.settings import AuditSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.auxiliary import image_keys, joined
from gradveil.data.pixels import to_batch, to_unit
from gradveil.defences import Defence
from gradveil.engines.devices import make_network
from gradveil.engines.simulation import chosen_normalisation, usable_device
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.randomness import derive_seed, stream
from gradveil.threat import Knowledge, Observation, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch, Update

GUARDED = 64
"""Images at most of a guard that trains locally."""
PUBLIC_IMAGES = 500
"""Test images that stand for public data of the same kind."""


@dataclass(frozen=True)
class CellView:
    """What a server sees of some targets, whose updates have equally many images.

    Attributes:
        seen: what the attack gets.
        private: the images behind each update.
        targets: their numbers.
        clients: the number of each client, or `SUM`.
        digests: the digest of each attacked update.
        sizes: how many images each client has in all; for a mean, the client with fewest.
        local: how each client trains.
        local_steps: number of local steps of each client.
        branched: whether the round was played again, and is not itself part of the training.
        noise: the signal-to-noise ratio of each update, or None if no noise was added.
        later_digests: the digests of each client's later updates that are attacked together with the first.
        spare: public images of a few updates, not among those that attacks learn from, to rehearse an attack on.
    """

    seen: Observation
    private: list[Batch]
    targets: list[int]
    clients: list[int]
    digests: list[str]
    sizes: list[int]
    local: LocalSettings
    local_steps: int
    branched: bool
    noise: list[float | None]
    later_digests: list[list[str]] = field(default_factory=list)
    spare: list[Batch] = field(default_factory=list)


def first_view(
    cell: Cell, settings: AuditSettings, dataset: Dataset, defence: Defence, attack: Attack, root: Path | None
) -> CellView:
    """Return what the server sees of first updates, without a training."""
    private = private_batches(settings, dataset)[cell.first : cell.last]
    seen = observed(cell, settings, dataset, private, defence, attack, root)
    count, targets, local = len(private), list(range(cell.first, cell.last)), local_of(settings, cell)
    sizes, steps = [settings.images] * count, local.num_steps(settings.images)
    return CellView(seen, private, targets, targets, digests_of(seen), sizes, local, steps, False, [None] * count)


def digests_of(seen: Observation) -> list[str]:
    """Return the digest of each client's first update."""
    return [
        Update({n: t[row] for n, t in seen.updates.items()}, 0, {n: t[row] for n, t in seen.buffers.items()}).sha256()
        for row in range(0, seen.num_targets, seen.rounds)
    ]


def undefended_network(settings: AuditSettings, cell: Cell, dataset: Dataset) -> nn.Module:
    """Return the network of a cell as the server initialises it, before the defence."""
    training = settings.training(cell.defence, cell.seed)
    normalisation = chosen_normalisation(settings.normalise, dataset)
    network = make_network(training, dataset.shape, dataset.num_classes, normalisation)
    return network.to(usable_device(settings.device))


def threat_of(cell: Cell, settings: AuditSettings, attack: Attack | None) -> ThreatModel:
    """Return what the attacker of a cell knows: secrets only if it knows the defence."""
    alters = attack is not None and Knowledge.ALTERS_MODEL in attack.needs
    useless = {*([] if alters else [Knowledge.ALTERS_MODEL]), *([] if cell.adaptive else SECRETS)}
    knows = [name for name in settings.knows if name not in useless]
    return ThreatModel.of(*knows, *(["defence"] if cell.adaptive else []))


def alteration(
    cell: Cell, settings: AuditSettings, dataset: Dataset, attack: Attack | None
) -> Callable[[nn.Module], nn.Module] | None:
    """Return how a malicious server's attack changes the network, or None if it does not."""
    if attack is None or Knowledge.ALTERS_MODEL not in attack.needs:
        return None
    public = (
        public_images(dataset).to(usable_device(settings.device)) if Knowledge.PUBLIC_DATA in settings.knows else None
    )
    scene = Scene(dataset.shape, dataset.num_classes, public)
    return lambda network: attack.alter(network, scene, stream(cell.seed, "alter"))


def public_knowledge(settings: AuditSettings, dataset: Dataset) -> PublicKnowledge:
    """Return what an attacker may have without any client's help."""
    device = usable_device(settings.device)
    averages = _class_averages(dataset, device) if "class-averages" in settings.knows else None
    return PublicKnowledge(public_images(dataset).to(device), averages)


def observed(
    cell: Cell,
    settings: AuditSettings,
    dataset: Dataset,
    private: list[Batch],
    defence: Defence,
    attack: Attack | None,
    root: Path | None,
) -> Observation:
    """Return what a server sees of the first updates of clients that have these images and no others.

    Under secure aggregation that is the mean of all of them. ``attack`` may alter the network. No training follows, so
    that no price belongs to these updates.
    """
    device = usable_device(settings.device)
    aux = _auxiliary(settings, dataset, root, defence).to(device) if defence.uses_aux else None
    return observe(
        undefended_network(settings, cell, dataset),
        [batch.to(device) for batch in private],
        threat=threat_of(cell, settings, attack),
        num_classes=dataset.num_classes,
        defence=defence,
        protocol=Protocol(
            local_of(settings, cell), settings.lr, rounds=settings.looks, aggregation=settings.aggregation
        ),
        public=public_knowledge(settings, dataset),
        federation=Federation(
            guards=_guards(settings, defence, aux),
            aux=aux,
            num_clients=settings.clients,
            first_client=cell.first,
            seed=cell.seed,
            alter=alteration(cell, settings, dataset, attack),
        ),
    )


def _auxiliary(settings: AuditSettings, dataset: Dataset, root: Path | None, defence: Defence) -> Batch:
    """Return public images for the defence: those of ``aux``, or the last test images that are not private."""
    if settings.aux:
        split = joined(dataset, load_dataset(settings.aux, root), labelled=defence.aux_labels)
        chosen = np.arange(len(dataset.train), len(split))[:PUBLIC_IMAGES]
    else:
        split, chosen = dataset.test, nobodys(dataset)[-PUBLIC_IMAGES:]
        if not len(chosen):
            raise ConfigError(
                "Public images must not be private ones, got only test images that are also training images. Add --aux."
            )
    return to_batch(split.images[chosen], split.labels[chosen])


def nobodys(dataset: Dataset) -> np.ndarray:
    """Return the positions of the test images that are not among the training images, in a fixed random order.

    Test images are often sorted by class, and the first of them would lack most classes.
    """
    free = np.flatnonzero(~np.isin(image_keys(dataset.test.images), image_keys(dataset.train.images)))
    return np.random.default_rng(0).permutation(free)


def _guards(settings: AuditSettings, defence: Defence, aux: Batch | None) -> list[Batch]:
    """Return the images of the defence's guards, taken from the public ones.

    If clients send gradients, a guard has as many images as they have; if they train locally, it has more.
    """
    count = len(defence.early_clients(settings.clients))
    if not count or aux is None:
        return []
    wanted = count * (settings.images if settings.protocol == "lab" else GUARDED)
    return [aux[slice(number, wanted, count)] for number in range(count)]


def local_of(settings: AuditSettings, cell: Cell) -> LocalSettings:
    """Return how clients train that are attacked without a training: as in one, on all of their few images."""
    how = Protocol.of(settings.training(cell.defence, cell.seed)).local
    return dataclasses.replace(how, batch_size=0) if how.algorithm == "fedsgd" else how


def spare_public(dataset: Dataset, count: int, images: int) -> list[Batch]:
    """Return batches of test images that are neither private nor among those that attacks learn from, if there are."""
    free = nobodys(dataset)[PUBLIC_IMAGES:][: count * images]
    whole = to_batch(dataset.test.images[free], dataset.test.labels[free], np.ones(len(free), bool))
    return [whole[slice(start, start + images)] for start in range(0, len(free) - images + 1, images)]


def public_images(dataset: Dataset, most: int = PUBLIC_IMAGES) -> Batch:
    """Return test images that are not private, ``most`` at most, in a fixed random order."""
    free = nobodys(dataset)[:most]
    return to_batch(dataset.test.images[free], dataset.test.labels[free])


def _class_averages(dataset: Dataset, device: torch.device) -> Tensor:
    """Return the mean test image of each class, (classes, C, H, W); of all images if a class has none."""
    images, labels = to_unit(dataset.test.images), torch.from_numpy(dataset.test.labels)
    means = [images[labels == c] if bool((labels == c).any()) else images for c in range(dataset.num_classes)]
    return torch.stack([some.mean(0) for some in means]).to(device)


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
