from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.parts.local_training import Replay, replay_of
from gradveil.federated.client import step_positions
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.secret_stream import SecretStream
from gradveil.threat import Known, ThreatModel
from gradveil.threat.observe import observe
from gradveil.threat.received import received
from gradveil.types import Batch

BATCHES = (torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([3, 0]), torch.tensor([2, 1]))
HOW = LocalSettings(epochs=2, batch_size=2, momentum=0.8, nesterov=True, weight_decay=0.1, batch_norm="freeze")


def small(model="lenet-dlg"):
    return create_model(model, (1, 8, 8), 3, seed=0).double().eval()


def data(targets=2, count=4):
    rng = torch.Generator().manual_seed(2)
    images = torch.rand(targets * count, 1, 8, 8, generator=rng, dtype=torch.double)
    return images, torch.randint(0, 3, (targets * count,), generator=rng)


def by_hand(network, images, labels, how, lr, steps=BATCHES):
    """Train a copy by torch.optim, and return the change of the weights by name."""
    copy = deepcopy(network)
    decay = {"weight_decay": how.weight_decay}
    optimiser = {
        "sgd": lambda: torch.optim.SGD(copy.parameters(), lr, momentum=how.momentum, nesterov=how.nesterov, **decay),
        "adam": lambda: torch.optim.Adam(copy.parameters(), lr, betas=how.betas, eps=how.eps, **decay),
        "adamw": lambda: torch.optim.AdamW(copy.parameters(), lr, betas=how.betas, eps=how.eps, **decay),
    }[how.optimiser]()
    for step in steps:
        optimiser.zero_grad()
        parts = torch.split(step, how.batch_size or len(step))
        for some in parts:
            loss = nn.functional.cross_entropy(
                copy(images[some]), labels[some], reduction=how.reduction, label_smoothing=how.label_smoothing
            )
            (loss / (len(parts) if how.reduction == "mean" else 1)).backward()
        if how.clip_norm:
            nn.utils.clip_grad_norm_(copy.parameters(), how.clip_norm)
        optimiser.step()
    pairs = zip(network.named_parameters(), copy.parameters(), strict=True)
    return {name: (after - before).detach() for (name, before), after in pairs}


def mean_gradient(network, images, labels, how, lr):
    length = lr * sum(how.step_weights(len(images)))
    return {name: change / -length for name, change in by_hand(network, images, labels, how, lr).items()}


STEPS = {
    "adam": {"optimiser": "adam", "weight_decay": 0.1, "betas": (0.8, 0.99)},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.1, "eps": 1e-3},
    "clipped": {"clip_norm": 0.05, "momentum": 0.5},
    "smoothed": {"label_smoothing": 0.2},
    "summed": {"reduction": "sum", "momentum": 0.5, "clip_norm": 0.3},
}


@pytest.mark.parametrize("name", STEPS)
def test_every_kind_of_step_equals_that_of_torch(name):
    how, network, (images, labels) = LocalSettings(epochs=2, batch_size=2, **STEPS[name]), small(), data()
    found = Replay(network, 4, "unroll", how, 0.05, BATCHES)(images, labels, {})
    for target in range(2):
        own = slice(4 * target, 4 * target + 4)
        for key, wanted in mean_gradient(network, images[own], labels[own], how, 0.05).items():
            torch.testing.assert_close(found[key][target], wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", STEPS)
def test_clients_take_the_same_steps_as_torch(name):
    """The whole way: a client of the federation trains, and torch.optim repeats it with the batches that it took."""
    how, network, (images, labels) = LocalSettings(epochs=2, batch_size=2, **STEPS[name]), small(), data(targets=1)
    threat = ThreatModel.of("local-steps", "num-examples")
    seen = observe(
        small(),
        [Batch(images, labels, torch.zeros(4, dtype=torch.bool))],
        threat=threat,
        num_classes=3,
        protocol=Protocol(how, 0.05),
    )
    steps = [step[0] for step in step_positions(4, how, SecretStream(0, "batches", 0, "round", 1))]
    for key, wanted in by_hand(network, images, labels, how, 0.05, steps).items():
        torch.testing.assert_close(seen.updates[key][0], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("model", ["lenet-dlg", "batch-norm"])
def test_accumulated_batches_are_averaged_each_with_its_own_statistics(model):
    how = LocalSettings(epochs=1, batch_size=2, accumulate=2)
    network = small() if model == "lenet-dlg" else normed()
    images, labels = data(targets=1)
    threat = ThreatModel.of("local-steps", "num-examples")
    seen = observe(
        deepcopy(network),
        [Batch(images, labels, torch.zeros(4, dtype=torch.bool))],
        threat=threat,
        num_classes=3,
        protocol=Protocol(how, 0.05),
    )
    assert seen.single_step
    (step,) = step_positions(4, how, SecretStream(0, "batches", 0, "round", 1))
    replay = replace(replay_of(seen, "unroll", torch.Generator()), batches=(torch.cat(step),))
    found = replay(images, labels, {})
    for key, wanted in seen.mean_gradients.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-5, atol=1e-8)
    network.train()
    by_torch = by_hand(network, images, labels, how, 0.05, [torch.cat(step)])
    for key, wanted in by_torch.items():
        torch.testing.assert_close(seen.updates[key][0], wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", STEPS)
def test_a_single_step_is_compared_as_it_was_made(name):
    """The true images explain the update of a single step, for Adam as far as its precision shows the gradient."""
    how = LocalSettings("fedsgd", batch_size=0, batch_norm="freeze", **STEPS[name] | {"momentum": 0.0})
    network, (images, labels) = small(), data(targets=2)
    change = [
        by_hand(network, images[own], labels[own], how, 0.01, [torch.arange(4)]) for own in (slice(4), slice(4, 8))
    ]
    seen = received(
        network, change, shape=(1, 8, 8), num_classes=3, lr=0.01, num_examples=4, known=Known(local_steps=how)
    )
    found = replay_of(seen, "unroll", torch.Generator())(images, labels, {})
    for key, wanted in seen.mean_gradients.items():
        torch.testing.assert_close(found[key], wanted, rtol=2e-3, atol=1e-7)


def normed():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize(
    "how", [HOW, LocalSettings(epochs=2, batch_size=2), LocalSettings(epochs=2, batch_size=2, momentum=0.5)]
)
def test_unrolled_steps_equal_torch_sgd_on_every_target(how):
    network, (images, labels) = small(), data()
    found = Replay(network, 4, "unroll", how, 0.3, BATCHES)(images, labels, {})
    for target in range(2):
        own = slice(4 * target, 4 * target + 4)
        for name, wanted in mean_gradient(network, images[own], labels[own], how, 0.3).items():
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
