"""One site of a training: its images, its policy and its open ledger, as it sees a run that it agreed to."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.config import TrainSettings, make_train_settings
from gradveil.data import Dataset, load_dataset
from gradveil.data.federated import FederatedData, federate
from gradveil.data.sensitive import mark_sensitive
from gradveil.defences import Budget, Defence, build_defence, planned_defence
from gradveil.engines.answer_limits import LIMIT_KEYS
from gradveil.engines.devices import Devices, make_network
from gradveil.engines.messages import listed, num_bytes, read_config, whole
from gradveil.engines.run_folder import fingerprint, settings_hash
from gradveil.engines.simulation import check_choices, deal, refuse_unmarked
from gradveil.engines.site_budget import cost_of, note_answer, require_affordable
from gradveil.engines.site_codes import refused
from gradveil.engines.site_ledger import Ledger, LedgerFile, open_ledger
from gradveil.engines.site_policy import SitePolicy, agree, read_policy
from gradveil.errors import ConfigError, MessageError
from gradveil.federated.protocol import Protocol
from gradveil.models import Normalisation
from gradveil.models.base import has_room, model_uses_aux
from gradveil.models.trunk import trunk_of
from gradveil.storage import PrivateFolder, write_atomic

from flwr.app import Context, RecordDict  # isort: skip - messages says if it is missing

SERVER_KEYS = ("out", "data-root", *LIMIT_KEYS)
"""Keys of a run config that are not settings of the training but the server's own."""
MOST_ROUNDS = 10**9
"""Largest number of a round in a message."""


@dataclass(frozen=True)
class Site:
    """One client as its node knows it.

    ``run`` is the hash of the run's settings, ``folder`` the private folder of this run, ``book`` the open ledger.
    """

    policy: SitePolicy
    settings: TrainSettings
    defence: Defence
    data: FederatedData
    run: str
    folder: Path
    book: LedgerFile
    seed: int | None

    @property
    def number(self) -> int:
        """Return the number of the client."""
        return self.policy.partition_id

    def devices(self, content: RecordDict) -> Devices:
        """Return this client's side of a round, with the network that the server describes."""
        asked = read_config(content, "network")
        shape = tuple(listed(asked, "shape", int, 3))
        num_classes = whole(asked, "num-classes", 1, 1_000_000)
        largest = max(int(split.labels.max(initial=0)) for split in (self.data.train, self.data.test))
        if self.data.shape != shape or largest >= num_classes:
            raise refused(
                "shape",
                f"A site's images must have the run's shape {shape} and labels below {num_classes}, got "
                f"{self.data.shape} and labels up to {largest}.",
            )
        if not has_room(self.settings.model, self.data.shape, num_classes, num_bytes(content, "model")):
            raise MessageError("A message must hold the model that it describes, got a description of a larger one.")
        normalisation = _normalisation(asked) if "mean" in asked else None
        network = partial(make_network, self.settings, shape, num_classes, normalisation, self.data.aux)
        devices = Devices(self.settings, self.data, self.defence, network, self.folder, self.seed)
        trunk = trunk_of(devices.net.module)
        if asked.get("trunk", "") != ("" if trunk is None else trunk.fingerprint):
            raise refused("trunk", "The frozen part of the server's model is not the one that this site has built.")
        return devices

    def require_guarantee(self) -> None:
        """Raise RefusedError if the site limits ε over all runs and this run has no guarantee or would cost too much.

        If every client trains in every round, the whole run must be affordable; otherwise at least one more round.
        """
        if not self.policy.max_epsilon:
            return
        if not (self._defends and self.defence.overrides("budget")):
            raise refused("epsilon", f"max-epsilon needs a defence with a guarantee, got {self.defence.spec!r}.")
        book, settings = self.book.ledger, self.settings
        record = book.run(self.run)
        more = settings.rounds if settings.num_sampled == settings.clients else min(record.updates + 1, settings.rounds)
        planned = self._cost(max(record.updates, more), 0)
        if planned is not None:  # otherwise it depends on the network, which the first request to train describes
            begun = replace(record, begun=max(record.begun, 1), cost=planned)
            require_affordable(self.policy, book.with_run(self.run, begun))

    def begin(self, devices: Devices, number: int, request: str) -> Ledger:
        """Return the ledger after a request to train was accepted, with what the run has cost until after this round.

        Raises:
            RefusedError: the round is not a new one, or exceeds the site's updates or ε over all runs.
        """
        book = self.book.ledger
        record = book.run(self.run).begin(number, request)
        entries = sum(p.numel() for p in devices.net.module.parameters() if p.requires_grad)
        begun = book.with_run(self.run, replace(record, cost=self._cost(record.updates, entries)))
        if begun.updates > self.policy.max_rounds:
            raise refused("rounds", f"This site sends {self.policy.max_rounds} updates in all, which are used up.")
        require_affordable(self.policy, begun)
        return begun

    @property
    def _defends(self) -> bool:
        return not self.settings.defended or self.number in self.settings.defended

    def _cost(self, updates: int, entries: int) -> Budget | None:
        """Return what some updates of this run cost together, or None if nothing bounds it."""
        how = Protocol.of(self.settings).local
        return cost_of(self.defence, how, len(self.data.train), updates, entries) if self._defends else None

    def note(self, number: int, work: str, weights: str, cost: Budget | None) -> None:
        """Add an answer to the site's history, before it leaves."""
        note_answer(self.book, self.policy.max_delta, (self.run, number, work, weights), cost)

    def require_state(self, devices: Devices, content: RecordDict) -> None:
        """Raise if this client has lost its private state since the last round that it answered.

        The server says which round that was, in case the ledger is lost too.
        """
        told, noted = whole(read_config(content, "before"), "trained", 0, MOST_ROUNDS), self.book.ledger.run(self.run)
        last = min(told, noted.answered) if noted.begun else told
        if last:
            devices.require_state(self.number, last)

    @property
    def broadcasts_path(self) -> Path:
        """Return where digests of all received models are kept, for sites to compare."""
        return Path(self.policy.private_folder) / f"broadcasts-{self.number}.jsonl"

    @property
    def answer_path(self) -> Path:
        """Return where the last answer is kept, to give it again if the server lost it."""
        return self.folder / str(self.number) / "private" / "answer.safetensors"


@contextmanager
def open_site(context: Context, data: Callable[[Context], Dataset] | None) -> Iterator[Site]:
    """Open the site that its policy and the run's settings describe. Raise if the site does not agree to the run."""
    policy, asked = read_policy(context.node_config), run_settings(context)
    settings = agree(policy, asked, own_data=data is not None)
    settings = build_defence(settings.defence).training(settings)
    defence, number = planned_defence(settings), policy.partition_id
    check_choices(settings, defence)
    if defence.fewest_clients > 1 and settings.aggregation != "secure":
        raise refused("sums", f"Updates would be sent in the open, where {defence.spec!r} protects too little.")
    if policy.aggregation == "secure" and number in defence.early_clients(settings.clients):
        raise refused("aggregation", f"This site would send its update in the open, as a guard of {defence.spec!r}.")
    run = settings_hash(asked)
    folder = Path(policy.private_folder) / run
    with open_ledger(Path(policy.private_folder) / f"ledger-{number}.json") as book:
        own = _site_data(context, policy, settings, defence, data)
        _refuse_other_data(folder / str(number) / "images-hash", fingerprint(own, []))
        if asked.aux and not own.public and model_uses_aux(settings.model):
            raise refused("aux", f"Model {settings.model!r} is made of {asked.aux!r}; name it in this site's files.")
        seed = None if policy.repeatable else secrets.randbits(256)
        site = Site(policy, settings, defence, own, run, folder, book, seed)
        if site._defends:
            _check_protection(policy, defence, own, aux_asked=bool(asked.aux))
        yield site


def _check_protection(policy: SitePolicy, defence: Defence, own: FederatedData, *, aux_asked: bool) -> None:
    """Raise unless the defence can protect this site's images: enough of them, marked ones, and public ones."""
    if defence.needs_aux and aux_asked and not own.public:
        raise refused("aux", f"Defence {defence.spec!r} needs public images; name the run's in this site's files.")
    defence.check_images(len(own.train), aux=bool(own.public))
    if policy.sensitive.strip() != "none":  # the site says itself that it has no image to protect
        try:
            refuse_unmarked(defence, own.count("sensitive", None))
        except ConfigError as error:
            raise refused("unmarked", str(error)) from error


def _site_data(
    context: Context,
    policy: SitePolicy,
    settings: TrainSettings,
    defence: Defence,
    data: Callable[[Context], Dataset] | None,
) -> FederatedData:
    """Return this client's images: the site's own, or its part of the run's data set without the other clients'."""
    root, number = Path(policy.data_root) if policy.data_root else None, policy.partition_id
    aux = load_dataset(settings.aux, root) if settings.aux else None
    if data is None and not policy.data:
        dealt = deal(load_dataset(settings.dataset, root), settings, defence, aux)
        part = dealt.only(number, number, settings.clients)
        drawn = ":" not in policy.sensitive and number not in defence.early_clients(settings.clients)
        return replace(part, sensitive=_marks(policy, len(part.train))) if drawn and not policy.repeatable else part
    own = data(context) if data is not None else load_dataset(policy.data, root)
    marks, labelled = policy.sensitive if policy.repeatable else "", defence.aux_labels and defence.uses_aux
    mine = federate(own, "iid", 1, marks, settings.seed, aux, (), labelled)
    if not policy.repeatable:
        mine = replace(mine, sensitive=_marks(policy, len(own.train))[mine.indices])
    return mine.only(0, number, settings.clients)


def _marks(policy: SitePolicy, images: int) -> np.ndarray:
    """Return which of a site's images are marked; the same ones in every run.

    A fraction is drawn from a secret seed of the site. With the run's seed, the server could choose what is unmarked.
    """
    folder = PrivateFolder(Path(policy.private_folder) / f"marks-{policy.partition_id}")
    kept = folder.load("seed")
    if kept is None:
        kept = {"seed": torch.tensor(list(secrets.token_bytes(32)), dtype=torch.uint8)}
        folder.save("seed", kept)
    rng = np.random.default_rng(kept["seed"].tolist())
    return mark_sensitive(policy.sensitive or None, [np.arange(images)], rng)[0]


def _refuse_other_data(path: Path, found: str) -> None:
    """Raise if a site's images are not those that its training began with: its private state was made from them."""
    if not path.exists():
        write_atomic(path, found.encode(), mode=0o600)
    elif path.read_text() != found:
        raise refused(
            "images",
            "A site must keep the images that its training began with, got others. Restore them; or, to begin with "
            f"new keys, empty {path.parent} and put an empty file begin-anew there.",
        )


def run_settings(context: Context) -> TrainSettings:
    """Return the settings of the run, from Flower's run config."""
    return make_train_settings({key: v for key, v in context.run_config.items() if key not in SERVER_KEYS})


def _normalisation(asked: dict[str, Any]) -> Normalisation:
    """Return the normalisation that the server describes; a tiny deviation would blow up the images."""
    mean, std = (tuple(map(float, listed(asked, key, (float, int), 64))) for key in ("mean", "std"))
    if not all(abs(value) <= 10 for value in mean) or not all(0.001 <= value <= 100 for value in std):
        raise MessageError("The normalisation must be of pixels in [0, 1], got a mean or deviation far from them.")
    return Normalisation(mean, std)
