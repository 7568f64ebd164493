from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.parts.local_training import Replay, replay_of
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

BATCHES = (torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([3, 0]), torch.tensor([2, 1]))
HOW = LocalSettings(epochs=2, batch_size=2, momentum=0.8, nesterov=True, weight_decay=0.1, batch_norm="freeze")


def small(model="lenet-dlg"):
    return create_model(model, (1, 8, 8), 3, seed=0).double().eval()


def data(targets=2, count=4):
    rng = torch.Generator().manual_seed(2)
    images = torch.rand(targets * count, 1, 8, 8, generator=rng, dtype=torch.double)
    return images, torch.randint(0, 3, (targets * count,), generator=rng)


def by_hand(network, images, labels, how, lr):
    """Train a copy by torch.optim.SGD, and return the mean gradient by name."""
    copy = small()
    copy.load_state_dict(network.state_dict())
    optimiser = torch.optim.SGD(
        copy.parameters(), lr, momentum=how.momentum, nesterov=how.nesterov, weight_decay=how.weight_decay
    )
    for some in BATCHES:
        optimiser.zero_grad()
        nn.functional.cross_entropy(copy(images[some]), labels[some]).backward()
        optimiser.step()
    pairs = zip(network.named_parameters(), copy.parameters(), strict=True)
    length = lr * sum(how.step_weights(len(images)))
    return {name: ((before - after) / length).detach() for (name, before), after in pairs}


@pytest.mark.parametrize(
    "how", [HOW, LocalSettings(epochs=2, batch_size=2), LocalSettings(epochs=2, batch_size=2, momentum=0.5)]
)
def test_unrolled_steps_equal_torch_sgd_on_every_target(how):
    network, (images, labels) = small(), data()
    found = Replay(network, 4, "unroll", how, 0.3, BATCHES)(images, labels, {})
    for target in range(2):
        own = slice(4 * target, 4 * target + 4)
        for name, wanted in by_hand(network, images[own], labels[own], how, 0.3).items():
            torch.testing.assert_close(found[name][target], wanted)


def test_unrolled_steps_can_be_differentiated():
    network, (images, labels) = small(), data(targets=1)
    replay = Replay(network, 4, "unroll", replace(HOW, epochs=1), 0.3, BATCHES[:2])

    def total(images):
        return torch.stack([tensor.sum() for tensor in replay(images, labels, {}).values()]).sum()

    assert torch.autograd.gradcheck(total, (images[:4].requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("how", [LocalSettings(epochs=2, batch_size=2), HOW])
def test_with_small_steps_all_approximations_agree(how):
    network, (images, labels) = small(), data()
    exact = Replay(network, 4, "unroll", how, 1e-5, BATCHES)(images, labels, {})
    for way in ("line", "once"):
        near = Replay(network, 4, way, how, 1e-5, BATCHES)(images, labels, exact)
        for name, tensor in near.items():
            torch.testing.assert_close(tensor, exact[name], rtol=1e-2, atol=1e-4)


def test_the_line_is_nearer_than_the_start_after_long_steps():
    network, (images, labels) = small(), data()
    how = LocalSettings(epochs=2, batch_size=2)
    exact = Replay(network, 4, "unroll", how, 0.5, BATCHES)(images, labels, {})

    def miss(way):
        near = Replay(network, 4, way, how, 0.5, BATCHES)(images, labels, exact)
        return sum((near[name] - exact[name]).square().sum().item() for name in exact)

    assert miss("line") < miss("once")


@pytest.mark.parametrize("known", ["num-examples,local-steps", "num-examples"])
@pytest.mark.parametrize("way", ["unroll", "once"])
def test_batch_norm_uses_batch_statistics_if_clients_do(way, known):
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    images, labels = (tensor[:4] for tensor in data())
    private = [Batch(images.float(), labels, torch.zeros(4) > 0)]
    how = LocalSettings(epochs=1, batch_size=4, batch_norm="average")
    grants = ThreatModel.of(*known.split(","))  # without known local steps, the running statistics reveal it
    seen = observe(network, private, threat=grants, num_classes=3, protocol=Protocol(how, 0.1))
    found = replay_of(seen, way, torch.Generator())(images.float(), labels, seen.gradients)
    for name, tensor in seen.gradients.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_plan_follows_the_known_local_settings():
    private = [Batch(*(t.float() if t.is_floating_point() else t for t in data(1, 6)), torch.zeros(6) > 0)]
    how = LocalSettings(epochs=3, batch_size=4)
    seen = observe(
        small().float(),
        private,
        threat=ThreatModel.of("num-examples", "local-steps"),
        num_classes=3,
        protocol=Protocol(how, 0.1),
    )
    replay = replay_of(seen, "line", torch.Generator())
    assert [len(batch) for batch in replay.batches] == [4, 2] * 3
    assert sorted(torch.cat(replay.batches[:2]).tolist()) == list(range(6))
    assert replay.lr == 0.1
    assert not replay.is_plain
    assert not replay_of(seen, "once", torch.Generator()).is_plain  # images in the last batch of an epoch count more
    even = LocalSettings(epochs=3, batch_size=3)
    seen = observe(
        small().float(),
        private,
        threat=ThreatModel.of("num-examples", "local-steps"),
        num_classes=3,
        protocol=Protocol(even, 0.1),
    )
    assert replay_of(seen, "once", torch.Generator()).is_plain


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(2), nn.LayerNorm([2, 6, 6])])
def test_batch_normalisation_is_differentiated_correctly(norm):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.Flatten(), nn.Linear(72, 3)).double()
    images, labels = (tensor[:4] for tensor in data())
    private = [Batch(images, labels, torch.zeros(4) > 0)]
    how = LocalSettings(epochs=2, batch_size=2, batch_norm="average")
    grants = ThreatModel.of("num-examples", "local-steps")
    seen = observe(network, private, threat=grants, num_classes=3, protocol=Protocol(how, 0.1))
    replay = replay_of(seen, "unroll", torch.Generator())

    def total(images):
        return torch.stack([tensor.square().sum() for tensor in replay(images, labels, {}).values()]).sum()

    assert torch.autograd.gradcheck(total, (images.requires_grad_(),), rtol=1e-4)


def test_weight_decay_is_kept_by_the_one_step_approximation():
    network, (images, labels) = small(), data(targets=1)
    private = [Batch(images.float(), labels, torch.zeros(4) > 0)]
    how = LocalSettings("fedsgd", batch_size=0, weight_decay=0.3, batch_norm="freeze")
    grants = ThreatModel.of("num-examples", "local-steps")
    seen = observe(network.float(), private, threat=grants, num_classes=3, protocol=Protocol(how, 0.1))
    found = replay_of(seen, "once", torch.Generator())(images.float(), labels, seen.gradients)
    for name, tensor in seen.gradients.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["average", "local", "freeze"])
@pytest.mark.parametrize("size", [1, 2])
def test_one_pass_simulates_single_steps_with_batch_norm_as_the_clients_used_it(mode, size):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sigmoid(), nn.Flatten(), nn.Linear(72, 3))
    images, labels = data(2, size)
    labels = labels.view(2, size).sort(1).values.flatten()
    private = [
        Batch(images.float()[own : own + size], labels[own : own + size], torch.zeros(size) > 0) for own in (0, size)
    ]
    how = LocalSettings("fedsgd", batch_size=0, batch_norm=mode)
    seen = observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=3, protocol=Protocol(how, 0.1))
    assert seen.batch_norm == mode
    seen = replace(seen, buffers={})  # the server dictated the mode: nothing has to reveal it
    replay = replay_of(seen, "unroll", torch.Generator())
    assert replay.is_plain
    assert replay.mixes == (mode != "freeze")
    found = replay(images.float(), labels, seen.gradients)
    for name, tensor in seen.gradients.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_network_without_batch_norm_is_simulated_as_it_is():
    private = [Batch(*(t.float() if t.is_floating_point() else t for t in data(1, 1)), torch.zeros(1) > 0)]
    network = small().float()
    how = LocalSettings("fedsgd", batch_size=0, batch_norm="average")
    seen = observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=3, protocol=Protocol(how, 0.1))
    replay = replay_of(seen, "unroll", torch.Generator())
    assert replay.network is seen.network
    assert replay.how is None
