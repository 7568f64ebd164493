import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split
from gradveil.engines.devices import make_network
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.federated.server import learning_rate, sample_clients
from gradveil.secret_stream import SecretStream
from tests.conftest import PROBES


def play(settings, workers=0, **options):
    """Return all rows (without times) and the final model."""
    with Simulation(settings, workers=workers, **options) as simulation:
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in simulation.run()]
        return rows, simulation.model


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def small_set(num_classes=3, channels=1, side=8, seed=0):
    rng = np.random.default_rng(seed)

    def split(count):
        labels = rng.integers(0, num_classes, count)
        images = rng.integers(0, 100, (count, channels, side, side)) + labels[:, None, None, None] * 50
        return Split(images.astype(np.uint8), labels.astype(np.int64))

    return Dataset("small", split(48), split(30), num_classes, (0.5,) * channels, (0.25,) * channels)


def test_fedavg_equals_a_naive_loop_over_clients():
    settings = TrainSettings(
        model="mlp:hidden=5", clients=4, sampled=3, rounds=3, epochs=2, batch_size=8, lr=0.1, momentum=0.9,
        nesterov=True, weight_decay=0.01, lr_decay=0.9, partition="dirichlet:alpha=1.0,min_images=3",
    )  # fmt: skip
    dataset = small_set()
    with Simulation(settings, workers=0, dataset=dataset) as simulation:
        rows = list(simulation.run())
        data, sizes, model = simulation.data, simulation.sizes, simulation.model
    assert len(set(sizes)) > 1
    from gradveil.models import Normalisation

    network = make_network(settings, dataset.shape, 3, Normalisation(dataset.mean, dataset.std))
    for number in range(1, 4):
        drawn = sample_clients(settings, sizes, number)
        start = copy.deepcopy(network.state_dict())
        total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
        for client in drawn:
            local = copy.deepcopy(network)
            optimiser = torch.optim.SGD(
                local.parameters(), learning_rate(settings, number), 0.9, nesterov=True, weight_decay=0.01
            )
            batch = data.client(client)
            order = SecretStream(0, "batches", client, "round", number)
            for _ in range(2):
                for indices in order.permutation(len(batch)).split(8):
                    optimiser.zero_grad()
                    F.cross_entropy(local(batch.images[indices]), batch.labels[indices]).backward()
                    optimiser.step()
            weight = sizes[client] / sum(sizes[c] for c in drawn)
            for name, tensor in local.state_dict().items():
                total[name] += weight * (tensor - start[name]).double()
        network.load_state_dict({name: start[name] + total[name].float() for name in start})
    for name, tensor in network.state_dict().items():
        assert torch.allclose(model[name], tensor, atol=1e-5), name
    network.eval()
    images = torch.from_numpy(dataset.test.images).float() / 255
    right = (network(images).argmax(1).numpy() == dataset.test.labels).mean()
    assert rows[-1]["accuracy"] == pytest.approx(right)


def test_fedsgd_of_all_clients_is_one_step_on_all_images():
    settings = TrainSettings(model="logistic", clients=4, rounds=1, algorithm="fedsgd", batch_size=0, lr=0.3)
    dataset = small_set()
    _, model = play(settings, dataset=dataset)
    from gradveil.models import Normalisation

    network = make_network(settings, dataset.shape, 3, Normalisation(dataset.mean, dataset.std))
    images = torch.from_numpy(dataset.train.images).float() / 255
    loss = F.cross_entropy(network(images), torch.from_numpy(dataset.train.labels))
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    for (name, parameter), gradient in zip(network.named_parameters(), gradients, strict=True):
        assert torch.allclose(model[name], parameter - 0.3 * gradient, atol=1e-6), name


def test_training_learns_real_digits():
    settings = TrainSettings(clients=4, rounds=10, partition="iid:images=250", lr=0.1, eval_every=9)
    rows, _ = play(settings)
    assert rows[-1]["accuracy"] > 0.8


def test_workers_give_the_same_bits_as_one_process(tiny):
    settings = replace(tiny, model="lenet5", clients=7, sampled=5, sensitive="0.2", defence=f"{PROBES}:Scale")
    here, there = play(settings), play(settings, workers=2)
    assert here[0] == there[0]
    assert same(here[1], there[1])


def test_the_seed_decides_everything(tiny):
    torch.manual_seed(1)
    first = play(tiny)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = play(tiny)
    assert torch.equal(before, torch.get_rng_state())
    assert first[0] == second[0]
    assert same(first[1], second[1])
    other = play(replace(tiny, seed=1))
    assert not same(first[1], other[1])


def test_dropout_draws_from_the_seed_too(tiny):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))

    first, second = play(tiny, network=network), play(tiny, network=network)
    assert same(first[1], second[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_on_update_and_state(tiny, workers):
    _, plain = play(replace(tiny, rounds=1))
    _, scaled = play(replace(tiny, rounds=1, defence=f"{PROBES}:Scale:factor=0.0"), workers)
    with Simulation(tiny, workers=0) as simulation:
        start = simulation.model
    assert same(scaled, start)
    assert not same(plain, start)


@pytest.mark.parametrize("workers", [0, 2])
def test_state_survives_rounds_and_is_each_clients_own(tiny, workers):
    settings = replace(tiny, rounds=3, sampled=2, save_rounds=(1, 2, 3), defence=f"{PROBES}:EchoState")
    trained = dict.fromkeys(range(4), 0)
    with Simulation(settings, workers=workers) as simulation:
        for number in range(1, 4):
            _, played = simulation.step(number)
            for client, update in played.sent.items():
                trained[client] += 1
                assert all(bool((tensor == trained[client]).all()) for tensor in update.tensors.values())
    assert max(trained.values()) > 1


def test_on_gradient(tiny):
    settings = replace(tiny, rounds=1, lr=0.25, epochs=1, batch_size=20, defence=f"{PROBES}:Constant")
    _, model = play(settings)
    with Simulation(settings, workers=0) as simulation:
        start = simulation.model
    for name, tensor in model.items():
        assert torch.allclose(tensor, start[name] - 0.25, atol=1e-6)


def test_on_data_runs_once_per_client(tiny):
    settings = replace(tiny, rounds=3, save_rounds=(3,), defence=f"{PROBES}:Blacken")
    with Simulation(settings, workers=0) as simulation:
        for number in range(1, 4):
            _, played = simulation.step(number)
    for update in played.sent.values():
        assert all(bool((tensor == 1).all()) for tensor in update.tensors.values())


def test_on_batch(tiny):
    settings = replace(tiny, rounds=1, normalise="none", defence=f"{PROBES}:BlackBatch")
    _, model = play(settings)
    with Simulation(settings, workers=0) as simulation:
        start = simulation.model
    assert torch.equal(model["linear.weight"], start["linear.weight"]), "a black image has no weight gradient"
    assert not torch.equal(model["linear.bias"], start["linear.bias"])


@pytest.mark.parametrize("workers", [0, 2])
def test_on_server_unpacks_what_on_update_packed(tiny, workers):
    plain, packed = play(tiny), play(replace(tiny, defence=f"{PROBES}:Pack"), workers)
    assert same(plain[1], packed[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_early_client_and_broadcast(tiny, workers):
    settings = replace(tiny, rounds=1, save_rounds=(1,), defence=f"{PROBES}:Guard")
    with Simulation(settings, workers=workers) as simulation:
        _, played = simulation.step(1)
    guard = played.sent[0].tensors
    assert played.clients[0] == 0
    assert len(played.sent) == 4
    assert all(same(dict(update.tensors), dict(guard)) for update in played.sent.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_private_parameters_never_leave_and_are_each_clients_own(tiny, workers, tmp_path):
    settings = replace(tiny, save_rounds=(1, 2), defence=f"{PROBES}:Lock", sensitive="0.5")
    with Simulation(settings, workers=workers, clients_folder=tmp_path) as simulation:
        for number in (1, 2):
            row, played = simulation.step(number)
            assert not any("lock" in name for update in played.sent.values() for name in update.tensors)
        assert not any("lock" in name for name in simulation.model)
        clients = simulation.client_rows(2)
    assert row["accuracy_server"] is not None
    assert row["accuracy_sensitive"] is not None
    from gradveil.storage import load_tensors

    locks = [load_tensors(tmp_path / str(c) / "private" / "state-000002.safetensors")["model.lock"] for c in range(4)]
    assert len({lock.item() for lock in locks}) == 4
    assert row["accuracy"] == pytest.approx(np.mean([entry["accuracy_test"] for entry in clients]))


def test_only_the_owner_can_read_private_files(tiny, tmp_path):
    settings = replace(tiny, defence=f"{PROBES}:Blacken")
    play(settings, clients_folder=tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {"data.safetensors", "state-000001.safetensors", "state-000002.safetensors", "has-private-state"}
    assert {path.name for path in files} == names
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in files if path.name != "has-private-state")


def test_chains_keep_their_members_apart(tiny):
    one = play(replace(tiny, defence=f"{PROBES}:Scale:factor=0.25"))
    two = play(replace(tiny, defence=f"{PROBES}:Scale+{PROBES}:Scale"))
    assert same(one[1], two[1])


@pytest.mark.parametrize("batch_norm", ["average", "local", "freeze"])
def test_batch_norm_statistics(batch_norm):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))

    settings = TrainSettings(
        clients=3, rounds=1, batch_norm=batch_norm, save_rounds=(1,), batch_size=0, lr=1e-3, normalise="none"
    )
    dataset = small_set()
    with Simulation(settings, workers=0, dataset=dataset, network=network) as simulation:
        row, played = simulation.step(1)
        model, data = simulation.model, simulation.data
    sent = {name for update in played.sent.values() for name in update.buffers}
    if batch_norm == "local":
        assert not sent
        assert "0.running_mean" not in model
        assert row["accuracy_server"] is not None
        return
    assert sent == {"0.running_mean", "0.running_var"}
    means = torch.stack([data.client(c).images.mean() for c in range(3)])
    expected = 0.1 * means.mean() if batch_norm == "average" else torch.zeros(())
    assert model["0.running_mean"].item() == pytest.approx(expected.item(), abs=1e-6)


def test_many_small_clients_run():
    settings = TrainSettings(model="logistic", clients=600, sampled=5, rounds=2, partition="iid:images=6", lr=0.1)
    rows, _ = play(settings)
    assert [row["clients"] for row in rows] == [5, 5]


def test_rounds_zero_only_evaluates(tiny):
    rows, model = play(replace(tiny, rounds=0))
    assert [row["round"] for row in rows] == [0]
    with Simulation(tiny, workers=0) as simulation:
        assert same(simulation.model, model)


def test_eval_every(tiny):
    rows, _ = play(replace(tiny, rounds=5, eval_every=3))
    assert [row["accuracy"] is not None for row in rows] == [False, False, True, False, True]
    assert json.loads(json.dumps(rows)) == rows


def test_users_own_model(tiny):
    rows, model = play(replace(tiny, model=f"{PROBES}:factory:width=4"), workers=2)
    assert model["0.weight"].shape == (4, 1, 3, 3)
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clients": 5000}, "clients"),
        ({"device": "cuda:7"}, "device"),
        ({"normalise": "0.5/0"}, "normalise"),
        ({"normalise": "imagenet"}, "normalise"),
        ({"normalise": "x"}, "normalise"),
        ({"model": "convnet", "weights": "/nowhere.safetensors"}, "nowhere"),
        ({"partition": "by-class:classes=11"}, "class"),
        ({"sensitive": "1.5"}, "sensitive"),
    ],
)
def test_bad_settings_are_found_before_training(tiny, change, match):
    with pytest.raises(ConfigError, match=match):
        Simulation(replace(tiny, **change), workers=0)


def test_live_objects_refuse_workers(tiny):
    with pytest.raises(ConfigError, match="workers"):
        Simulation(tiny, workers=2, network=lambda: nn.Linear(1, 1))


def test_a_model_with_other_classes_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"\(N, 10\)"):
        Simulation(tiny, workers=0, network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 7)))


def test_a_lone_image_before_batch_norm_is_explained():
    settings = TrainSettings(clients=2, rounds=1, partition="iid:images=5", batch_size=4)
    network = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))  # noqa: E731
    with (
        Simulation(settings, workers=0, dataset=small_set(), network=network) as simulation,
        pytest.raises(ConfigError, match="batch_size"),
    ):
        simulation.step(1)


def test_the_number_of_torch_threads_does_not_change(tiny):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Simulation(tiny, workers=0) as first, Simulation(tiny, workers=0) as second:
            assert torch.get_num_threads() == 2
            one, _ = first.step(1)
            two, _ = second.step(1)
            assert one["loss"] == two["loss"]
            assert torch.get_num_threads() == 2
        with pytest.raises(ConfigError):
            Simulation(replace(tiny, model=f"{PROBES}:no_such"), workers=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_integer_buffers_do_not_pass_from_client_to_client():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(64, 3))

    settings = TrainSettings(clients=3, rounds=2, batch_size=0, save_rounds=(1,), normalise="none", lr=1e-3)
    with Simulation(settings, workers=0, dataset=small_set(), network=network) as simulation:
        _, played = simulation.step(1)
        data = simulation.data
    for client, update in played.sent.items():  # the cumulative average of one batch is its mean
        mean = data.client(client).images.mean().item()
        assert update.buffers["0.running_mean"].item() == pytest.approx(mean, abs=1e-6)


def test_buffers_are_averaged_even_if_weights_do_not_add_up_to_one():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3))

    settings = TrainSettings(
        clients=4, sampled=1, rounds=1, weighting="unbiased", batch_size=0, normalise="none", lr=1e-3, save_rounds=(1,),
        partition="dirichlet:alpha=0.3,min_images=2",
    )  # fmt: skip
    with Simulation(settings, workers=0, dataset=small_set(), network=network) as simulation:
        _, played = simulation.step(1)
    (update,) = played.sent.values()
    assert played.model["0.running_mean"].item() == pytest.approx(update.buffers["0.running_mean"].item(), abs=1e-6)


def test_local_batch_norm_keeps_no_other_buffer(tiny):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm2d(1), nn.Linear(784, 10)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, images):
            return self.linear(self.norm(images * self.scale).flatten(1))

    with Simulation(replace(tiny, batch_norm="local"), workers=0, network=Model) as simulation:
        assert set(simulation.model) == {"norm.weight", "norm.bias", "linear.weight", "linear.bias", "scale"}


def test_large_pictures_are_scored_in_smaller_chunks():
    from gradveil.engines.devices import chunk_size

    assert chunk_size((1, 28, 28)) == chunk_size((3, 64, 64)) == 500
    assert chunk_size((3, 224, 224)) == 40
    assert chunk_size((3, 9000, 9000)) == 1


def test_only_named_clients_defend():
    settings = TrainSettings(
        model="logistic", defence="prune:fraction=0.9", defended=(1,), clients=3, rounds=1, batch_size=8, lr=0.1,
        save_rounds=(1,),
    )  # fmt: skip
    with Simulation(settings, workers=0, dataset=small_set()) as simulation:
        sent = simulation.step(1)[1].sent
    flat = {number: torch.cat([tensor.flatten() for tensor in one.tensors.values()]) for number, one in sent.items()}
    zeros = {number: float((values == 0).float().mean()) for number, values in flat.items()}
    assert zeros[1] > 0.8
    assert max(zeros[0], zeros[2]) < 0.5
    everyone = play(replace(settings, defended=(0, 1, 2)), dataset=small_set())
    assert everyone[0] == play(replace(settings, defended=()), dataset=small_set())[0]
    assert play(settings, dataset=small_set())[0] == play(settings, workers=2, dataset=small_set())[0]


@pytest.mark.parametrize("defence", ["ca-fl", "entangle"])
def test_a_defence_that_needs_all_clients_is_refused_for_some(defence):
    settings = TrainSettings(model="logistic", defence=defence, defended=(1,), clients=3, rounds=1)
    with pytest.raises(ConfigError, match=r"defended must be empty .* Drop --defended"):
        Simulation(settings, workers=0, dataset=small_set())


@pytest.mark.parametrize("defence", ["dcs2:steps=1", "dcs2:steps=1+prune"])
def test_a_defence_of_sensitive_images_is_refused_if_none_are_marked(defence):
    settings = TrainSettings(model="logistic", defence=defence, clients=3, rounds=1)
    with pytest.raises(ConfigError, match=r"marked sensitive, got none. .* --sensitive"):
        Simulation(settings, workers=0, dataset=small_set())


@pytest.mark.parametrize(
    ("defence", "text"),
    [
        ("loda", "needs public images, got none. Give --aux"),
        ("instahide:pool=public", "needs public images"),
        ("dcs2:start=aux+prune", "needs public images"),
        ("clip+mixup:k=18", "needs clients with 18 images or more, got one with 16"),
    ],
)
def test_images_that_a_defence_lacks_are_noticed_before_training(defence, text):
    settings = TrainSettings(model="logistic", defence=defence, clients=3, rounds=1, sensitive="0.5")
    with pytest.raises(ConfigError, match=text):
        Simulation(settings, workers=0, dataset=small_set())


def test_clients_that_do_not_defend_may_have_few_images():
    settings = TrainSettings(model="logistic", defence="mixup:k=7", defended=(0,), clients=7, rounds=0)
    with Simulation(settings, workers=0, dataset=small_set()) as simulation:
        assert simulation.data.sizes == [7] * 6 + [6]
    with pytest.raises(ConfigError, match="got one with 6"):
        Simulation(replace(settings, defended=()), workers=0, dataset=small_set())


def test_devices_may_have_public_images():
    settings = TrainSettings(model="logistic", defence="dcs2:steps=1,start=aux", sensitive="0.5", clients=3, rounds=1)
    with Simulation(settings, workers=0, dataset=small_set(), aux=small_set(seed=1)) as simulation:
        assert simulation.data.aux is not None
        assert len(simulation.data.aux) == 48
        assert len(list(simulation.run())) == 1
