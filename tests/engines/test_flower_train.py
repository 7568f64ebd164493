"""A protected round inside somebody's own app: the bits of the simulation, and nothing private in what is sent."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.engines.flower_train import own_network, shared_arrays, train
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, DataError, DefenceError, RefusedError, RunFolderError
from gradveil.federated.client import Broadcast
from gradveil.models import create_model
from gradveil.storage import load_tensors

SETTINGS = TrainSettings(
    model="lenet-dlg", clients=3, rounds=2, partition="iid:images=12", batch_size=6, lr=0.2, seed=4, normalise="none"
)
CLIENT = 1


def own(settings, simulation):
    """Return what a user has of the same training: a network, and one client's images."""
    network = create_model(settings.model, simulation.dataset.shape, 10, settings.seed)
    batch = simulation.data.client(CLIENT)
    return network, (batch.images, batch.labels), batch.sensitive


@pytest.mark.parametrize(
    ("defence", "other"),
    [
        ("soteria:probes=4", {}),
        ("dcs2:steps=2", {"partition": "iid:images=4", "sensitive": "1.0"}),
        ("dp-sgd", {"epochs": 2}),
        ("veil:mu=8", {}),
        ("mixup", {"momentum": 0.5}),
        ("fedkl:length=8", {"model": "lenet5"}),
        ("precode", {}),
        ("gaussian+prune", {"model": "resnet20", "batch_size": 12}),
    ],
)
def test_two_rounds_equal_those_of_the_simulation_bit_for_bit(defence, other, tmp_path):
    settings = replace(SETTINGS, defence=defence, **other)
    with Simulation(settings, workers=0) as simulation:
        network, pair, marks = own(settings, simulation)
        edits = build_defence(defence).overrides("on_model")
        for number in (1, 2):
            received = dict(simulation.model)
            network.load_state_dict({**network.state_dict(), **received}, strict=not edits)
            broadcast = Broadcast(simulation.net.shared_vector(received).clone(), settings.lr, number)
            trained = train(
                network, pair, defence, lr=settings.lr, round_number=number, folder=tmp_path, client=CLIENT,
                received=received if edits else None, sensitive=marks, seed=settings.seed, clients=settings.clients,
                rounds=settings.rounds, epochs=settings.epochs, batch_size=settings.batch_size,
                momentum=settings.momentum,
            )  # fmt: skip
            devices = simulation.engine._devices
            played = devices.train(CLIENT, broadcast)
            vector = broadcast.model + devices.net.to_vector(played.update)
            wanted = devices.net.shared_tensors(vector)
            assert trained.num_examples == played.update.num_examples
            assert trained.reports == played.reports
            assert all(torch.equal(trained.arrays[name], tensor) for name, tensor in wanted.items())
            assert list(trained.arrays) == list(received if edits else network.state_dict())


@pytest.fixture
def digits():
    """Return a few real images and their labels."""
    split = load_dataset("mnist-5k").train
    return torch.from_numpy(split.images[:12]) / 255, torch.from_numpy(split.labels[:12])


@pytest.fixture
def lenet():
    return create_model("lenet5", (1, 28, 28), 10, seed=0)


def test_no_key_or_lock_is_sent_and_each_client_keeps_its_own(lenet, digits, tmp_path):
    received = shared_arrays(lenet, "fedkl:length=8")
    assert not any("key_lock" in name for name in received)
    sent = [train(lenet, digits, "fedkl:length=8", lr=0.1, received=received, folder=tmp_path, client=number)
            for number in (0, 1)]  # fmt: skip
    assert all(list(each.arrays) == list(received) for each in sent)
    kept = [load_tensors(path) for path in sorted(tmp_path.rglob("state-*.safetensors"))]
    assert len(kept) == 2
    (key,) = [name for name in kept[0] if name.endswith("key")]
    assert not torch.equal(kept[0][key], kept[1][key])
    networks = [own_network(lenet, "fedkl:length=8", received, tmp_path, number) for number in (0, 1)]
    one, other = (network(digits[0]) for network in networks)
    assert one.shape == (12, 10)
    assert not torch.allclose(one, other)
    with pytest.raises(RunFolderError, match="Train first"):
        own_network(lenet, "fedkl:length=8", received, tmp_path, client=5)


def test_the_model_is_not_changed_and_integers_go_back(digits):
    network = create_model("resnet20", (1, 28, 28), 10, seed=0)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    trained = train(network, digits, "gaussian:std=0.01", lr=0.1, batch_size=6)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert list(trained.arrays) == list(before)
    assert all(trained.arrays[name].dtype == tensor.dtype for name, tensor in before.items())
    counts = [name for name in before if name.endswith("num_batches_tracked")]
    assert counts
    assert all(torch.equal(trained.arrays[name], before[name]) for name in counts)
    assert trained.num_examples == 12


def test_draws_come_from_the_system_unless_a_test_gives_a_seed(lenet, digits):
    sent = [train(lenet, digits, "dp-sgd", lr=0.1, seed=seed).arrays["conv1.weight"]
            for seed in (None, None, 3, 3)]  # fmt: skip
    assert not torch.equal(sent[0], sent[1])
    assert torch.equal(sent[2], sent[3])


def test_a_loader_gives_the_images_and_the_size_of_batches(lenet, digits):
    loader = DataLoader(TensorDataset(*digits), batch_size=4)
    by_name = [{"img": images, "label": labels} for images, labels in loader]
    whole = train(lenet, digits, "mixup", lr=0.1, batch_size=4, seed=1)
    for some in (train(lenet, loader, "mixup", lr=0.1, seed=1),
                 train(lenet, by_name, "mixup", lr=0.1, batch_size=4, seed=1)):  # fmt: skip
        assert all(torch.equal(whole.arrays[name], tensor) for name, tensor in some.arrays.items())


@pytest.mark.parametrize(
    ("defence", "options", "error", "text"),
    [
        ("entangle", {}, ConfigError, "whose server has work to do"),
        ("pogz", {}, ConfigError, "whose server has work to do"),
        ("ca-fl", {}, ConfigError, "whose server has work to do"),
        ("veil:mu=8", {}, ConfigError, "how many rounds there are"),
        ("veil:mu=8,at=sum", {"rounds": 2}, ConfigError, "secure aggregation"),
        ("veil:mu=8", {"rounds": 2}, ConfigError, "keeps private files, or counts rounds"),
        ("fedkl", {}, ConfigError, "keeps private files"),
        ("loda", {}, ConfigError, "needs public images"),
        ("mixup", {"epoch": 2}, ConfigError, "'epoch'"),
        ("mixup", {"sensitive": torch.ones(3)}, DataError, "each of 12 images"),
        ("mixup", {"client": 3, "clients": 3}, ConfigError, "below the number of clients"),
    ],
)
def test_what_cannot_be_protected_is_refused(lenet, digits, defence, options, error, text):
    with pytest.raises(error, match=text):
        train(lenet, digits, defence, lr=0.1, **options)


def test_a_round_is_trained_once_and_a_budget_ends(lenet, digits, tmp_path):
    def veiled(number):
        return train(lenet, digits, "veil:mu=8", lr=0.1, rounds=2, round_number=number, folder=tmp_path)

    veiled(1)
    with pytest.raises(RefusedError, match="got 1 after '1'"):
        veiled(1)
    veiled(2)
    with pytest.raises(DefenceError, match="budget is spent"):
        veiled(3)
    assert (tmp_path / "0" / "answered").stat().st_mode & 0o777 == 0o600


def test_wrong_batches_are_refused(lenet, digits):
    with pytest.raises(DataError, match="batches"):
        train(lenet, [np.zeros(3)], "mixup", lr=0.1)
    with pytest.raises(DataError, match="a label each"):
        train(lenet, (digits[0][:, 0], digits[1]), "mixup", lr=0.1)
