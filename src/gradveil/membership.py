"""Membership inference on local models: whether an attack tells a client's training images from other ones."""

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks import MembershipAttack
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.engines.simulation import Simulation
from gradveil.engines.training import single_thread
from gradveil.progress import part
from gradveil.randomness import stream
from gradveil.server import Round
from gradveil.types import Batch

FALSE_ALARMS = 0.01
"""The share of others taken for members at which the share of members found is told."""
FALSE_RATES = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The false positive rates at which a row keeps its ROC curve."""


def rates(members: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The ROC curve: the shares of others and of members whose score reaches a threshold, for all thresholds.

    Both are (K,), from (0, 0) to (1, 1); equal scores are one threshold.

    Example:
        >>> [rate.tolist() for rate in rates(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))]
        [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0]]
    """
    thresholds = torch.unique(torch.cat([members, others])).flip(0)
    both = [
        torch.searchsorted(-scores.sort(descending=True).values, -thresholds, right=True).double() / len(scores)
        for scores in (others, members)
    ]
    false, true = (torch.cat([rate.new_zeros(1), rate]) for rate in both)
    return false, true


def area(members: Tensor, others: Tensor) -> float:
    """The area under the ROC curve: how often a member scores higher than another image, ties counted half.

    Example:
        >>> area(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))
        0.875
    """
    false, true = rates(members, others)
    return float(torch.trapezoid(true, false))


def found_at(members: Tensor, others: Tensor, false_alarms: float = FALSE_ALARMS) -> float:
    """The largest share of members found by a threshold that takes at most so many others for members."""
    false, true = rates(members, others)
    return float(true[false <= false_alarms].max())


def curve(members: Tensor, others: Tensor) -> list[float]:
    """The ROC curve at `FALSE_RATES`, straight between its points as `area` has it; the most at a step upwards.

    Example:
        >>> curve(torch.tensor([3.0, 2.0]), torch.tensor([2.0, 1.0]))[-8:]
        [0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    false, true = rates(members, others)
    wanted = false.new_tensor(FALSE_RATES)
    before = torch.searchsorted(false, wanted, right=True) - 1
    after = (before + 1).clamp_max(len(false) - 1)
    share = ((wanted - false[before]) / (false[after] - false[before]).clamp_min(1e-12)).clamp(0, 1)
    return [round(rate, 6) for rate in torch.lerp(true[before], true[after], share).tolist()]


def advantage(members: Tensor, others: Tensor) -> float:
    """The largest difference between the shares of members and of others that a threshold takes for members."""
    false, true = rates(members, others)
    return float((true - false).max())


def measured_rounds(rounds: int, every: int) -> list[int]:
    """The rounds whose local models are attacked: every n-th, or the last where there are fewer.

    Example:
        >>> measured_rounds(12, 5), measured_rounds(3, 5)
        ([5, 10], [3])
    """
    return list(range(every, rounds + 1, every)) or [rounds] * bool(rounds)


def infer_membership(
    settings: TrainSettings,
    attack: MembershipAttack,
    *,
    dataset: Dataset | None = None,
    data_root: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Train, and every few rounds attack the model of a client drawn at random; yields the figures of each.

    The server knows a client's model from its update, as far as the defence lets it; what the client keeps to itself is
    the server's own there. A guard is nobody's victim. Beside the attack's own stand the areas under the curve of two
    baselines which look at the outputs: the loss (Yeom et al. 2018, https://arxiv.org/abs/1709.01604) and the
    confidence (Salem et al. 2019, https://arxiv.org/abs/1806.01246).
    """
    rounds = measured_rounds(settings.rounds, attack.every)
    settings = replace(settings, save_rounds=tuple(rounds), eval_every=max(settings.rounds, 1))
    with Simulation(settings, workers=0, dataset=dataset, data_root=data_root) as simulation:
        network = copy.deepcopy(simulation.net.module).eval()
        for number in range(1, settings.rounds + 1):
            started = time.perf_counter()
            played = simulation.step(number)[1]
            if number in rounds:
                with part(rounds.index(number), len(rounds)), single_thread():
                    figures = _attacked(simulation, played, network, attack)
                yield figures | {"round": number, "seconds": round(time.perf_counter() - started, 3)}


def _attacked(simulation: Simulation, played: Round, network: nn.Module, attack: MembershipAttack) -> dict[str, Any]:
    """The figures of one round; without any, and with the reason, where there is nobody or nothing to attack."""
    seed, number = simulation.settings.seed, played.number
    guards = simulation.defence.early_clients(simulation.settings.clients)
    clients = [client for client in played.clients if client not in guards]
    if not clients:
        return dict.fromkeys(FIGURES) | {"why": "no client but the guard trained in this round"}
    rng = stream(seed, "membership", number)
    order = torch.randperm(simulation.settings.clients, generator=rng).tolist()  # the same under every defence
    victim = next(client for client in order if client in clients)
    load_local_model(network, played, victim)
    data = simulation.data
    everything = data.images("test", None, 0, data.count("test", None))
    members, others = alike(data.client(victim), everything, attack.images, rng)
    if not len(members):
        return dict.fromkeys(FIGURES) | {"client": victim, "why": "the test images have none of the client's classes"}
    return _compared(network, attack, members, others, rng) | {"client": victim, "why": ""}


FIGURES = (
    "client", "auc", "tpr_at_1_fpr", "advantage", "auc_loss", "auc_confidence", "members", "non_members", "queries",
    "accuracy_members", "accuracy_non_members", "roc",
)  # fmt: skip
"""What is measured in a round."""


def load_local_model(network: nn.Module, played: Round, client: int) -> None:
    """Put the model that the server knows of a client into a network: what it sent out, and what came back of it."""
    update = played.recovered[client]
    change = {**update.tensors, **update.buffers}
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    with torch.no_grad():
        for name, tensor in played.received.items():
            tensors[name].copy_(tensor + change[name])


def alike(own: Batch, others: Batch, most: int, rng: torch.Generator) -> tuple[Batch, Batch]:
    """At most so many of a client's images, and as many others with the same number of each class, all at random.

    A client's classes are often few, and training moves its model towards them: were the others of all classes, the
    class alone would tell who is a member.
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
    network: nn.Module, attack: MembershipAttack, members: Batch, others: Batch, rng: torch.Generator
) -> dict[str, Any]:
    """Score members and others in one batch, in random order and without marks, and compare their scores."""
    count = len(members) + len(others)
    order = torch.randperm(count, generator=rng)
    is_member = (torch.arange(count) < len(members))[order]
    images = torch.cat([members.images, others.images])[order]
    labels = torch.cat([members.labels, others.labels])[order]
    device = next(network.parameters()).device
    batch = Batch(images, labels, torch.zeros(count, dtype=torch.bool)).to(device)
    scores = attack.scores(network, batch, rng).cpu()
    with torch.no_grad():
        logits = torch.cat([network(piece) for piece in torch.split(batch.images, 500)])
    losses = F.cross_entropy(logits, batch.labels, reduction="none").cpu()
    confidences = logits.softmax(1).amax(1).cpu()
    right = (logits.argmax(1) == batch.labels).double().cpu()
    split = scores[is_member], scores[~is_member]
    return {
        "auc": area(*split),
        "tpr_at_1_fpr": found_at(*split) if len(others) >= 100 else None,  # one in a hundred needs a hundred
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
