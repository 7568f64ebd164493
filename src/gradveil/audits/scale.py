"""Which attacks of an audit fit the network and the size of the updates that clients send, known before any work."""

from torch import nn

from gradveil.attacks import build_any_attack
from gradveil.audits.settings import AuditSettings
from gradveil.audits.tapping import attacked_clients
from gradveil.data import Dataset
from gradveil.data.federated import federate
from gradveil.engines.devices import make_network
from gradveil.engines.simulation import chosen_normalisation
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol

SCALES = "labels,representations,boundary"
"""Attacks that work for any number of images and local steps."""


def left_out(settings: AuditSettings, dataset: Dataset) -> dict[str, str]:
    """Return the attacks that don't fit the largest update of the audit, each with the reason and a way out.

    Raises:
        ConfigError: no attack is left.
    """
    local, images = update_size(settings, dataset)
    steps, whole = local.num_steps(images), images * clients_behind(settings)
    network = _network(settings, dataset)
    reasons = {
        spec: build_any_attack(spec).out_of_reach(network, dataset.shape, whole, steps) for spec in settings.attacks
    }
    found = {spec: f"{why}. {_way_out(settings, spec)}" for spec, why in reasons.items() if why}
    if len(found) == len(settings.attacks):
        raise ConfigError("No attack can run: " + " ".join(f"Attack {spec!r} {why}" for spec, why in found.items()))
    return found


def _network(settings: AuditSettings, dataset: Dataset) -> nn.Module:
    """Return the undefended network."""
    training = settings.training("none", settings.seed)
    return make_network(training, dataset.shape, dataset.num_classes, chosen_normalisation(settings.normalise, dataset))


def update_size(settings: AuditSettings, dataset: Dataset) -> tuple[LocalSettings, int]:
    """Return how clients train, and the most images that an attacked client uses in a round."""
    local = Protocol.of(settings.training("none", settings.seed)).local
    if settings.protocol == "lab" or not settings.rounds:
        return local, settings.images
    most = 1
    for seed in settings.all_seeds:
        sizes = federate(dataset, settings.partition, settings.clients, settings.sensitive, seed).sizes
        chosen = {client for clients in attacked_clients(settings, seed).values() for client in clients}
        most = max([most, *(sizes[client] for client in chosen)])
    return local, most


def clients_behind(settings: AuditSettings) -> int:
    """Return the number of clients behind what is attacked: one, or all of a round under secure aggregation."""
    return settings.training("none", settings.seed).num_sampled if settings.aggregation == "secure" else 1


def _way_out(settings: AuditSettings, spec: str) -> str:
    """Return what to change so that the attack or another one can run."""
    fewer = "--partition iid:images=8" if settings.protocol == "fedavg" and settings.rounds else "--images 1"
    return f"Use {fewer}, or --attacks {SCALES}."
