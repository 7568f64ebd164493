"""Training with Flower's real messages through a grid in this process: the same bits, and nothing private in them."""

import importlib
import json
import runpy
import secrets
import shutil
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.engines.answer_limits import AnswerLimits
from gradveil.engines.flower import flower_training, server_app
from gradveil.engines.flower_site import client_app
from gradveil.engines.messages import read_arrays
from gradveil.engines.simulation import Simulation
from gradveil.engines.site import run_settings
from gradveil.engines.tripwire import TripwireWarning
from gradveil.errors import ConfigError, DefenceError, RunFolderError, TripwireError, WorkerError
from gradveil.models import create_model
from gradveil.storage import load_tensors
from tests.conftest import PROBES
from tests.engines.test_simulation import same, small_set

CLIENTS = 3


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Set the task that Flower expects of a process that makes messages."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def settings(tmp_path):
    """Return settings that train in no time on a file of real images."""
    digits = load_dataset("mnist-5k")
    path = tmp_path / "digits.npz"
    np.savez(
        path,
        x_train=digits.train.images[::40], y_train=digits.train.labels[::40],
        x_test=digits.test.images[::40], y_test=digits.test.labels[::40],
    )  # fmt: skip
    return TrainSettings(
        dataset=str(path), model="lenet-dlg", clients=CLIENTS, rounds=2, partition="iid:images=12", batch_size=6, lr=0.2
    )


def to_run_config(settings):
    """Return the settings as a user writes them: strings and numbers."""
    values = {key: "/".join(map(str, v)) if isinstance(v, tuple) else v for key, v in asdict(settings).items()}
    return {key.replace("_", "-"): value for key, value in values.items()}


def agreeing(settings):
    """Return the node config of a site that agrees to a run, whatever its rate and batch size."""
    return {
        "defence": settings.defence, "model": settings.model, "files": settings.dataset, "repeatable": True,
        "sensitive": settings.sensitive, "max-rate": 10.0, "min-batch": 1,
    }  # fmt: skip


class Mailbox:
    """A grid that answers what is pushed at once, by ``send_and_receive``, and keeps the answers until pulled."""

    def push_messages(self, messages):
        self.box = getattr(self, "box", {})
        numbers = []
        for message in messages:
            self.count = getattr(self, "count", 0) + 1
            numbers.append(str(self.count))
            message.metadata.__dict__["_message_id"] = numbers[-1]
            replies = self.send_and_receive([message], timeout=None)
            self.box |= dict(zip(numbers[-1:], replies, strict=False))
        return numbers

    def pull_messages(self, message_ids):
        replies = [self.box.pop(number) for number in message_ids if number in self.box]
        return replies[::-1]  # the first to reply


class LocalGrid(Mailbox):
    """A grid that hands every message to its node's ClientApp, both ways as the bytes that Flower would send."""

    def __init__(self, settings, folder, nodes=None, data=None, **node_config):
        self.app = client_app(data)
        self.run_config = to_run_config(settings)
        common = {"private-folder": str(folder), **agreeing(settings), **node_config}
        self.nodes = nodes or {100 - number: {"partition-id": number} for number in range(settings.clients)}
        self.nodes = {node: {**common, **own} for node, own in self.nodes.items()}
        self.lost, self.sent, self.came = set(), [], []

    def get_node_ids(self):
        return self.nodes

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            arrived = self.carry(message, self.sent)
            if node in self.lost:  # like the SuperLink, it does not say from whom
                reply = Message(Error(5, "Node Unavailable."), reply_to=arrived)
                reply.metadata.__dict__["_src_node_id"] = 1
            else:
                context = Context(1, node, self.nodes[node], RecordDict(), self.run_config)
                reply = self.app(arrived, context)
                assert not context.state
            replies.append(self.carry(reply, self.came))
        return replies

    def carry(self, message, way):
        way.append(message_to_proto(message).SerializeToString())
        return message_from_proto(ProtoMessage.FromString(way[-1]))


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def play(training):
    rows = without_times(training.run())
    return rows, training.model, training.client_rows(training.settings.rounds)


def both(settings, tmp_path, **options):
    """Return the same training by simulation and over Flower, and the grid."""
    with Simulation(settings, workers=0) as simulation:
        here = play(simulation)
    grid = LocalGrid(settings, tmp_path / "sites", **options)
    return here, play(flower_training(grid, settings, load_dataset(settings.dataset))), grid


@pytest.mark.parametrize(
    ("defence", "other"),
    [
        ("none", {"sampled": 2, "sensitive": "0.25", "partition": "dirichlet:alpha=1.0,min_images=4"}),
        ("prune", {"model": "resnet20", "rounds": 1}),
        ("dp-sgd", {"lr_decay": 0.5}),
        ("veil:mu=8", {"model": "patches:filters=4", "rounds": 3}),
        ("soteria:probes=4", {"rounds": 1, "partition": "iid:images=4"}),
        ("entangle", {}),
        ("ca-fl", {}),
        ("fedkl", {"model": "lenet5", "sampled": 2, "rounds": 3}),
        ("mixup", {"batch_norm": "local", "normalise": "none"}),
        (f"{PROBES}:Blacken", {"model": "logistic"}),
        (f"{PROBES}:Pack+{PROBES}:Scale", {"model": "logistic", "algorithm": "fedsgd"}),
    ],
)
def test_a_training_over_flower_equals_the_simulation_bit_for_bit(settings, tmp_path, defence, other):
    here, there, _ = both(replace(settings, defence=defence, **other), tmp_path, reports=True)
    assert without_private_scores(here[0]) == there[0]
    assert same(here[1], there[1])
    for simulated, row in zip(here[2], there[2], strict=True):
        assert row["accuracy_own"] is None
        assert row["accuracy_test"] in (simulated["accuracy_test"], None)
        assert (row["client"], row["images"]) == (simulated["client"], simulated["images"])
    assert any(row["accuracy_test"] is not None for row in there[2])


def kept_at_sites(clients):
    """Return the rows of clients without the scores of their training images, which sites do not give by default."""
    return [{**row, "accuracy_own": None} for row in clients]


def without_private_scores(rows):
    """Return rows without the score of marked training images, which sites do not give by default."""
    return [{**row, "accuracy_sensitive": None} for row in rows]


def test_a_site_keeps_the_numbers_that_hooks_report_unless_it_allows_them(settings, tmp_path):
    settings = replace(settings, defence=f"{PROBES}:Tell", model="logistic", rounds=1)
    here, there, grid = both(settings, tmp_path)
    assert here[0][0]["reports"] == {"tell_id": 1.0, "tell_round": 1.0}
    assert there[0][0]["reports"] == {}
    assert not any(b"tell_id" in message for message in grid.came)


def test_random_draws_at_a_site_are_fresh_unless_asked_to_be_repeatable(settings, tmp_path):
    settings = replace(settings, defence="gaussian", model="logistic", rounds=1, batch_size=0)
    models = [play(flower_training(LocalGrid(settings, tmp_path / str(place), repeatable=again), settings,
                                   load_dataset(settings.dataset)))[1]
              for place, again in enumerate((True, False, False))]  # fmt: skip
    assert not any(same(models[one], models[other]) for one, other in ((0, 1), (1, 2), (0, 2)))


def test_random_draws_at_a_site_cannot_be_guessed(settings, tmp_path, monkeypatch):
    settings = replace(settings, defence="fedkl:length=8", model="lenet5")
    grid = LocalGrid(settings, tmp_path / "sites", repeatable=False)
    training = flower_training(grid, settings, load_dataset(settings.dataset))
    (next((tmp_path / "sites").glob("*/1")) / "begin-anew").touch()
    bits, randbits = [], secrets.randbits
    monkeypatch.setattr(secrets, "randbits", lambda count: bits.append(count) or randbits(count))
    training.step(1)
    assert bits == [256] * 7  # a site's training and scoring, and new keys for one


def test_no_byte_of_a_key_or_lock_is_in_any_message(settings, tmp_path):
    settings = replace(settings, defence="fedkl:length=64", model="lenet5")
    _, _, grid = both(settings, tmp_path)
    states = list((tmp_path / "sites").rglob("state-*.safetensors"))
    assert len(states) == CLIENTS * 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in states)
    wire = b"".join(grid.sent + grid.came)
    hidden = [tensor for path in states for name, tensor in load_tensors(path).items() if "key_lock" in name]
    assert {secret.dim() for secret in hidden} == {1, 2}
    for secret in hidden:
        assert not any(row.numpy().tobytes()[:32] in wire for row in torch.atleast_2d(secret))
    assert b"key_lock" not in wire
    sent = message_from_proto(ProtoMessage.FromString(grid.came[CLIENTS])).content.array_records["tensors"]
    assert all(
        tensor.numpy().tobytes()[:32] in wire for tensor in sent.to_torch_state_dict().values()
    )  # the search itself works


def test_every_kind_of_tensor_survives_the_transport(settings, tmp_path):
    given = {
        "scalar": torch.tensor(0.1, dtype=torch.float64), "empty": torch.empty(0, 3), "count": torch.tensor(2**62),
        "half": torch.randn(2, 3).half(), "mask": torch.tensor([True, False]),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "odd": torch.tensor([-0.0, float("inf"), 1e-45]),
    }  # fmt: skip
    grid = LocalGrid(settings, tmp_path)
    for records in (given, {}):
        message = Message(RecordDict({"a": ArrayRecord(records)}), dst_node_id=7, message_type="train")
        back = read_arrays(grid.carry(message, []).content, "a", records, 0)
        assert list(back) == list(records)
        for name, tensor in records.items():
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(back[name], tensor)
            assert torch.equal(torch.signbit(back[name]), torch.signbit(tensor))


def test_the_run_folder_holds_the_rows_of_the_simulation_and_can_be_resumed(settings, tmp_path):
    settings = replace(settings, model="logistic", save_rounds=(1,))
    out = tmp_path / "out"
    grid = LocalGrid(settings, tmp_path / "sites")
    run = Context(1, 1, {}, RecordDict(), {**grid.run_config, "out": str(out), "data-root": ""})
    grid.run_config["out"] = "not of the sites' concern"
    server_app()(grid, run)
    with Simulation(settings, workers=0) as simulation:
        here = play(simulation)
    rows, clients = ([json.loads(line) for line in (out / name).read_text().splitlines()]
                     for name in ("rows.jsonl", "clients.jsonl"))  # fmt: skip
    assert (without_times(rows), clients) == (here[0], kept_at_sites(here[2]))
    assert same(load_tensors(out / "model.safetensors"), here[1])
    saved = sorted(path.name for path in (out / "rounds" / "000001").glob("update-*"))
    assert saved == [f"update-{number}.{kind}" for number in range(CLIENTS) for kind in ("safetensors", "toml")]

    longer = replace(settings, rounds=3)
    grid = LocalGrid(longer, tmp_path / "sites")
    server_app()(grid, Context(2, 1, {}, RecordDict(), {**grid.run_config, "out": str(out)}))
    with Simulation(longer, workers=0) as simulation:
        assert same(load_tensors(out / "model.safetensors"), play(simulation)[1])
    trained = [message_from_proto(ProtoMessage.FromString(each)).metadata.message_type for each in grid.sent]
    assert trained.count("train") == CLIENTS  # only round 3


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 2, 2)])
def test_every_client_number_must_occur_exactly_once(settings, tmp_path, numbers):
    nodes = {10 + place: {"partition-id": number} for place, number in enumerate(numbers)}
    with pytest.raises(ConfigError, match=r"must be 0\.\.2, each once, got [12] from nodes 11 and 12\."):
        flower_training(LocalGrid(settings, tmp_path, nodes), settings, load_dataset(settings.dataset))


@pytest.mark.parametrize("own", [{}, {"partition-id": 3}, {"partition-id": "one"}])
def test_a_node_with_an_invalid_number_is_refused(settings, tmp_path, own):
    nodes = {10: {"partition-id": 0}, 11: {"partition-id": 1}, 12: own}
    with pytest.raises(WorkerError, match=r"got 2\. .* Node 12 sent nothing\. Its (partition-id must|own policy is)"):
        flower_training(LocalGrid(settings, tmp_path, nodes), settings, load_dataset(settings.dataset), wait=0)


def test_missing_nodes_end_in_an_error_after_the_waiting_time(settings, tmp_path):
    grid = LocalGrid(settings, tmp_path, {10: {"partition-id": 0}})
    with pytest.raises(WorkerError, match="All 3 nodes must be there within 0 seconds, got 1"):
        flower_training(grid, settings, load_dataset(settings.dataset), wait=0)


def test_a_node_that_leaves_is_named(settings, tmp_path):
    settings = replace(settings, model="logistic")
    grid = LocalGrid(settings, tmp_path)
    limits = AnswerLimits(wait_seconds=0, round_seconds=0.001)
    training = flower_training(grid, settings, load_dataset(settings.dataset), limits)
    training.step(1)
    grid.lost = {99}
    with pytest.raises(WorkerError, match=r"Client 1 must answer, got: Node Unavailable\."):
        training.step(2)
    grid.send_and_receive = lambda messages, timeout: []
    with pytest.raises(WorkerError, match=r"Client \d must answer, got: nothing came within 0.001 seconds"):
        training.step(2)


OWN = """
from gradveil.defences import Defence
from gradveil.errors import DefenceError
class Fails(Defence):
    def on_update(self, update, client):
        if client.id == 2 and client.round == 2:
            raise {error}
        return update
"""


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            "DefenceError('Not 0.25.')",
            DefenceError,
            r"Client 2 sent nothing\. Its defence could not protect the update",
        ),
        ("KeyError('pixel 0.25')", WorkerError, r"Client 2 sent nothing\. It failed unexpectedly\."),
    ],
)
def test_an_error_at_a_site_names_the_client_and_nothing_is_sent(settings, tmp_path, raised, error, message):
    (tmp_path / "own.py").write_text(OWN.format(error=raised))
    settings = replace(settings, model="logistic", defence=f"{tmp_path / 'own.py'}:Fails")
    grid = LocalGrid(settings, tmp_path / "sites")
    training = flower_training(grid, settings, load_dataset(settings.dataset))
    training.step(1)
    before = len(grid.came)
    with pytest.raises(error, match=message):
        training.step(2)
    replies = [message_from_proto(ProtoMessage.FromString(each)) for each in grid.came[before:]]
    (failed,) = [reply.content for reply in replies if reply.metadata.src_node_id == 98]
    assert not failed.array_records
    assert b"0.25" not in b"".join(grid.came[before:])


def test_a_lost_key_stops_the_client(settings, tmp_path):
    settings = replace(settings, defence="fedkl:length=8", model="lenet5")
    grid = LocalGrid(settings, tmp_path / "sites")
    training = flower_training(grid, settings, load_dataset(settings.dataset))
    training.step(1)
    for state in (tmp_path / "sites").glob("*/1/private/state-*"):
        state.unlink()
    with pytest.raises(RunFolderError, match=r"Client 1 sent nothing\. Its private state, .* is lost"):
        training.step(2)


def test_a_site_that_lost_all_files_stops_until_told_to_begin_anew(settings, tmp_path):
    settings = replace(settings, defence="fedkl:length=8", model="lenet5", rounds=3)
    training = flower_training(LocalGrid(settings, tmp_path / "sites"), settings, load_dataset(settings.dataset))
    training.step(1)
    (site,) = (tmp_path / "sites").glob("*/1")
    (before,) = (load_tensors(path) for path in site.glob("private/state-*"))
    shutil.rmtree(site)
    for again in (lambda: training.step(2), lambda: training.client_rows(1)):
        with pytest.raises(RunFolderError, match=r"Client 1 sent nothing\. Its private state, .* is lost"):
            again()
    (site / "begin-anew").touch()
    training.step(2)
    (after,) = (load_tensors(path) for path in site.glob("private/state-*"))
    (key,) = (name for name in after if name.endswith(".key"))
    assert not torch.equal(after[key], before[key])
    training.step(3)
    for state in site.glob("private/state-*3.safetensors"):
        state.unlink()
    with pytest.raises(RunFolderError, match=r"Client 1 sent nothing\. Its private state, .* is lost"):
        training.client_rows(3)


def test_a_site_that_has_not_trained_yet_needs_no_key(settings, tmp_path):
    settings = replace(settings, defence="fedkl:length=8", model="lenet5", sampled=1, rounds=1)
    training = flower_training(LocalGrid(settings, tmp_path / "sites"), settings, load_dataset(settings.dataset))
    training.step(1)
    assert len(list((tmp_path / "sites").rglob("state-*"))) == 1
    assert len(training.client_rows(1)) == CLIENTS


def test_new_images_with_a_request_to_begin_anew_are_accepted(settings, own_sets):
    settings = replace(settings, defence=f"{PROBES}:Blacken", model="logistic")
    folder = own_sets / "sites"

    def site_with(number):
        nodes = {7 + n: {"partition-id": n, "data": str(own_sets / f"own-{number}.npz")} for n in range(CLIENTS)}
        return flower_training(LocalGrid(settings, folder, nodes), settings, load_dataset(settings.dataset))

    site_with(0).step(1)
    sites = list(folder.glob("*/*"))
    for site in sites:
        shutil.rmtree(site)
        site.mkdir()
        (site / "begin-anew").touch()
    site_with(1).step(2)
    assert not any((site / "begin-anew").exists() for site in sites)  # or every round would begin anew


def with_a_trap(settings, folder, **node_config):
    """Return a training whose server sends rows that measure brightness, and biases that sort by it."""
    settings = replace(settings, model="mlp:hidden=64", partition="iid:images=24")
    training = flower_training(LocalGrid(settings, folder, **node_config), settings, load_dataset(settings.dataset))
    name = next(name for name, tensor in training.model.items() if tensor.shape == (64, 784))
    training.model[name] = torch.full((64, 784), 1 / 784)
    training.model[name.replace("weight", "bias")] = -torch.linspace(-0.5, 1.0, 64)
    return training


def test_each_site_configures_its_own_tripwire(settings, tmp_path):
    with pytest.raises(TripwireError, match=r"Client \d sent nothing\. It found a trap in the model that it received"):
        with_a_trap(settings, tmp_path, tripwire="refuse").step(1)


def test_warnings_of_the_sites_reach_the_server(settings, tmp_path):
    with pytest.warns(TripwireWarning, match=r"The model that client \d received in round 1 must contain no traps"):
        row, _ = with_a_trap(replace(settings, tripwire="warn"), tmp_path).step(1)
    assert row["tripwire_warnings"] == CLIENTS


@pytest.mark.parametrize(
    ("run", "agreed", "fine"),
    [
        ({"defence": "prune:fraction=0.9"}, "prune:fraction=0.9", True),
        ({"defence": "prune:fraction=0.10"}, "prune:fraction=0.1", False),  # compared as text
        ({"defence": "prune:fraction=0.10"}, "any", True),
        ({"defence": "none"}, "prune:fraction=0.9", False),
        ({"defence": "prune:fraction=0.1"}, "prune:fraction=0.9", False),
        ({"defence": "prune:fraction=0.9", "defended": (0, 2)}, "prune:fraction=0.9", False),
    ],
)
def test_a_site_trains_only_under_the_agreed_defence(settings, tmp_path, run, agreed, fine):
    settings = replace(settings, model="logistic", **run)
    nodes = {9: {"partition-id": 0}, 8: {"partition-id": 1, "defence": agreed}, 7: {"partition-id": 2}}
    grid = LocalGrid(settings, tmp_path, nodes)
    if fine:
        flower_training(grid, settings, load_dataset(settings.dataset)).step(1)
    else:
        with pytest.raises(ConfigError, match=r"Node 8 sent nothing\. The run's defence must be the one"):
            flower_training(grid, settings, load_dataset(settings.dataset))


def test_a_site_refuses_a_trunk_that_is_not_its_own(settings, tmp_path):
    settings = replace(settings, model="patches:filters=4", rounds=1)
    training = flower_training(LocalGrid(settings, tmp_path), settings, load_dataset(settings.dataset))
    other = create_model("patches:filters=4", (1, 28, 28), 10, 0, public=torch.rand(9, 1, 28, 28))
    training.engine.pin(other.trunk)
    with pytest.raises(ConfigError, match="The frozen part of its model is not the server's"):
        training.step(1)


@pytest.fixture
def public(tmp_path):
    """Return a file of public images, in more classes than the digits have."""
    path = tmp_path / "public.npz"
    pictures = np.random.default_rng(0).integers(0, 256, (14, 1, 28, 28), dtype=np.uint8)
    np.savez(path, x_train=pictures, y_train=np.arange(14), x_test=pictures[:2], y_test=np.arange(2))
    return str(path)


def test_a_trunk_of_public_images_is_built_at_server_and_sites_alike(settings, tmp_path, public):
    settings = replace(settings, model="patches:filters=4", defence="veil:mu=8", aux=public, rounds=2)
    with Simulation(settings, workers=0) as simulation:
        here = play(simulation)
    grid = LocalGrid(settings, tmp_path / "sites", files=f"{settings.dataset},{public}", data=None)
    there = play(flower_training(grid, settings, load_dataset(settings.dataset), aux=load_dataset(public)))
    assert same(here[1], there[1])
    own = LocalGrid(
        settings, tmp_path / "own", files=public, data=lambda context: load_dataset(settings.dataset)
    )  # a site with its own images has the same trunk
    flower_training(own, settings, load_dataset(settings.dataset), aux=load_dataset(public)).step(1)


def test_a_site_that_does_not_allow_the_public_images_says_so(settings, tmp_path, public):
    settings = replace(settings, model="patches:filters=4", aux=public, rounds=1)
    with pytest.raises(ConfigError, match="model needs public images; the run's are not among the files"):
        flower_training(
            LocalGrid(settings, tmp_path), settings, load_dataset(settings.dataset), aux=load_dataset(public)
        )


def test_other_public_images_at_a_site_are_another_trunk(settings, tmp_path, public):
    settings = replace(settings, model="patches:filters=4", aux=public, rounds=1)
    grid = LocalGrid(settings, tmp_path, files=f"{settings.dataset},{public}")
    training = flower_training(grid, settings, load_dataset(settings.dataset), aux=load_dataset(public))
    kept = dict(np.load(public))
    np.savez(public, **kept | {"x_train": 255 - kept["x_train"]})
    with pytest.raises(ConfigError, match="The frozen part of its model is not the server's"):
        training.step(1)


def test_a_site_refuses_noise_that_is_shared_if_updates_travel_in_the_open(settings, tmp_path):
    settings = replace(settings, model="patches:filters=4", defence="veil:at=sum", aggregation="secure", sum_bits=22)
    grid = LocalGrid(settings, tmp_path)
    grid.run_config |= {"aggregation": "none", "sum-bits": 0}  # a server that lies to its sites
    with pytest.raises(ConfigError, match="The run's settings can't be used there"):
        flower_training(grid, settings, load_dataset(settings.dataset))


@pytest.mark.parametrize(("agreed", "fine"), [("logistic", True), ("mlp", False)])
def test_a_site_trains_only_the_agreed_network(settings, tmp_path, agreed, fine):
    settings = replace(settings, model="logistic")
    nodes = {9: {"partition-id": 0}, 8: {"partition-id": 1, "model": agreed}, 7: {"partition-id": 2}}
    grid = LocalGrid(settings, tmp_path, nodes)
    if fine:
        flower_training(grid, settings, load_dataset(settings.dataset)).step(1)
    else:
        with pytest.raises(ConfigError, match=r"Node 8 sent nothing\. The run's model must be the one"):
            flower_training(grid, settings, load_dataset(settings.dataset))


@pytest.fixture
def own_sets(settings, tmp_path):
    """Write the images that the simulation deals to each client to one file per site."""
    with Simulation(settings, workers=0) as simulation:
        data, test = simulation.data, simulation.dataset.test
    for number in range(CLIENTS):
        mine = data.indices[data.offsets[number] : data.offsets[number + 1]]
        arrays = {"x_train": data.train.images[mine], "y_train": data.train.labels[mine]}
        np.savez(tmp_path / f"own-{number}.npz", **arrays, x_test=test.images, y_test=test.labels)
    return tmp_path


@pytest.mark.parametrize("way", ["function", "node config"])
def test_a_site_trains_on_its_own_images(settings, own_sets, way):
    settings = replace(settings, algorithm="fedsgd", batch_size=0, model="logistic")
    with Simulation(settings, workers=0) as simulation:
        rows, model, clients = play(simulation)
    if way == "function":
        grid = LocalGrid(
            settings,
            own_sets / "sites",
            data=lambda context: load_dataset(str(own_sets / f"own-{context.node_config['partition-id']}.npz")),
        )
    else:
        nodes = {7 + n: {"partition-id": n, "data": str(own_sets / f"own-{n}.npz")} for n in range(CLIENTS)}
        grid = LocalGrid(settings, own_sets / "sites", nodes)
    there = play(flower_training(grid, settings, load_dataset(settings.dataset)))
    assert all(torch.allclose(model[name], there[1][name], atol=1e-6) for name in model)
    assert (rows[-1]["accuracy"], kept_at_sites(clients)) == (there[0][-1]["accuracy"], there[2])


def test_a_site_refuses_to_change_its_images_midway(settings, own_sets):
    settings = replace(settings, model="logistic")
    for number in (0, 1):
        nodes = {7 + n: {"partition-id": n, "data": str(own_sets / f"own-{number}.npz")} for n in range(CLIENTS)}
        grid = LocalGrid(settings, own_sets / "sites", nodes)
        if number == 0:
            flower_training(grid, settings, load_dataset(settings.dataset))
    with pytest.raises(RunFolderError, match=r"Node 7 sent nothing\. Its images are not those"):
        flower_training(grid, settings, load_dataset(settings.dataset))


def test_images_of_another_shape_are_refused(settings, tmp_path):
    settings = replace(settings, model="logistic")
    grid = LocalGrid(settings, tmp_path, data=lambda context: small_set())
    with pytest.raises(ConfigError, match=r"Client \d sent nothing\. A site's images must have the run's shape"):
        flower_training(grid, settings, load_dataset(settings.dataset)).step(1)


def test_sensitive_images_are_counted_and_scored_at_their_site_if_it_allows_that(settings, tmp_path):
    settings = replace(settings, model="logistic", rounds=1, sensitive="1:0/3")
    (row,), _, clients = play(
        flower_training(LocalGrid(settings, tmp_path / "a"), settings, load_dataset(settings.dataset))
    )
    assert row["accuracy_sensitive"] is None
    grid = LocalGrid(settings, tmp_path / "b", **{"training-scores": 10.0, "training-budget": 99.0})
    (row,), _, clients = play(flower_training(grid, settings, load_dataset(settings.dataset)))
    assert row["accuracy_sensitive"] in (0, 0.5, 1)  # client 1's two; the others have none
    assert all(0 <= client["accuracy_own"] <= 1 for client in clients)


def test_classes_are_counted_on_test_images_only(settings, tmp_path):
    """How many of a site's private images are of which class stays at the site."""
    settings = replace(settings, defence="fedkl:length=8", model="lenet5", rounds=1, sensitive="1:0/3")
    grid = LocalGrid(settings, tmp_path)
    data = load_dataset(settings.dataset)
    (row,), _, _ = play(flower_training(grid, settings, data))
    assert row["accuracy_majority"] == np.bincount(data.test.labels).max() / len(data.test)
    contents = [message_from_proto(ProtoMessage.FromString(sent)).content.config_records for sent in grid.came]
    scores = [content["facts"] for content in contents if "class-count" in content["facts"]]
    assert any(facts["classes"] for facts in scores)
    for facts in scores:
        known = [count for count, classes in zip(facts["count"], facts["classes"], strict=True) if classes]
        assert set(known) <= {len(data.test)}
        assert sum(facts["class-count"]) == sum(known)


def test_a_refusal_of_a_site_whose_policy_file_has_its_number_ends_the_waiting(settings, tmp_path):
    policy = tmp_path / "site.toml"
    policy.write_text('partition-id = 1\ndefence = "dp-sgd"\n')
    grid = LocalGrid(settings, tmp_path / "sites")
    grid.nodes[99] = {"policy": str(policy), "private-folder": str(tmp_path / "sites")}
    with pytest.raises(ConfigError, match=r"Node 99 sent nothing\. The run's defence must be the one"):
        flower_training(grid, settings, load_dataset(settings.dataset))


def test_a_private_folder_is_required(settings, tmp_path):
    grid = LocalGrid(settings, tmp_path, **{"private-folder": ""})
    with pytest.raises(ConfigError, match=r"Node \d+ sent nothing\. Its own policy is incomplete"):
        flower_training(grid, settings, load_dataset(settings.dataset))


def test_without_flower_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    for module in ("flower", "flower_engine", "flower_site", "messages", "nodes", "site"):
        monkeypatch.delitem(sys.modules, f"gradveil.engines.{module}")
    with pytest.raises(ImportError, match=r"pip install 'gradveil\[flower\]'"):
        importlib.import_module("gradveil.engines.flower")


def test_the_example_is_an_app_with_settings_of_a_training():
    folder = Path(__file__).parents[2] / "examples" / "flower"
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    context = Context(1, 1, {}, RecordDict(), app["config"])
    assert run_settings(context).clients == 2
    for name, kind in (("serverapp", ServerApp), ("clientapp", ClientApp)):
        file, _, attribute = app["components"][name].partition(":")
        assert isinstance(runpy.run_path(folder / f"{file}.py")[attribute], kind)
