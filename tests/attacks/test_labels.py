import dataclasses

import pytest
import torch

from gradveil.attacks.labels import Labels
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import label_accuracy
from gradveil.models import create_model
from gradveil.threat import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import run, scene

LOCAL = Protocol(LocalSettings(epochs=2, batch_size=8, momentum=0.9, batch_norm="freeze"), lr=0.01)


def accuracies(labels, found):
    return [label_accuracy(*pair) for pair in zip(labels, found.labels, strict=True)]


def test_a_single_label_is_read_off_exactly_although_labels_are_granted_falsely():
    _, labels, seen = scene(targets=4, size=1)
    seen._facts[Knowledge.LABELS] = (labels + 1) % 4
    found = run(Labels(), seen)
    assert torch.equal(found.labels, labels)
    assert found.images.isnan().all()
    assert found.images.shape == (4, 1, 1, 8, 8)


def test_counts_by_hand_of_a_bias_gradient():
    """With outputs of a quarter each, a bias gradient of p - n / B gives the counts 3, 1, 0 and 0."""
    _, _, seen = scene(targets=1, size=4, grants=("num-examples",))
    for parameter in seen.network.parameters():
        torch.nn.init.zeros_(parameter)  # then every output is a quarter
    name = [name for name, _ in seen.network.named_parameters()][-1]
    gradient = torch.tensor([[0.25 - 0.75, 0.25 - 0.25, 0.25, 0.25]])
    updates = {**seen.updates, name: -seen.lr * gradient}
    assert run(Labels(), dataclasses.replace(seen, updates=updates)).labels.tolist() == [[0, 0, 0, 1]]


def counts(private, public=None, protocol=LOCAL):
    """Return a server's view of random images with these labels."""
    rng = torch.Generator().manual_seed(0)
    network = create_model("lenet-dlg", (1, 8, 8), 4, 0).eval()
    batches = [batch(labels, rng) for labels in private]
    granted = ("num-examples", "local-steps", "public-data")[: 3 if public is not None else 2]
    shown = PublicKnowledge(None if public is None else batch(public, rng))
    return observe(network, batches, threat=ThreatModel.of(*granted), num_classes=4, protocol=protocol, public=shown)


def batch(labels, rng):
    """Return images that are brighter the larger their label is."""
    bright = 0.2 * labels.view(-1, 1, 1, 1)
    return Batch(bright + 0.3 * torch.rand(len(labels), 1, 8, 8, generator=rng), labels, torch.zeros(len(labels)) > 0)


@pytest.mark.parametrize("public", [None, torch.arange(80) % 4])
def test_hundreds_of_images_and_many_local_steps_are_counted_far_above_chance(public):
    labels = torch.stack([torch.full((300,), 1), torch.arange(300) % 2])
    seen = counts(labels, public)
    assert not seen.single_step
    chance = [label_accuracy(own, torch.arange(300) % 4) for own in labels]
    assert chance == [0.25, 0.5]
    for found, guessed in zip(accuracies(labels, run(Labels(), seen)), chance, strict=True):
        assert found > guessed + 0.25


def test_public_images_are_used_as_far_as_the_prior_says():
    labels = torch.full((1, 100), 2)
    seen = counts(labels, torch.arange(80) % 4)
    only_prior = run(Labels(prior=1e6), seen).labels
    assert torch.bincount(only_prior[0]).tolist() == [25] * 4
    assert accuracies(labels, run(Labels(prior=0.01), seen))[0] > 0.7


def test_several_local_steps_need_their_settings():
    _, _, seen = scene(targets=1, size=4, grants=("num-examples",), protocol=LOCAL)
    with pytest.raises(ThreatModelError, match="local-steps"):
        run(Labels(), seen)


def test_no_number_of_images_or_steps_is_too_large():
    assert Labels().too_large(100_000, 100_000) == ""


def test_a_negative_prior_is_refused():
    with pytest.raises(ConfigError, match="prior"):
        Labels(prior=-1.0)
