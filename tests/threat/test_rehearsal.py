"""A server that plays clients with its own images sees what real clients with these images would have sent."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.defences import build_defence
from gradveil.errors import ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.threat import Knowledge, Known, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.threat.received import received
from gradveil.threat.rehearsal import rehearse, relative_work, unplayable
from gradveil.types import Batch


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


def batches(count, images=1, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        Batch(torch.rand(images, 1, 8, 8, generator=rng), torch.arange(images) % 3, torch.zeros(images).bool())
        for _ in range(count)
    ]


def watched(defence, protocol=None, count=2, images=1, knows=("labels", "num-examples", "defence")):
    guards = batches(len(defence.early_clients(4)), images, 9)
    return observe(
        network(), batches(count, images), threat=ThreatModel.of(*knows), num_classes=3, defence=defence,
        protocol=protocol, public=PublicKnowledge(batches(1)[0]), federation=Federation(guards=guards, num_clients=4),
    )  # fmt: skip


def same(one, other):
    return all(torch.allclose(one.updates[name], tensor, atol=1e-6) for name, tensor in other.updates.items())


@pytest.mark.parametrize("spec", ["none", "prune:fraction=0.5", "quantise", "soteria"])
def test_the_same_images_give_the_same_updates_if_nothing_is_random(spec):
    seen = watched(build_defence(spec))
    assert same(rehearse(seen, batches(2), seed=5), seen)
    assert not same(rehearse(seen, batches(2, seed=1), seed=5), seen)


def test_who_does_not_know_the_defence_plays_clients_without_one():
    knowing = watched(build_defence("prune:fraction=0.5"))
    ignorant = watched(build_defence("prune:fraction=0.5"), knows=("labels", "num-examples"))
    plain = watched(build_defence("none"))
    assert same(rehearse(ignorant, batches(2), seed=5), plain)
    assert not same(rehearse(knowing, batches(2), seed=5), plain)


def test_random_defences_draw_anew_for_each_client_and_seed():
    seen = watched(build_defence("gaussian:std=1"))
    twins = batches(1) * 2
    one, again, other = (rehearse(seen, twins, seed) for seed in (5, 5, 6))
    assert same(one, again)
    assert not same(one, other)
    weight = one.updates["3.weight"]
    assert not torch.allclose(weight[0], weight[1])


def test_what_the_real_guard_sent_is_broadcast_again():
    seen = watched(build_defence("entangle"))
    assert seen.public
    again = rehearse(seen, batches(2), seed=5)
    assert all(torch.equal(again.public[name], tensor) for name, tensor in seen.public.items())
    assert same(again, seen)


def test_defences_that_change_the_network_are_played_on_the_network_before():
    seen = watched(build_defence("fedkl"), count=1)
    again = rehearse(seen, batches(3), seed=5)
    assert again.updates.keys() == seen.updates.keys()
    assert again.num_targets == 3


def test_a_mean_of_clients_is_played_as_a_mean():
    seen = watched(build_defence("none"), Protocol(aggregation="secure"), count=2, images=2)
    assert seen.clients == 2
    both = batches(2, 2)
    joined = Batch(
        torch.cat([b.images for b in both]), torch.cat([b.labels for b in both]), torch.cat([b.sensitive for b in both])
    )
    known = replace(seen, threat=ThreatModel(seen.threat.knows | {Knowledge.ENCODINGS}))
    again = rehearse(known, [joined, joined], seed=5)
    assert again.num_targets == 2
    assert torch.allclose(again.encodings.images.sum(0), 2 * joined.images.sum(0))
    assert again.labels.shape == (2, 4)
    for name, tensor in seen.updates.items():
        assert torch.allclose(again.updates[name], tensor.expand_as(again.updates[name]), atol=1e-6)


def test_a_client_that_uses_some_of_its_images_per_round_is_played_over_rounds():
    protocol = Protocol(LocalSettings("fedsgd", batch_size=1), rounds=4)
    seen = watched(build_defence("mixup:k=2,pool=data"), protocol, count=1, images=3, knows=("num-examples", "defence"))
    known = replace(seen, threat=ThreatModel.of("num-examples", "defence", "encodings"))
    (own,) = batches(1, 3, seed=1)
    again = rehearse(known, [own], seed=5, rounds=2)
    assert (again.num_targets, again.num_examples, again.num_images) == (2, 1, 3)
    shares = torch.linalg.lstsq(own.images.flatten(1).T, again.encodings.images.flatten(1).T).solution
    assert torch.allclose(own.images.flatten(1).T @ shares, again.encodings.images.flatten(1).T, atol=1e-4)
    assert (shares.T > 1e-3).sum(1).tolist() == [2, 2]


def test_several_local_steps_must_be_known():
    protocol = Protocol(LocalSettings(epochs=2, batch_size=1), lr=0.1)
    seen = watched(build_defence("none"), protocol, images=2)
    assert "local-steps" in unplayable(seen)
    with pytest.raises(ThreatModelError, match="local-steps"):
        rehearse(seen, batches(1, 2), seed=0)
    known = watched(build_defence("none"), protocol, images=2, knows=("num-examples", "local-steps"))
    assert rehearse(known, batches(1, 2), seed=0).num_targets == 1


def test_updates_from_elsewhere_can_be_played_unless_the_defence_changed_the_network():
    seen = watched(build_defence("none"))
    sent = {name: tensor[0] for name, tensor in seen.updates.items()}
    facts = {"shape": (1, 8, 8), "num_classes": 3, "num_examples": 1}
    mine = received(network(), sent, **facts, known=Known(defence=build_defence("prune")))
    assert rehearse(mine, batches(2), seed=0).num_targets == 2
    hidden = received(network(), sent, **facts, known=Known(defence=build_defence("fedkl")))
    assert "before the defence changed it" in unplayable(hidden)
    assert unplayable(replace(seen, script=None))


def test_the_work_of_a_defence_is_counted_in_operations():
    few, many = (relative_work(watched(build_defence(f"dcs2:steps={steps}")), batches(1)[0]) for steps in (5, 10))
    assert relative_work(watched(build_defence("prune")), batches(1)[0]) == 1
    assert 1.6 < many / few < 2.1


def test_counting_ends_when_there_is_too_much_work():
    seen, batch = watched(build_defence("dcs2:steps=40")), batches(1)[0]
    whole = relative_work(seen, batch)
    assert 5 < relative_work(seen, batch, most=5) < whole / 2
    assert relative_work(seen, batch, most=2 * whole) == whole
