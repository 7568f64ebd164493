import torch
from torch import nn

from gradveil.attacks.parts.statistics import likely_statistics, watched
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))


def private(count=3, size=5):
    rng = torch.Generator().manual_seed(1)
    labels = torch.arange(size) % 3
    return [Batch(torch.rand(size, 1, 8, 8, generator=rng), labels, torch.zeros(size) > 0) for _ in range(count)]


def true_statistics(network, batches):
    with torch.no_grad():
        features = [network[0](batch.images) for batch in batches]
    means = torch.stack([f.mean((0, 2, 3)) for f in features])
    return means, torch.stack([f.var((0, 2, 3), correction=0) for f in features])


def test_watched_gives_the_statistics_of_each_group():
    network, batches = net().eval(), private()
    with watched(network) as statistics:
        network(torch.cat([batch.images for batch in batches]))
        found = statistics(3)["1"]
    for ours, theirs in zip(found, true_statistics(network, batches), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not network[1]._forward_pre_hooks


def test_sent_running_statistics_reveal_the_batchs_own():
    network, batches = net(), private()
    how = LocalSettings(algorithm="fedsgd", batch_size=0, batch_norm="average")
    seen = observe(network, batches, threat=ThreatModel(), num_classes=3, protocol=Protocol(how))
    mean, variance = likely_statistics(seen)["1"]
    means, variances = true_statistics(network, batches)
    torch.testing.assert_close(mean, means, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(variance, variances, atol=1e-5, rtol=0.02)  # torch sends the unbiased one


def test_otherwise_trained_running_statistics_are_used_but_untrained_ones_are_not():
    network, batches = net(), private()
    assert likely_statistics(observe(network, batches, threat=ThreatModel(), num_classes=3)) == {}
    network[1].running_mean += 0.5
    mean, _ = likely_statistics(observe(network, batches, threat=ThreatModel(), num_classes=3))["1"]
    assert torch.equal(mean, torch.full((3, 2), 0.5))


def test_granted_statistics_come_first():
    network, batches = net(), private()
    seen = observe(network, batches, threat=ThreatModel.of("batch-statistics"), num_classes=3)
    torch.testing.assert_close(likely_statistics(seen)["1"][0], true_statistics(network, batches)[0])
