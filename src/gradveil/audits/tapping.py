"""Which updates of an audit's trainings are attacked, the images behind them, and where the taps are kept."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks import MembershipAttack, build_any_attack
from gradveil.audits.plan import attacks_together
from gradveil.audits.settings import AuditSettings
from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.data.federated import FederatedData
from gradveil.data.pixels import to_bytes
from gradveil.defences import build_defence
from gradveil.engines.devices import images_behind
from gradveil.engines.simulation import deal
from gradveil.errors import ConfigError, TrainingError
from gradveil.federated.protocol import Protocol
from gradveil.federated.server import sample_clients
from gradveil.limits import read_json
from gradveil.storage import write_atomic
from gradveil.threat.seen import SUM, joined
from gradveil.threat.tap import Tap, TappedRound, load_tapped
from gradveil.types import Batch

Chosen = dict[int, tuple[int, ...]]
"""The attacked clients, by the number of the tapped round."""


def attacked_clients(settings: AuditSettings, seed: int, defence: str = "none") -> Chosen:
    """Return the first clients that train in each tapped round, without those that are guards of any defence.

    Under secure aggregation these are all clients but the guards of ``defence``, since only their mean can be attacked.
    If an attack takes rounds together, clients of all tapped rounds are chosen, in the order of their numbers. Nobody
    is tapped if no attack rebuilds images.

    Raises:
        ConfigError: there are fewer of them than targets, or fewer than two to take a mean of.
    """
    if all(isinstance(build_any_attack(spec), MembershipAttack) for spec in settings.attacks):
        return {}
    secure = settings.aggregation == "secure"
    specs = (defence,) if secure else settings.defences
    guards = {guard for spec in specs for guard in build_defence(spec).early_clients(settings.clients)}
    training, sizes = settings.training("none", seed), [1] * settings.clients
    chosen = {}
    present = {number: sample_clients(training, sizes, number) for number in settings.taps}
    always = set.intersection(*map(set, present.values())) if _same_clients(settings) else set(range(settings.clients))
    for number in settings.taps:
        drawn = [client for client in present[number] if client in always - guards]
        drawn = sorted(drawn) if _same_clients(settings) else drawn
        if secure and len(drawn) < 2:
            raise ConfigError(
                "aggregation secure needs two clients or more in a round that are no guards, got "
                f"{len(drawn)} in round {number}. Raise --clients or --sampled, or drop --aggregation."
            )
        if len(drawn) < settings.targets:
            raise ConfigError(
                f"targets must be at most the clients of a round that are no guards ({len(drawn)} in round {number}), "
                f"got {settings.targets}. Lower --targets, or raise --clients or --sampled."
            )
        chosen[number] = tuple(drawn if secure else drawn[: settings.targets])
    return chosen


def _same_clients(settings: AuditSettings) -> bool:
    """Return whether the same clients must be attacked in all tapped rounds."""
    return any(attacks_together(build_any_attack(spec)) for spec in settings.attacks)


@dataclass(frozen=True)
class World:
    """The federation of one defence and seed: its data, its training, and who is attacked.

    Attributes:
        training: the settings of its training, in which the images of attacked lab batches are marked.
        data: the images of all clients, with the same marks.
        chosen: the attacked clients.
    """

    training: TrainSettings
    data: FederatedData
    chosen: Chosen

    def attacked(self, number: int) -> tuple[int, ...]:
        """Return the clients whose updates of a round are attacked, in the order of targets; `SUM` if it is a mean."""
        return (SUM,) if self.training.aggregation == "secure" else self.chosen[number]

    def private(self, number: int, client: int) -> Batch:
        """Return the images behind a client's update of a round, or behind the mean of all of them for `SUM`."""
        if client == SUM:
            return joined([self.private(number, each) for each in self.chosen[number]])
        return self.data.client(client)[self.positions(number, client)]

    def positions(self, number: int, client: int) -> Tensor:
        """Return the positions of these images among the client's."""
        training = self.training
        return images_behind(self.data.sizes[client], Protocol.of(training).local, training.seed, client, number)


def world_of(settings: AuditSettings, defence: str, seed: int, dataset: Dataset, root: Path | None = None) -> World:
    """Return the federation of a defence and seed.

    Images, batches and marks do not depend on the defence, unless its guards train on public images (``--aux``) or are
    left out of a secure mean. In the lab protocol the owners of attacked images mark them, also those of defences that
    protect all images alike.
    """
    own = build_defence(defence)
    training = dataclasses.replace(
        settings.training(defence, seed), save_rounds=settings.taps, eval_every=max(settings.rounds, 1)
    )
    aux = load_dataset(training.aux, root) if training.aux else None
    world = World(training, deal(dataset, training, own, aux), attacked_clients(settings, seed, defence))
    if settings.protocol != "lab" or not world.chosen:
        return world
    marked = world.data.sensitive.copy()
    for number, clients in world.chosen.items():
        for client in clients:
            marked[world.data.offsets[client] + world.positions(number, client).numpy()] = True
    data = dataclasses.replace(world.data, sensitive=marked)
    guards = own.early_clients(settings.clients) if aux is not None else ()  # they share no private images
    return World(dataclasses.replace(training, sensitive=_positions_text(data, guards)), data, world.chosen)


def _positions_text(data: FederatedData, guards: tuple[int, ...]) -> str:
    """Return the marks as text: the marked positions of each client that has any; guards are not counted."""
    clients = [client for client in range(len(data.sizes)) if client not in guards]
    marks = [np.flatnonzero(data.sensitive[data.offsets[c] : data.offsets[c + 1]]) for c in clients]
    return ";".join(f"{place}:{'/'.join(map(str, own))}" for place, own in enumerate(marks) if len(own))


def truths(settings: AuditSettings, dataset: Dataset) -> Iterator[tuple[int, int, int, Batch]]:
    """Yield seed, round and target of each attacked update, with the images behind it."""
    for seed in settings.all_seeds:
        world = world_of(settings, "none", seed, dataset)
        for number in world.chosen:
            for target, client in enumerate(world.attacked(number)):
                yield seed, number, target, world.private(number, client)


def stacked(batches: list[Batch]) -> tuple[Tensor, Tensor]:
    """Return images as bytes (T, B, C, H, W) and labels (T, B); shorter batches end in zeros with the label -1."""
    most = max(map(len, batches))
    images = [torch.cat([b.images, b.images.new_zeros(most - len(b), *b.images.shape[1:])]) for b in batches]
    labels = [torch.cat([b.labels, b.labels.new_full((most - len(b),), -1)]) for b in batches]
    return to_bytes(torch.stack(images)), torch.stack(labels)


# --- files of a training: DIR/trainings/CELL/updates.json, and private/round-*.safetensors while attacks need them ----


def save_taps(tap: Tap, folder: Path) -> None:
    """Save the tapped rounds, and last the list of the digests of all updates that were sent in them."""
    for number, tapped in tap.rounds.items():
        tapped.save(_path(folder, number))
    listed = {str(number): {str(c): d for c, d in tapped.digests.items()} for number, tapped in tap.rounds.items()}
    write_atomic(folder / "updates.json", json.dumps(listed, indent=1).encode())


def has_taps(folder: Path, settings: AuditSettings) -> bool:
    """Return whether all tapped rounds of a training are there."""
    return all(_path(folder, number).is_file() for number in settings.taps)


def load_tap(folder: Path, number: int, cells: Path) -> TappedRound:
    """Return a tapped round of a training. Raise with the training's own reason if it has failed."""
    path = _path(folder, number)
    if path.is_file():
        return load_tapped(path)
    try:
        rows = read_json(cells / f"{folder.name}.json")
        why = str(rows[0]["why"])
    except (OSError, ValueError, LookupError, TypeError):
        why = "its tap is missing"
    raise TrainingError(f"The training {folder.name}, whose updates are attacked, must be finished, got: {why}")


def forget_taps(folder: Path) -> None:
    """Delete the tapped rounds of a training, which hold private images and keys; the digests stay."""
    for path in (folder / "private").glob("round-*.safetensors"):
        path.unlink()
    if (folder / "private").is_dir():
        (folder / "private").rmdir()


def _path(folder: Path, number: int) -> Path:
    return folder / "private" / f"round-{number:06d}.safetensors"


def digests_of(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the digests of a training's updates, by round and client, as texts."""
    found: Mapping[str, Mapping[str, str]] = read_json(folder / "updates.json")
    return found
