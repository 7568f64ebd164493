"""The membership cell of an audit: whether a server can distinguish a client's training images from others."""

import copy
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gradveil.attacks import MembershipAttack, build_any_attack
from gradveil.attacks.shadow import ShadowAttack
from gradveil.audits.plan import Cell, Rows, facts_of
from gradveil.audits.settings import AuditSettings
from gradveil.audits.shadow_trainings import TrainingShadows
from gradveil.audits.shadows import RoundShadows, Shadows, public_positions
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.engines.simulation import Simulation
from gradveil.engines.training import single_thread
from gradveil.errors import ConfigError
from gradveil.federated.server import Round
from gradveil.metrics.roc import advantage, area, area_interval, curve, found_at
from gradveil.progress import part
from gradveil.randomness import stream
from gradveil.threat import Knowledge
from gradveil.types import Batch


def membership_cell(cell: Cell, settings: AuditSettings, dataset: Dataset, root: Path | None = None) -> Rows:
    """Train under the defence; return one row per round in which a local model was attacked."""
    attack = build_any_attack(cell.attack)
    if not isinstance(attack, MembershipAttack):
        raise ConfigError(
            f"A membership cell needs an attack on membership, got {cell.attack!r}, which rebuilds images."
        )
    training = replace(settings.training(cell.defence, cell.seed), canaries=0)
    common = facts_of(cell) | {"knows": _known(attack, settings, cell), "failed": False}
    found = infer_membership(training, attack, dataset=dataset, data_root=root, adaptive=cell.adaptive)
    return [settings.schema.row("membership", common | figures) for figures in found]


def _known(attack: MembershipAttack, settings: AuditSettings, cell: Cell) -> list[str]:
    """Return what the attacker knows: the labels of the candidates, and what it needs to play shadow models."""
    if not isinstance(attack, ShadowAttack):
        return ["labels"]
    needs = attack.needs_for(single_step=settings.protocol == "lab")
    return sorted(needs | ({Knowledge.DEFENCE} if cell.adaptive else set()))


def infer_membership(
    settings: TrainSettings,
    attack: MembershipAttack,
    *,
    dataset: Dataset | None = None,
    data_root: Path | None = None,
    adaptive: bool = False,
    apart: bool = False,
) -> Iterator[dict[str, Any]]:
    """Train, attack the model of a random client every few rounds, and yield the figures of each attack.

    If ``adaptive``, the attacker knows the defence and plays shadow models under it. Candidates of an attack that plays
    shadow models are never among the public images; with ``apart``, those of other attacks are not either, so that both
    judge the same candidates.

    The server knows a client's model from its update, as far as the defence reveals it; for the parts that the client
    keeps private it uses its own. Guards are not attacked. Two baselines that use the model's outputs are measured too:
    the loss (Yeom et al. 2018, https://arxiv.org/abs/1709.01604) and the confidence (Salem et al. 2019,
    https://arxiv.org/abs/1806.01246).
    """
    rounds = attack.measured_rounds(settings.rounds)
    settings = replace(settings, save_rounds=tuple(rounds), eval_every=max(settings.rounds, 1))
    with Simulation(settings, workers=0, dataset=dataset, data_root=data_root) as simulation:
        shadows = _shadows(simulation, attack, tuple(rounds), known=adaptive)
        others = _others(simulation, apart=apart or shadows is not None)
        network = copy.deepcopy(simulation.net.module).eval()
        for number in range(1, settings.rounds + 1):
            started = time.perf_counter()
            played = simulation.step(number)[1]
            if number in rounds:
                with part(rounds.index(number), len(rounds)), single_thread():
                    figures = _attacked(simulation, played, network, attack, others, shadows)
                yield figures | {"round": number, "seconds": round(time.perf_counter() - started, 3)}


def _shadows(
    simulation: Simulation, attack: MembershipAttack, rounds: tuple[int, ...], *, known: bool
) -> Shadows | None:
    """Return how the server plays shadow models, or None if the attack needs none. Raise if they can't be played."""
    if not isinstance(attack, ShadowAttack):
        return None
    facts = (attack, simulation.settings, simulation.dataset, simulation.defence, known)
    shadows = TrainingShadows(*facts, rounds) if attack.play == "training" else RoundShadows(*facts)
    shadows.check(min(simulation.sizes))
    return shadows


def _others(simulation: Simulation, *, apart: bool) -> Batch:
    """Return the test images that can be non-members: all, or without those that are public or training images."""
    everything = simulation.data.images("test", None, 0, simulation.data.count("test", None))
    return everything[torch.from_numpy(public_positions(simulation.dataset)[1])] if apart else everything


def _attacked(
    simulation: Simulation,
    played: Round,
    network: nn.Module,
    attack: MembershipAttack,
    everything: Batch,
    shadows: Shadows | None,
) -> dict[str, Any]:
    """Return the figures of one round, or None for each and the reason if there is nobody or nothing to attack."""
    seed, number = simulation.settings.seed, played.number
    guards = simulation.defence.early_clients(simulation.settings.clients)
    clients = [client for client in played.clients if client not in guards]
    if not clients:
        return dict.fromkeys(FIGURES) | {"why": "only guards trained in this round"}
    rng = stream(seed, "membership", number)
    order = torch.randperm(simulation.settings.clients, generator=rng).tolist()  # the same under every defence
    victim = next(client for client in order if client in clients)
    load_local_model(network, played, victim, alone=simulation.settings.aggregation == "none")
    own = simulation.data.client(victim)
    members, others = alike(own, everything, attack.images, rng)
    if not len(members):
        return dict.fromkeys(FIGURES) | {"client": victim, "why": "the test images have none of the client's classes"}
    why, models = "", iter(list[nn.Module]())
    if shadows is not None:
        models = shadows.models(simulation, played, network, members.labels, len(own))
        why = shadows.told(members.labels, len(own))
    return _compared(network, attack, members, others, rng, models) | {"client": victim, "why": why}


FIGURES = (
    "client", "auc", "auc_low", "auc_high", "tpr_at_1_fpr", "advantage", "auc_loss", "auc_confidence", "members",
    "non_members", "queries", "accuracy_members", "accuracy_non_members", "roc",
)  # fmt: skip
"""The figures of a round."""


def load_local_model(network: nn.Module, played: Round, client: int, *, alone: bool = True) -> None:
    """Load into a network what the server knows of a client's model: the model it sent plus the client's update.

    If it does not see the update ``alone``, it takes the mean of the round's updates in its place.
    """
    update = played.recovered[client] if alone else played.mean
    change = {**update.tensors, **update.buffers}
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    with torch.no_grad():
        for name, tensor in played.received.items():
            tensors[name].copy_(tensor + change[name])


def alike(own: Batch, others: Batch, most: int, rng: torch.Generator) -> tuple[Batch, Batch]:
    """Draw at most ``most`` of a client's images, and as many others with the same number of each class.

    A client often has few classes, and training moves its model towards them: if the others came from all classes, the
    class alone would reveal the members.
    """
    mine = torch.randperm(len(own), generator=rng)[:most]
    theirs = torch.randperm(len(others), generator=rng)
    pairs = []
    for label in torch.unique(own.labels).tolist():
        members, rest = mine[own.labels[mine] == label], theirs[others.labels[theirs] == label]
        size = min(len(members), len(rest))
        pairs.append((members[:size], rest[:size]))
    chosen, drawn = (torch.cat(side) for side in zip(*pairs, strict=True))
    return own[chosen], others[drawn]


def _compared(
    network: nn.Module,
    attack: MembershipAttack,
    members: Batch,
    others: Batch,
    rng: torch.Generator,
    shadows: Iterable[nn.Module] = (),
) -> dict[str, Any]:
    """Score members and others in one batch, shuffled and unmarked, and compare their scores."""
    count = len(members) + len(others)
    order = torch.randperm(count, generator=rng)
    is_member = (torch.arange(count) < len(members))[order]
    images = torch.cat([members.images, others.images])[order]
    labels = torch.cat([members.labels, others.labels])[order]
    device = next(network.parameters()).device
    batch = Batch(images, labels, torch.zeros(count, dtype=torch.bool)).to(device)
    scores = attack.judge(network, batch, rng, shadows).cpu()
    with torch.no_grad():
        logits = torch.cat([network(piece) for piece in torch.split(batch.images, 500)])
    losses = F.cross_entropy(logits, batch.labels, reduction="none").cpu()
    confidences = logits.softmax(1).amax(1).cpu()
    right = (logits.argmax(1) == batch.labels).double().cpu()
    split = scores[is_member], scores[~is_member]
    low, high = area_interval(*split)
    return {
        "auc": area(*split),
        "auc_low": low,
        "auc_high": high,
        "tpr_at_1_fpr": found_at(*split) if len(others) >= 100 else None,  # a rate of 1 % needs a hundred images
        "advantage": advantage(*split),
        "auc_loss": area(-losses[is_member], -losses[~is_member]),
        "auc_confidence": area(confidences[is_member], confidences[~is_member]),
        "members": len(members),
        "non_members": len(others),
        "queries": getattr(attack, "queries", None),
        "accuracy_members": float(right[is_member].mean()),
        "accuracy_non_members": float(right[~is_member].mean()),
        "roc": curve(*split),
    }
