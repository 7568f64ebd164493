import numpy as np
import pytest
import torch
from torch import nn

from gradveil.errors import ConfigError, GradveilError, ThreatModelError
from gradveil.federated.protocol import LocalSettings
from gradveil.models import create_model
from gradveil.threat import Known, ThreatModel
from gradveil.threat.observe import observe
from gradveil.threat.received import received
from gradveil.types import Batch

SHAPE = (1, 8, 8)


def network():
    return create_model("mlp:hidden=5", SHAPE, 3, seed=0)


def gradient(net, count=2):
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.rand(count, *SHAPE, generator=rng), torch.arange(count) % 3
    loss = nn.functional.cross_entropy(net(images), labels)
    names = [name for name, _ in net.named_parameters()]
    return Batch(images, labels, torch.zeros(count) > 0), dict(
        zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True)
    )


def test_a_gradient_from_a_file_equals_what_observe_shows():
    net = network()
    batch, found = gradient(net)
    ours = received(net, found, shape=SHAPE, num_classes=3, kind="gradient", known=Known(labels=batch.labels))
    theirs = observe(net, [batch], threat=ThreatModel.of("labels", "num-examples"), num_classes=3)
    assert ours.threat == theirs.threat
    assert ours.num_examples == 2
    assert torch.equal(ours.labels, theirs.labels)
    for name, tensor in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[name], tensor)


def test_changes_of_several_clients_as_numpy_arrays():
    net = network()
    _, found = gradient(net)
    change = {name: (-0.1 * tensor).numpy() for name, tensor in found.items()}
    seen = received(net, [change, change], shape=SHAPE, num_classes=3, lr=0.1)
    assert seen.num_targets == 2
    for name, tensor in found.items():
        torch.testing.assert_close(seen.gradients[name][1], tensor)
    with pytest.raises(ThreatModelError, match="num-examples"):
        _ = seen.num_examples


def test_several_steps_need_their_settings():
    net = network()
    _, found = gradient(net)
    how = LocalSettings(epochs=2, batch_size=2)
    known = Known(local_steps=how)
    seen = received(net, found, shape=SHAPE, num_classes=3, lr=0.5, num_examples=4, known=known)
    assert not seen.single_step
    for name, tensor in found.items():
        torch.testing.assert_close(seen.mean_gradients[name][0], tensor / -(0.5 * 4))
    with pytest.raises(ConfigError, match="num_examples"):
        received(net, found, shape=SHAPE, num_classes=3, known=known)
    with pytest.raises(ConfigError, match="one step"):
        received(net, found, shape=SHAPE, num_classes=3, num_examples=4, kind="gradient", known=known)


def test_running_statistics_may_be_included():
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))
    update = {name: torch.ones_like(tensor) for name, tensor in net.state_dict().items()}
    seen = received(net.train(), update, shape=SHAPE, num_classes=3)
    assert set(seen.buffers) == {"0.running_mean", "0.running_var"}
    assert not seen.network.training
    assert net.training


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda u: u.pop(next(iter(u))), "lacks"),
        (lambda u: u.update(extra=torch.zeros(1)), "unknown 'extra'"),
        (lambda u: u.update({f"module.{n}": u.pop(n) for n in list(u)}), "Did you mean"),
        (lambda u: u.update({next(iter(u)): torch.zeros(2, 2)}), r"must have shape \(5, 64\) .* got \(2, 2\)"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(spoil, match):
    net = network()
    _, found = gradient(net)
    spoil(found)
    with pytest.raises(ConfigError, match=match):
        received(net, found, shape=SHAPE, num_classes=3)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"known": Known(labels=torch.tensor([[0], [1]]))}, "labels must have shape"),
        ({"known": Known(labels=torch.tensor([7]))}, "from 0 to 2"),
        ({"known": Known(labels=torch.tensor([0.5]))}, "whole numbers"),
        ({"known": Known(labels=torch.tensor([0, 1])), "num_examples": 3}, "labels must have shape"),
        ({"lr": 0.0}, "lr"),
        ({"kind": "gradeint"}, "gradient"),
        ({"num_examples": 0}, "num_examples"),
        ({"num_examples": 2.5}, "whole number"),
        ({"num_examples": 10**9}, "num_examples"),
        ({"shape": (28, 28)}, "shape"),
        ({"known": Known(class_averages=torch.zeros(2, 1, 8, 8))}, "class_averages"),
    ],
)
def test_bad_facts(bad, match):
    net = network()
    with pytest.raises(GradveilError, match=match):
        received(net, gradient(net)[1], **{"shape": SHAPE, "num_classes": 3, **bad})


def test_no_updates_at_all():
    with pytest.raises(ConfigError, match="at least one"):
        received(network(), [], shape=SHAPE, num_classes=3)


def test_numpy_scalars_do_not_pass_for_tensors():
    net = network()
    found = {name: np.float32(0) for name in gradient(net)[1]}
    with pytest.raises(ConfigError, match="shape"):
        received(net, found, shape=SHAPE, num_classes=3)


def test_tied_weights_may_have_any_of_their_names():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    net[2].weight = net[1].weight
    change = {name: torch.ones_like(tensor) for name, tensor in net.state_dict().items()}
    assert "2.weight" not in received(net, change, shape=SHAPE, num_classes=3).updates


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"batch_size": -1}, {"momentum": float("nan")}, {"algorithm": "foo"}])
def test_bad_local_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LocalSettings(**bad)
