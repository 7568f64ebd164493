import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Client, Defence
from gradveil.errors import DefenceError
from gradveil.federated.client import Broadcast, Device, Score, Streams, play_client, score, train_locally
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch


def setting(num_images=10, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(2 * 36, 3)).double()
    data = Batch(
        torch.rand(num_images, 1, 8, 8).double(), torch.randint(0, 3, (num_images,)), torch.zeros(num_images) > 0
    )
    return module, data


def make_client(net, data, received):
    return Client(0, 1, net.module, net.shared_tensors(received), data, {}, {}, SecretStream(0))


def run(module, data, how, lr=0.1, defence=None):
    net = FlatModel(copy.deepcopy(module))
    received = net.values[net.shared].clone()
    client = make_client(net, data, received)
    order = SecretStream(5)
    return train_locally(net, received, client, defence or Defence(), how, lr, order)


def naive(module, data, how, lr):
    """Train with torch.optim.SGD in a plain loop."""
    module = copy.deepcopy(module)
    before = copy.deepcopy(module.state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr, how.momentum, 0, how.weight_decay, how.nesterov)
    order = SecretStream(5)
    for _ in range(how.epochs):
        for indices in order.permutation(len(data)).split(how.batch_size or len(data)):
            optimiser.zero_grad()
            F.cross_entropy(module(data.images[indices]), data.labels[indices]).backward()
            optimiser.step()
    return {name: tensor - before[name] for name, tensor in module.state_dict().items()}


@settings(deadline=None, max_examples=25)
@given(
    num_images=st.integers(1, 12),
    epochs=st.integers(1, 3),
    batch_size=st.integers(0, 13),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.01]),
)
def test_local_training_equals_torch_sgd(num_images, epochs, batch_size, momentum, nesterov, weight_decay):
    module, data = setting(num_images)
    how = LocalSettings("fedavg", epochs, batch_size, momentum, nesterov and momentum > 0, weight_decay)
    update = run(module, data, how)
    for name, change in naive(module, data, how, 0.1).items():
        assert torch.allclose(update.tensors[name], change, atol=1e-10), name
    assert update.num_examples == num_images


def test_fedsgd_sends_minus_lr_times_the_gradient_of_one_batch():
    module, data = setting(10)
    update = run(module, data, LocalSettings("fedsgd", epochs=7, batch_size=4), lr=0.5)
    chosen = SecretStream(5).permutation(10)[:4]
    loss = F.cross_entropy(module(data.images[chosen]), data.labels[chosen])
    for (name, parameter), gradient in zip(
        module.named_parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True
    ):
        assert torch.allclose(update.tensors[name], -0.5 * gradient, atol=1e-12), (name, parameter.shape)
    assert update.num_examples == 4


def test_hooks_meet_the_data_in_order():
    calls = []

    class Spy(Defence):
        def on_batch(self, batch, client):
            calls.append("batch")
            return batch

        def on_gradient(self, gradient, batch, client):
            calls.append("gradient")
            return {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}

        def on_update(self, update, client):
            calls.append("update")
            assert update.norm() == 0
            return update

    module, data = setting(5)
    run(module, data, LocalSettings(batch_size=3), defence=Spy())
    assert calls == ["batch", "gradient", "batch", "gradient", "update"]


@pytest.mark.parametrize(("batch_norm", "moves"), [("average", True), ("freeze", False)])
def test_batch_norm_statistics_move_unless_frozen(batch_norm, moves):
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)).double()
    _, data = setting(6)
    update = run(module, data, LocalSettings(batch_norm=batch_norm))
    assert set(update.buffers) == {"0.running_mean", "0.running_var"}
    assert any(bool(tensor.any()) for tensor in update.buffers.values()) is moves
    assert bool(update.tensors["0.weight"].any())


def test_score_counts_and_adds_up():
    module, data = setting(9)
    whole = score(module, data)
    parts = score(module, data[slice(0, 4)]) + score(module, data[slice(4, 9)]) + Score()
    logits = module(data.images)
    right = [int(logits[i].argmax()) == int(data.labels[i]) for i in range(9)]
    assert whole.correct == parts.correct == sum(right)
    assert whole.count == parts.count == 9
    assert whole.loss == pytest.approx(F.cross_entropy(logits, data.labels).item())
    assert parts.loss == pytest.approx(whole.loss)
    assert whole.accuracy == sum(right) / 9


def test_local_training_does_not_change_its_input():
    module, data = setting(6)
    kept = replace(data, images=data.images.clone())
    run(module, data, LocalSettings(epochs=2, batch_size=2))
    assert torch.equal(kept.images, data.images)


class TestPlayClient:
    """One round, assembled in one place."""

    class Spy(Defence):
        def __init__(self):
            object.__setattr__(self, "draws", [])

        def on_data(self, data, client):
            self.draws.append(("data", float(client.rng.uniform(()))))
            client.state["made"] = client.state.get("made", torch.zeros(())) + 1
            return replace(data, images=data.images * 0.5)

        def on_update(self, update, client):
            self.draws.append(("update", float(client.rng.uniform(()))))
            return update

    def play(self, device, defence=None, **options):
        module, _ = setting()
        net = FlatModel(module)
        received = net.values[net.shared].clone()
        streams = options.pop("streams", None) or Streams.of(3, 0, 1)
        return play_client(
            net, device, Broadcast(received, 0.1), defence or Defence(), LocalSettings(batch_size=4), streams, **options
        )

    def test_it_trains_as_train_locally_does(self):
        module, data = setting()
        net = FlatModel(copy.deepcopy(module))
        received = net.values[net.shared].clone()
        client, streams = make_client(net, data, received), Streams.of(3, 0, 1)
        wanted = train_locally(net, received, client, Defence(), LocalSettings(batch_size=4), 0.1, streams.order)
        played = self.play(Device(data))
        assert all(torch.equal(played.update.tensors[name], tensor) for name, tensor in wanted.tensors.items())

    def test_data_are_prepared_once_with_a_stream_of_their_own(self):
        _, data = setting()
        device, spy = Device(data), self.Spy()
        streams = replace(Streams.of(3, 0, 1), data=SecretStream(9))
        played = self.play(device, spy, streams=streams)
        assert torch.equal(played.data.images, data.images * 0.5)
        again = self.play(replace(device, data=played.data, prepared=True), spy)
        assert torch.equal(again.data.images, data.images * 0.5)
        assert float(device.state["made"]) == 1
        expected = float(SecretStream(9).uniform(()))
        assert [name for name, _ in spy.draws] == ["data", "update", "update"]
        assert spy.draws[0][1] == expected
        assert spy.draws[1][1] == spy.draws[2][1]  # on_data took nothing from the hooks' stream

    def test_an_error_before_training_stops_the_round(self):
        def ready(client):
            assert torch.equal(client.data.images, data.images * 0.5)
            raise RuntimeError("stop")

        _, data = setting()
        shown = []
        with pytest.raises(RuntimeError, match="stop"):
            self.play(Device(data), self.Spy(), ready=ready, watch=shown.append)
        assert not shown

    def test_an_undeclared_report_stops_the_round(self):
        class Undeclared(Defence):
            def on_update(self, update, client):
                client.report("secret", 1.0)
                return update

        with pytest.raises(DefenceError, match="must be declared"):
            self.play(Device(setting()[1]), Undeclared())
