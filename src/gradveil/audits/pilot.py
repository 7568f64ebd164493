"""Short trials of an audit's work, from which its time is estimated. They leave no trace in any result."""

import copy
import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from gradveil.attacks import MembershipAttack, build_any_attack, build_attack
from gradveil.attacks.matching import Matching
from gradveil.attacks.shadow import ShadowAttack
from gradveil.audits.plan import Cell
from gradveil.audits.privacy import ITERATES
from gradveil.audits.scale import clients_behind, update_size
from gradveil.audits.settings import AuditSettings
from gradveil.audits.shadows import SHARE, public_positions
from gradveil.audits.utility import TIMED_ROUNDS
from gradveil.audits.views import observed, private_batches
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.data.pixels import to_batch
from gradveil.defences import Defence, build_defence
from gradveil.engines.canaries import num_players
from gradveil.engines.devices import make_network
from gradveil.engines.simulation import Simulation, chosen_normalisation
from gradveil.engines.training import single_thread
from gradveil.progress import listening
from gradveil.randomness import stream

Clock = Callable[[], float]

ENDLESS = 1_000_000
"""Rounds that a trial's training says it has, so that it is never evaluated."""
FEW = 20
"""Inner steps, at most, of a defence that searches by itself; its time is scaled to all of them."""
INNER = ("steps", "iterations")
"""Names of the settings of defences that count such inner steps."""
WARM = 3
"""Reports of progress before an attack's speed is measured: the first steps are slower."""
BROKEN_OFF = 20
"""Times the limit after which not even the first round of a trial, which imports modules and warms caches, is followed
by a second."""
SAMPLE = 8
"""Images of a client in a trial of the lab protocol, of which a round uses a few."""


class _Enough(BaseException):
    """Stops a trial. No Exception, so that no attack catches it."""


def extrapolated(work: Callable[[], object], limit: float, clock: Clock) -> float:
    """Return how many seconds some work takes, by its own progress if it is stopped after ``limit`` seconds.

    Work that tells no progress (`gradveil.progress.tell`) is run to its end.
    """
    started, told = clock(), list[tuple[float, float]]()

    def listen(share: float) -> None:
        told.append((clock(), share))
        if told[-1][0] - started > limit and len(told) > WARM and share > told[WARM - 1][1]:
            raise _Enough

    try:
        with listening(listen):
            work()
    except _Enough:
        (begun, before), (now, share) = told[WARM - 1], told[-1]
        return begun - started + (now - begun) / (share - before) * (1 - before)
    return clock() - started


@dataclass(frozen=True)
class Pilot:
    """Times single pieces of an audit.

    Attributes:
        settings: those of the audit.
        dataset: its data.
        root: the data root.
        limit: seconds after which a trial is stopped, if it can be.
        clock: seconds that have passed, such as seconds of computing time.
        known: the seconds of steps that were tried before, by defence and marks.
    """

    settings: AuditSettings
    dataset: Dataset
    root: Path | None
    limit: float
    clock: Clock
    known: dict[tuple[str, str | None], float] = field(default_factory=dict)

    def training(self, spec: str) -> float:
        """Return the seconds of the training under a defence, the undefended rounds beside it included."""
        own, training = build_defence(spec), self.settings.training(spec, self.settings.seed)
        clients, steps = training.num_sampled, self._steps()
        playing = clients + num_players(own, training.canaries)
        plain = self.step("none") * steps * clients  # of a round
        if own.marked_only and self._marked_per_step() < 1:
            beside = max(0.0, self.step(spec, "1.0") - self.step("none"))  # of a step whose images are all marked
            return (plain * training.rounds + beside * self._marked_steps(training)) + TIMED_ROUNDS * plain
        each = self.step(spec) * steps * playing
        if each <= self.limit and _inner(own)[1] == 1:
            each = self._rounds(training, own) * playing  # as the audit plays it
        twin = min(TIMED_ROUNDS, training.rounds) * plain * (spec != "none")
        return each * training.rounds + twin + self._setup(spec, own)

    def step(self, spec: str, sensitive: str | None = None) -> float:
        """Return the seconds of one local step of one client; ``sensitive`` marks other images than the audit does."""
        once, factor = self._once(spec, sensitive), _inner(build_defence(spec))[1]
        plain = self._once("none", None) if factor > 1 else once
        return plain + max(0.0, once - plain) * factor

    def _once(self, spec: str, sensitive: str | None) -> float:
        """Return the seconds of a step of a client whose defence has few inner steps."""
        if (spec, sensitive) not in self.known:
            single = self._single(spec, sensitive)
            self.known[spec, sensitive] = self._rounds(single, _inner(build_defence(spec))[0])
        return self.known[spec, sensitive]

    def _single(self, spec: str, sensitive: str | None) -> TrainSettings:
        """Return a training of one client, and of guards if the defence has any, that takes one step per round."""
        own = self.settings.training(spec, self.settings.seed)
        guards = build_defence(spec).early_clients(own.clients)
        batch = self._batch()
        return replace(
            own,
            clients=max(guards, default=-1) + 2 if guards else 1,
            sampled=0,
            partition=f"iid:images={max(batch, SAMPLE) if own.algorithm == 'fedsgd' else batch}",
            sensitive=sensitive if sensitive is not None else self.settings.sensitive,
            epochs=1,
        )

    def _rounds(self, training: TrainSettings, defence: Defence, count: int = 3) -> float:
        """Return the median seconds per client of a few rounds, without the first, which warms caches."""
        endless = replace(training, rounds=ENDLESS, eval_every=ENDLESS, save_rounds=(), defended=(), canaries=0)
        seconds = []
        with Simulation(endless, workers=0, dataset=self.dataset, data_root=self.root, defence=defence) as simulation:
            for number in range(2, 2 + count):
                started = self.clock()
                simulation.step(number)
                seconds.append(self.clock() - started)
                if sum(seconds[1:]) > self.limit or seconds[0] > BROKEN_OFF * self.limit:
                    break
        return statistics.median(seconds[1:] or seconds) / training.num_sampled

    def _setup(self, spec: str, own: Defence) -> float:
        """Return the seconds in which all clients change their images once, if the defence does that."""
        if not own.overrides("on_data"):
            return 0.0
        training = replace(self._single(spec, None), rounds=ENDLESS, eval_every=ENDLESS)
        started = self.clock()
        with Simulation(training, workers=0, dataset=self.dataset, data_root=self.root) as simulation:
            simulation.step(2)
            each = (self.clock() - started) / sum(simulation.sizes)
        return each * len(self.dataset.train)

    def _batch(self) -> int:
        """Return the images of a local step."""
        images = update_size(self.settings, self.dataset)[1]
        if self.settings.protocol == "lab":
            return self.settings.images
        return min(self.settings.batch_size or images, images)

    def _steps(self) -> int:
        """Return the local steps of a client per round."""
        local, images = update_size(self.settings, self.dataset)
        return local.num_steps(images)

    def _marked_per_step(self) -> float:
        """Return the mean number of images of a step that are marked sensitive."""
        marks = self.settings.sensitive
        try:
            share = 0.0 if marks == "none" else float(marks)
        except ValueError:  # positions
            share = 1.0
        return share * self._batch()

    def _marked_steps(self, training: TrainSettings) -> float:
        """Return how many of the training's steps would have marked images, if no step had some and some not.

        In the lab protocol the images behind attacked updates are marked too.
        """
        share = self._marked_per_step() / self._batch()
        attacked = self.settings.targets * len(self.settings.taps) * (self.settings.protocol == "lab")
        return share * training.rounds * training.num_sampled * self._steps() + attacked

    def attack(self, cell: Cell) -> float:
        """Return the seconds of an attack on some of a round's updates: the first ones, made without any training."""
        local, images = update_size(self.settings, self.dataset)
        count = cell.last - cell.first
        client = self._once(cell.defence, "1.0") * local.num_steps(images) * self.settings.looks
        tried = max(1, min(count, int(self.limit / client) if client else count))
        whole = images * clients_behind(self.settings)
        settings = replace(
            self.settings,
            rounds=0,
            canaries=0,  # they are played in trainings
            tap=(),
            targets=tried,
            images=whole,
            attacks=(cell.attack,),
            sampled=0,
            aggregation="none",
        )
        attack = build_attack(cell.attack).keeping(ITERATES)
        if isinstance(attack, Matching):
            attack = replace(attack, compile="off")  # it would take longer than the trial
        some = replace(cell, first=0, last=tried, round=0, needs="", later=())
        private = private_batches(settings, self.dataset)
        defence = _inner(build_defence(cell.defence))[0]
        seen = observed(some, settings, self.dataset, private, defence, attack, self.root)
        rng = stream(cell.seed, "pilot")
        one = extrapolated(lambda: attack(seen, rng), self.limit, self.clock) * count / tried
        ways = 2 if cell.adaptive else 1  # who knows the defence may play the plain attack too
        return one * ways * (1 + len(cell.later))

    def membership(self, cell: Cell) -> float:
        """Return the seconds of an attack on membership, with the training that it plays by itself."""
        attack = build_any_attack(cell.attack)
        if not isinstance(attack, MembershipAttack):
            raise TypeError(cell.attack)
        training = self.settings.training(cell.defence, cell.seed)
        shape, classes = self.dataset.shape, self.dataset.num_classes
        normalisation = chosen_normalisation(self.settings.normalise, self.dataset)
        network = make_network(training, shape, classes, normalisation).to(self.settings.device).eval()
        count = 2 * min(attack.images, max(1, len(self.dataset.train) // self.settings.clients))
        order = torch.randperm(len(self.dataset.train), generator=stream(cell.seed, "pilot"))[:count].numpy()
        batch = to_batch(self.dataset.train.images[order], self.dataset.train.labels[order]).to(self.settings.device)
        rng = stream(cell.seed, "pilot")
        each = extrapolated(lambda: attack.scores(network, batch, rng), self.limit, self.clock)
        rounds, whole = attack.measured_rounds(self.settings.rounds), self.training(cell.defence)
        return whole * (1 + self._shadows(attack)) + each * len(rounds)

    def _shadows(self, attack: MembershipAttack) -> float:
        """Return the time of an attack's shadow models, in units of the time of a training."""
        if not isinstance(attack, ShadowAttack):
            return 0.0
        if attack.play == "training":
            public = SHARE * len(public_positions(self.dataset)[0])
            return attack.shadows * min(1.0, public / len(self.dataset.train))
        training = self.settings.training("none", self.settings.seed)
        share = len(attack.measured_rounds(training.rounds)) / max(1, training.rounds)
        return attack.shadows * share / (1 if self.settings.aggregation == "secure" else training.num_sampled)

    def cell(self, cell: Cell) -> float:
        """Return the seconds of one cell, worked out on one torch thread."""
        with single_thread():
            if cell.kind == "utility":
                return self.training(cell.defence)
            return self.membership(cell) if cell.kind == "membership" else self.attack(cell)


def _inner(defence: Defence) -> tuple[Defence, float]:
    """Return the defence with few inner steps, and how many times as many it really has.

    Example:
        >>> shorter, factor = _inner(build_defence("dcs2:steps=100"))
        >>> shorter.steps, factor
        (20, 5.0)
    """
    members = getattr(defence, "defences", ())
    if members:
        shorter = [_inner(member) for member in members]
        changed = copy.copy(defence)
        object.__setattr__(changed, "defences", tuple(member for member, _ in shorter))
        return changed, max(factor for _, factor in shorter)
    for setting in dataclasses.fields(defence):
        value = getattr(defence, setting.name)
        if setting.name in INNER and isinstance(value, int) and value > FEW:
            return replace(defence, **{setting.name: FEW}), value / FEW
    return defence, 1.0
