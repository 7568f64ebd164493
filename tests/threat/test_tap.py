"""A tap records what was sent, bit for bit, and changes nothing."""

import stat

import pytest
import torch

from gradveil.config import TrainSettings
from gradveil.defences import build_defence
from gradveil.engines.devices import defended, is_private, make_network
from gradveil.engines.simulation import Simulation, chosen_normalisation
from gradveil.engines.training import single_thread
from gradveil.errors import ConfigError, DataError
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import Protocol, default_taps
from gradveil.randomness import global_stream
from gradveil.secret_stream import SecretStream
from gradveil.threat import Knowledge, ThreatModel
from gradveil.threat.tap import Tap, load_tapped, observation

ALL = ThreatModel(frozenset(Knowledge))
LAB = {"algorithm": "fedsgd", "batch_size": 2, "lr": 0.1}
FEDAVG = {"batch_size": 8, "epochs": 2, "momentum": 0.5, "lr": 0.05}


def settings(defence="none", how=None, **more):
    few = {"model": "lenet-dlg", "clients": 4, "rounds": 3, "partition": "iid:images=12", "save_rounds": (1, 3)}
    return TrainSettings(**few | (how or LAB) | {"defence": defence, "sensitive": "0.5"} | more)


def trained(chosen, tap=None):
    """Return the simulation after its rounds, its rows, and its rounds."""
    with Simulation(chosen, workers=0) as simulation:
        if tap is not None:
            simulation.attach(tap)
        steps = [simulation.step(number) for number in range(1, chosen.rounds + 1)]
    return simulation, [row for row, _ in steps], [played for _, played in steps]


def by_hand(simulation, tapped, client, state):
    """Play the tapped client again with public functions and the same streams."""
    chosen, number = simulation.settings, tapped.number
    defence = build_defence(chosen.defence)
    network = make_network(chosen, (1, 28, 28), 10, chosen_normalisation("dataset", simulation.dataset))
    module = defended(network, defence, chosen.seed, f"client {client}")
    net = FlatModel(module, is_private(module, defence, chosen))
    if net.has_private:
        net.set_private(tapped.of(client).before)
    streams = Streams.of(chosen.seed, client, number)
    streams = Streams(
        streams.hooks,
        streams.order,
        SecretStream(chosen.seed, "on_data", client),
        global_stream(chosen.seed, "layers", client, "round", number),
    )
    broadcast = Broadcast(net.shared_vector(tapped.model), tapped.lr, number, tapped.public)
    device = Device(simulation.data.client(client), client, prepared=False, state=dict(state))
    with single_thread():  # the number of threads changes the last bits
        return play_client(net, device, broadcast, defence, Protocol.of(chosen).local, streams).update


@pytest.mark.parametrize("how", [LAB, FEDAVG])
@pytest.mark.parametrize("defence", ["none", "gaussian:std=0.01", "soteria:probes=4", "entangle", "fedkl:length=8"])
def test_a_tapped_client_replayed_by_hand_sends_the_same_bits(how, defence):
    tap = Tap({1: (2, 1), 3: (3,)})
    simulation, _, rounds = trained(settings(defence, how), tap)
    assert set(tap.rounds) == {1, 3}
    for tapped in tap.rounds.values():
        played = rounds[tapped.number - 1]
        assert set(tapped.digests) == set(played.clients)
        for one in tapped.seen:
            assert one.update.sha256() == tapped.digests[one.client] == played.recovered[one.client].sha256()
            again = by_hand(simulation, tapped, one.client, {})
            assert again.sha256() == played.sent[one.client].sha256()


@pytest.mark.parametrize("defence", ["none", "gaussian:std=0.01", "mixup", "fedkl:length=8"])
def test_tapping_does_not_change_the_training(defence):
    chosen = settings(defence, LAB | {"batch_size": 4})
    plain, rows, _ = trained(chosen)
    tapped, more, _ = trained(chosen, Tap({1: (0, 1), 3: (2,)}))
    assert all(torch.equal(tensor, tapped.model[name]) for name, tensor in plain.model.items())
    assert [row["loss"] for row in rows] == [row["loss"] for row in more]


def test_the_private_images_are_those_behind_the_update():
    tap = Tap({1: (2,)})
    simulation, _, _ = trained(settings(), tap)
    one = tap.rounds[1].of(2)
    assert len(one.private) == 2
    net = make_network(simulation.settings, (1, 28, 28), 10, chosen_normalisation("dataset", simulation.dataset))
    net.load_state_dict(tap.rounds[1].model)
    loss = torch.nn.functional.cross_entropy(net(one.private.images), one.private.labels)
    names = [name for name, _ in net.named_parameters()]
    for name, gradient in zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True):
        assert torch.allclose(one.update.tensors[name], -0.1 * gradient, atol=1e-6)


def test_the_private_images_are_those_that_a_defence_drew_by_itself():
    tap = Tap({1: (0, 1, 2, 3), 3: (0, 1, 2, 3)})
    simulation, _, _ = trained(settings("dp-sgd:noise=0,clip=1000000"), tap)
    net = make_network(simulation.settings, (1, 28, 28), 10, chosen_normalisation("dataset", simulation.dataset))
    sizes = [len(one.private) for tapped in tap.rounds.values() for one in tapped.seen]
    assert len(set(sizes)) > 1
    for tapped in tap.rounds.values():
        net.load_state_dict(tapped.model)
        for one in tapped.seen:
            loss = torch.nn.functional.cross_entropy(net(one.private.images), one.private.labels, reduction="sum")
            names = [name for name, _ in net.named_parameters()]
            for name, gradient in zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True):
                assert torch.allclose(one.update.tensors[name], -0.1 * gradient / 2, atol=1e-6)  # 2 are expected


@pytest.mark.parametrize("defence", ["none", "mixup", "fedkl:length=8", "entangle"])
@pytest.mark.parametrize("how", [LAB | {"batch_size": 4}, FEDAVG])
def test_a_saved_tap_gives_the_same_observation(tmp_path, defence, how):
    chosen = settings(defence, how)
    tap = Tap({3: (1, 2)})
    simulation, _, _ = trained(chosen, tap)
    path = tmp_path / "private" / "round-3.safetensors"
    tap.rounds[3].save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    local, size = Protocol.of(chosen).local, len(tap.rounds[3].seen[0].private)
    views = [
        observation(
            each,
            (2, 1),
            simulation.net.module,
            defence=build_defence(defence),
            protocol=Protocol(local, chosen.lr),
            threat=ALL,
            num_classes=10,
        )
        for each in (tap.rounds[3], load_tapped(path))
    ]
    for seen in views:
        assert seen.num_targets == 2
        assert seen.num_examples == size
        assert seen.single_step == (how["batch_size"] == 4)
        assert not seen.network.training
        for place, client in enumerate((2, 1)):
            sent = {name: tensor[place] for name, tensor in seen.updates.items()}
            assert all(torch.equal(tensor, tap.rounds[3].of(client).update.tensors[n]) for n, tensor in sent.items())
        for name, tensor in tap.rounds[3].model.items():
            assert torch.equal(seen.network.state_dict()[name], tensor)
    assert torch.equal(views[0].labels, views[1].labels)
    assert views[0].public.keys() == views[1].public.keys()
    if views[0].single_step:
        assert torch.equal(views[0].encodings.images, views[1].encodings.images)


def test_a_broken_file_is_refused(tmp_path):
    (tmp_path / "tap.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="whole safetensors file"):
        load_tapped(tmp_path / "tap.safetensors")


def test_a_tap_needs_clients_in_this_process_and_saved_rounds():
    with (
        Simulation(settings(), workers=0) as simulation,
        pytest.raises(ConfigError, match="save_rounds must name every tapped round, got none of: 2"),
    ):
        simulation.attach(Tap({2: (0,)}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"taps": (4,), "rounds": 3}, r"tap must name rounds of the training \(1 to 3\), got 4"),
        ({"taps": (2, 2), "rounds": 3}, "each round once, got 2/2"),
        ({"aggregation": "sum"}, "aggregation"),
        ({"images": -1}, "images must be"),
    ],
)
def test_a_bad_protocol_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        Protocol(**change)


def test_the_default_taps_are_the_first_the_middle_and_the_last_round():
    assert default_taps(500) == (1, 250, 500)
