"""Secure sums between the server and sites: the simulation's bits, nothing single in any message, dropouts survived."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from gradveil.config import TrainSettings
from gradveil.engines import flower_engine, nodes
from gradveil.engines.answer_limits import AnswerLimits
from gradveil.engines.flower import flower_training, server_app
from gradveil.engines.sum_masks import (
    Member,
    Roster,
    mask,
    new_secret,
    pair_mask,
    public_bytes,
    public_key,
    shared_key,
    word_bits,
)
from gradveil.errors import ConfigError, GradveilError, MessageError
from gradveil.federated.secure_sum import Quantiser, secure_sum
from gradveil.storage import load_tensors
from gradveil.types import Update
from tests.engines.fake_sites import Clock
from tests.engines.test_flower import _a_task  # noqa: F401 - a fixture
from tests.engines.test_simulation import same
from tests.security.sites import private_set
from tests.security.test_server_checks_answers import Federation

CLIENTS = 4
RUN = TrainSettings(
    dataset="mnist-5k", model="logistic", clients=CLIENTS, rounds=3, lr=0.05, normalise="none", batch_size=0,
    aggregation="secure", sum_bits=20, sum_range=1.0,
)  # fmt: skip
STEPS = ("query.keys", "query.shares", "train", "query.unmask")


class Sites(Federation):
    """Sites in this process that can be lost in a step; every message is kept as bytes."""

    def __init__(self, folder, run=RUN, **policy):
        super().__init__(folder, run, **policy)
        self.folder, self.lost, self.wire, self.asked = folder, {}, [], []
        self.swap = lambda kind, node, content: content
        self.heard = lambda kind, client, content: None

    def send_and_receive(self, messages, *, timeout=None):
        (message,) = messages
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        self.asked.append((kind, node - 10))
        self.wire.append(content_bytes(message.content))
        message.content = self.swap(kind, node - 10, message.content)
        if node - 10 in self.lost.get(kind, ()):
            return []
        reply = self._reply(message)
        self.wire.append(content_bytes(reply.content))
        self.heard(kind, node - 10, reply.content)
        return [reply]


def content_bytes(content):
    return recorddict_to_proto(content).SerializeToString()


def training_of(grid, monkeypatch, run=RUN, **limits):
    monkeypatch.setattr(nodes, "time", Clock())
    limits = {"round_seconds": 30, "wait_seconds": 30} | limits
    return flower_training(grid, run, private_set(seed=9), AnswerLimits(**limits))


def plain_updates(folder, number, run):
    """Return what each client would have sent in the open in the first round."""
    grid = Federation(folder, replace(run, aggregation="none", sum_bits=0, save_rounds=(number,), bad_answers="drop"))
    open_run = replace(run, aggregation="none", sum_bits=0, save_rounds=(number,))
    training = flower_training(grid, open_run, private_set(seed=9))
    _, played = training.step(number)
    return played


def wanted(played, run, left):
    """Return the model that the simulation's secure mode would make of some clients' updates."""
    sent = {client: played.sent[client] for client in played.clients if client in left}
    weights = [played.weights[client] for client in sent]
    found = secure_sum(list(sent.values()), weights, Quantiser(run.sum_bits, run.sum_range)).total
    factor = 1.0 if len(left) == run.clients else sum(played.weights.values()) / sum(weights)
    return {
        name: (tensor.double() + found.tensors[name] * (factor if factor != 1 else 1)).float()
        for name, tensor in played.received.items()
    }


@pytest.mark.parametrize("bits", [4, 20, 32])
def test_the_sum_equals_the_simulations_bit_for_bit(tmp_path, monkeypatch, bits):
    run = replace(RUN, sum_bits=bits, sum_range=0.25)
    training = training_of(Sites(tmp_path / "a", run), monkeypatch, run)
    row, played = training.step(1)
    assert sorted(played.clients) == [0, 1, 2, 3]
    assert "sum_error" not in row
    assert played.sent == played.recovered == {}
    single = plain_updates(tmp_path / "b", 1, run)
    assert same(training.model, wanted(single, run, range(CLIENTS)))
    later, _ = training.step(2)
    assert later["round"] == 2


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("who", [{1}, {0, 3}])
def test_clients_that_drop_out_in_a_step_are_left_out(tmp_path, monkeypatch, step, who):
    run = replace(RUN, clients=5)
    grid = Sites(tmp_path / "a", run)
    training = training_of(grid, monkeypatch, run, min_clients=3)
    grid.lost = {step: who}
    row, played = training.step(1)
    left = set(range(5)) if step == "query.unmask" else set(range(5)) - who  # its update is in the sum already
    assert set(played.clients) == left
    assert {int(reason.split()[1]) for reason in row.get("dropped", [])} == set(range(5)) - left
    assert same(training.model, wanted(plain_updates(tmp_path / "b", 1, run), run, left))
    grid.lost = {}
    assert set(training.step(2)[1].clients) == set(range(5))


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_nothing_is_opened_and_the_reason_names_the_lost(tmp_path, monkeypatch, step):
    grid = Sites(tmp_path)
    training = training_of(grid, monkeypatch, min_clients=1)  # 3 of 4 are needed: more than half
    grid.lost = {step: {0, 2}}
    with pytest.raises(MessageError, match=rf"needs 3 of 4 clients in every step, got 2 \({step}\)\. No update.*ient "):
        training.step(1)
    if step != "query.unmask":
        assert not any(kind == "query.unmask" for kind, _ in grid.asked)


def test_without_min_clients_everybody_is_needed(tmp_path, monkeypatch):
    grid = Sites(tmp_path)
    training = training_of(grid, monkeypatch)
    grid.lost = {"train": {2}}
    with pytest.raises(MessageError, match=r"needs 4 of 4 clients in every step, got 3 \(train\)"):
        training.step(1)


def pieces(update, weight, run):
    """Return what would betray an update: its floats, weighted ones, and whole numbers of each width."""
    how, tensors = Quantiser(run.sum_bits, run.sum_range), [*update.tensors.values()]
    for tensor in tensors:
        codes = how.encode(tensor.double() * weight)
        for values in (tensor, tensor.double(), tensor.double() * weight, (tensor.double() * weight).float(),
                       codes, codes.int()):  # fmt: skip
            yield values.contiguous().numpy().tobytes()[:32]


def test_no_byte_of_a_single_update_is_in_any_message_or_in_the_servers_folder(tmp_path, monkeypatch):
    run = replace(RUN, save_rounds=(1, 2))
    grid, out = Sites(tmp_path / "sites", run), tmp_path / "out"
    monkeypatch.setattr("gradveil.engines.flower.load_dataset", lambda *_: private_set(seed=9))
    server_app()(grid, Context(1, 1, {}, RecordDict(), {**grid.run_config, "out": str(out)}))
    seen = b"".join(grid.wire) + b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    updates = list((tmp_path / "sites").rglob("answer.safetensors"))
    assert len(updates) == CLIENTS
    for path in updates:
        kept = load_tensors(path)
        update = Update({name.removeprefix("tensors."): tensor for name, tensor in kept.items()}, 12)
        assert not any(piece in seen for piece in pieces(update, 1 / CLIENTS, run))
    for path in (tmp_path / "sites").rglob("sum.json"):
        part = json.loads(path.read_text())
        assert path.stat().st_mode & 0o777 == 0o600
        for secret in (part["mask_secret"], part["share_secret"]):
            assert bytes.fromhex(secret) not in seen
            assert secret.encode() not in seen
    saved = load_tensors(out / "rounds" / "000002" / "update-mean.safetensors")
    assert not list(out.rglob("update-[0-9]*"))
    assert saved["linear.weight"].numpy().tobytes()[:32] in seen  # the search itself works


def test_without_its_own_mask_an_update_is_still_hidden(tmp_path, monkeypatch):
    """The server learns the seeds of all survivors, but not the masks between them, which cancel in the sum only."""
    grid, arrived = Sites(tmp_path), {}

    def change(client, content):
        arrived[client] = content["masked"].to_torch_state_dict()["masked"].numpy().view(np.uint32).astype(np.uint64)

    grid.heard = lambda kind, client, content: change(client, content) if kind == "train" else None
    training_of(grid, monkeypatch).step(1)
    left, codes = {}, {}
    for client in range(CLIENTS):
        (folder,) = tmp_path.glob(f"*/{client}/private")
        part, kept = json.loads((folder / "sum.json").read_text()), load_tensors(folder / "answer.safetensors")
        own = mask(bytes.fromhex(part["seed"]), part["request"], len(arrived[client]))
        left[client] = (arrived[client] - own).astype(np.uint32)
        scaled = [kept[name].double() * part["weight"] for name in sorted(kept)]
        codes[client] = torch.cat([Quantiser(20, 1.0).encode(one).reshape(-1) for one in scaled]).numpy()
        high = (left[client] >> np.uint32(21)).astype(bool)  # codes are below; uniform numbers are not
        assert high.mean() > 0.95
        assert not np.array_equal(left[client], codes[client])
    total = sum(each.astype(np.uint64) for each in left.values()) & np.uint64(0xFFFFFFFF)
    assert np.array_equal(total, sum(codes.values()))


def test_many_rounds_with_losses_in_any_step(tmp_path, monkeypatch):
    rng, run = np.random.default_rng(7), replace(RUN, clients=5, rounds=8)
    grid = Sites(tmp_path, run)
    training = training_of(grid, monkeypatch, run, min_clients=3)
    for number in range(1, 9):
        lost = {int(client): STEPS[rng.integers(4)] for client in rng.permutation(5)[: rng.integers(3)]}
        grid.lost = {step: {client for client, when in lost.items() if when == step} for step in STEPS}
        row, played = training.step(number)
        gone = {client for client, when in lost.items() if when != "query.unmask"}
        assert set(played.clients) == set(range(5)) - gone
        assert len(row.get("dropped", [])) == len(gone)


def test_a_client_without_weight_is_left_out_before_sites_could_refuse_the_sum(tmp_path, monkeypatch):
    """A client that was not there when the run began has no weight until it has said how many images it has."""
    grid = Sites(tmp_path)
    training = training_of(grid, monkeypatch, min_clients=3)
    with monkeypatch.context() as patch:
        patch.setattr(flower_engine, "round_weights", lambda *_: {0: 0.3, 1: 0.3, 2: 0.0, 3: 0.4})
        row, played = training.step(1)
    assert sorted(played.clients) == [0, 1, 3]
    assert row["dropped"] == ["Client 2 was not there before this round."]
    assert sorted(training.step(2)[1].clients) == [0, 1, 2, 3]


class TestOneSite:
    """What a site answers to a server that is not honest."""

    @pytest.fixture
    def grid(self, tmp_path, monkeypatch):
        """Return sites after an honest round, whose last messages are kept."""
        grid = Sites(tmp_path)
        grid.kept = {}
        grid.swap = lambda kind, client, content: grid.kept.setdefault((kind, client), content)
        training = training_of(grid, monkeypatch)
        training.step(1)
        grid.swap = lambda kind, client, content: content
        return grid

    def ask(self, grid, kind, client, **changes):
        """Send a message of the honest round again, with other values in it; return the code of the refusal."""
        content = RecordDict(dict(grid.kept[kind, client]))
        values = {**content["sum"], **changes}
        content["sum"] = ConfigRecord({key: value for key, value in values.items() if value is not None})
        message = Message(content, dst_node_id=10 + client, message_type=kind)
        answer = grid._reply(message).content
        return answer.config_records["error"]["code"] if "error" in answer.config_records else answer

    def fresh(self, tmp_path, monkeypatch, until, **policy):
        """Return sites that have come to the step before ``until`` in their first round."""
        grid = Sites(tmp_path / "fresh", **policy)
        grid.kept = {}
        grid.swap = lambda kind, client, content: grid.kept.setdefault((kind, client), content)
        training = training_of(grid, monkeypatch, min_clients=3)
        grid.lost = {until: set(range(CLIENTS))}
        with pytest.raises(MessageError):
            training.step(1)
        grid.lost = {}
        return grid

    def test_the_same_message_gets_the_same_answer(self, grid):
        for kind in STEPS:
            one, two = (self.ask(grid, kind, 1) for _ in range(2))
            assert content_bytes(one) == content_bytes(two)

    @pytest.mark.parametrize(
        ("alive", "dead"),
        [([0, 1, 2], [3]), ([1, 2, 3], [0]), ([0, 1, 2, 3], [1]), ([0, 1], [2, 3])],
    )
    def test_a_sum_is_opened_once_per_round(self, grid, alive, dead):
        assert self.ask(grid, "query.unmask", 1, alive=alive, dead=dead) == "opened"
        assert self.ask(grid, "query.keys", 1, attempt=2) == "opened"

    @pytest.mark.parametrize(
        ("alive", "dead"),
        [
            ([0, 1, 2, 3], [1]),  # both the seed and the key of client 1
            ([0, 1, 2], [2, 3]),
            ([0, 1], [2, 3]),  # below the threshold
            ([0, 2, 3], [1]),  # without the site itself
            ([0, 1, 2], []),
            ([0, 1, 2, 3, 4], []),
            ([0, 1, 1, 3], [2]),
        ],
    )
    def test_survivors_must_be_possible(self, tmp_path, monkeypatch, alive, dead):
        grid = self.fresh(tmp_path, monkeypatch, "query.unmask")
        grid.kept["query.unmask", 1] = RecordDict({"sum": grid.kept["train", 1]["sum"]})
        assert self.ask(grid, "query.unmask", 1, alive=alive, dead=dead) == "sum"
        answer = self.ask(grid, "query.unmask", 1, alive=[0, 1, 2], dead=[3])
        assert answer["facts"]["of"] == [0, 1, 2, 3]
        assert self.ask(grid, "query.unmask", 1, alive=[0, 1, 2, 3], dead=[]) == "opened"

    @pytest.mark.parametrize(
        "change",
        [
            lambda sum_: {"threshold": 2},
            lambda sum_: {"threshold": 5},
            lambda sum_: {"numbers": [0, 1, 2, 2]},
            lambda sum_: {"numbers": [0, 7, 2, 3]},
            lambda sum_: {"numbers": [0, 2, 3, 1]},  # its keys under another number
            lambda sum_: {"weights": [0.25, 0.25, float("nan"), 0.25]},
            lambda sum_: {"weights": [0.0, 0.25, 0.0, -1.0]},
            lambda sum_: {"weights": [0.0, 1.0, 0.0, 0.0]},  # the sum would be the update of client 1
            lambda sum_: {"weights": [0.0, 0.0, 0.0, 0.0]},
            lambda sum_: {"weights": [0.3, 0.3, 0.3, 0.02]},
            lambda sum_: {"mask-keys": [sum_["mask-keys"][0]] * 4},
            lambda sum_: {"share-keys": [b"\x02" * 49] * 4},
        ],
    )
    def test_an_unfair_roster_is_refused(self, tmp_path, monkeypatch, change):
        grid = self.fresh(tmp_path, monkeypatch, "query.shares")
        values = change(dict(grid.kept["query.shares", 1]["sum"]))
        assert self.ask(grid, "query.shares", 1, **values) == "sum"
        assert self.ask(grid, "query.shares", 1)["facts"]["to"]

    def test_a_site_states_its_own_smallest_sum(self, tmp_path, monkeypatch):
        grid = Sites(tmp_path, **{"min-sum": 4})
        with pytest.raises(MessageError, match=r"Client \d sent nothing\. It refused a step of the secure sum"):
            training_of(grid, monkeypatch, min_clients=3).step(1)

    @pytest.mark.parametrize(("least", "lightest", "agreed"), [(0.1, 0.5, True), (0.6, 0.5, False), (1.0, 1.0, True)])
    def test_a_site_states_the_smallest_weight_beside_the_largest(self, tmp_path, monkeypatch, least, lightest, agreed):
        grid = self.fresh(tmp_path, monkeypatch, "query.shares", **{"min-weight": least})
        answer = self.ask(grid, "query.shares", 1, weights=[1.0, 1.0, lightest, 1.0])
        assert (answer != "sum") == agreed

    def test_an_attempt_is_answered_for_one_model_and_one_set_of_clients(self, tmp_path, monkeypatch):
        grid = self.fresh(tmp_path, monkeypatch, "query.unmask")
        mail = grid.kept["train", 1]["sum"]
        fewer = {"from": mail["from"][:-1], "ciphertexts": mail["ciphertexts"][:-1]}
        assert self.ask(grid, "train", 1, **fewer) == "sum"
        assert self.ask(grid, "train", 1, **{"from": mail["from"][:1], "ciphertexts": mail["ciphertexts"][:1]}) == "sum"
        assert self.ask(grid, "train", 1, ciphertexts=mail["ciphertexts"][::-1]) == "sum"
        grid.kept["train", 1]["model"] = ArrayRecord(
            {name: tensor + 1 for name, tensor in grid.kept["train", 1]["model"].to_torch_state_dict().items()}
        )
        assert self.ask(grid, "train", 1) == "sum"

    def test_a_later_attempt_needs_as_many_clients_as_an_earlier_one(self, tmp_path, monkeypatch):
        """Or those who did not open a sum could open a smaller one, which the server subtracts."""
        grid = self.fresh(tmp_path, monkeypatch, "query.unmask")
        answers = {client: self.ask(grid, "query.keys", client, attempt=2)["facts"] for client in (1, 2)}
        small = {
            "attempt": 2, "numbers": [1, 2], "weights": [0.25, 0.25], "threshold": 2,
            **{f"{key}s": [answers[client][key] for client in (1, 2)] for key in ("mask-key", "share-key")},
            "signatures": [answers[client]["signature"] for client in (1, 2)],
        }  # fmt: skip
        assert self.ask(grid, "query.shares", 1, **small) == "sum"

    def test_no_update_leaves_in_the_open(self, tmp_path, monkeypatch):
        grid = self.fresh(tmp_path, monkeypatch, "train")
        content = RecordDict({key: record for key, record in grid.kept["train", 1].items() if key != "sum"})
        answer = grid._reply(Message(content, dst_node_id=11, message_type="train")).content
        assert answer.config_records["error"]["code"] == "message"
        assert not answer.array_records


@pytest.mark.parametrize("enough", [True, False])
def test_a_victim_with_another_model_is_never_in_the_others_sum(tmp_path, monkeypatch, enough):
    grid = Sites(tmp_path / "a")
    training = training_of(grid, monkeypatch, min_clients=3 if enough else 4)

    def swap(kind, client, content):
        if kind == "train" and client == 2:
            model = content["model"].to_torch_state_dict()
            content["model"] = ArrayRecord({name: tensor + 1e-6 for name, tensor in model.items()})
        return content

    grid.swap = swap
    if enough:
        row, played = training.step(1)
        assert sorted(played.clients) == [0, 1, 3]
        assert "The answer of client 2 was not used" in row["dropped"][0]
        assert same(training.model, wanted(plain_updates(tmp_path / "b", 1, RUN), RUN, (0, 1, 3)))
    else:
        with pytest.raises(MessageError, match=r"got 3 \(train\).* got another transcript from it"):
            training.step(1)
        assert not any(kind == "query.unmask" for kind, _ in grid.asked)


def test_masks_with_different_transcripts_do_not_cancel():
    key = shared_key(new_secret(), public_bytes(new_secret()))
    cancelled = pair_mask(1, 2, key, "same", 1000) + pair_mask(2, 1, key, "same", 1000)
    assert not cancelled.any()
    left = pair_mask(1, 2, key, "one", 100_000) + pair_mask(2, 1, key, "other", 100_000)
    shares = np.bincount((left >> np.uint64(60)).astype(int), minlength=16) / len(left)
    assert np.abs(shares - 1 / 16).max() < 0.01


def test_masks_do_not_come_from_flowers_generator_of_32_bits():
    """Flower's masks of two keys whose words have the same exclusive or are the same."""
    one, other = b"\1\0\0\0" + bytes(28), bytes(28) + b"\1\0\0\0"
    assert np.array_equal(*(pseudo_rand_gen(key, 1 << 32, [(9,)])[0] for key in (one, other)))
    assert not np.array_equal(mask(one, "", 9), mask(other, "", 9))
    expected = hashlib.sha256  # the same key and transcript give the same mask, another one another
    assert expected(mask(one, "a", 99).tobytes()).digest() == expected(mask(one, "a", 99).tobytes()).digest()
    assert not np.array_equal(mask(one, "a", 9), mask(one, "b", 9))


def test_numbers_are_as_wide_as_the_sum_needs():
    assert word_bits(Quantiser(22, 1.0), 4) == 32
    assert word_bits(Quantiser(30, 1.0), 3) == 32
    assert word_bits(Quantiser(32, 1.0), 2) == 64


@pytest.mark.parametrize("point", [b"", bytes(49), b"\x04" + bytes(96), b"\x02" + b"\xff" * 48])
def test_a_public_key_must_be_a_point(point):
    with pytest.raises(MessageError, match="compressed point"):
        public_key(point)


def test_a_roster_needs_more_than_half():
    points = [public_bytes(new_secret()) for _ in range(8)]
    members = tuple(Member(number, points[2 * number], points[2 * number + 1], b"", 0.25) for number in range(4))
    for threshold, fine in ((1, False), (2, False), (3, True), (4, True), (5, False)):
        if fine:
            Roster(1, 1, threshold, members).check()
        else:
            with pytest.raises(MessageError, match="threshold"):
                Roster(1, 1, threshold, members).check()


@pytest.mark.parametrize("killed", STEPS)
def test_a_server_that_stops_anywhere_repeats_the_round_with_the_same_result(tmp_path, monkeypatch, killed):
    grid = Sites(tmp_path / "a")
    training = training_of(grid, monkeypatch)
    start = training.model
    count = [0]

    def swap(kind, client, content):
        count[0] += kind == killed
        if kind == killed and count[0] == CLIENTS:
            raise KeyboardInterrupt
        return content

    grid.swap = swap
    with pytest.raises(KeyboardInterrupt):
        training.step(1)
    grid.swap = lambda kind, client, content: content
    grid.box = {}
    again = training_of(grid, monkeypatch)
    assert same(again.model, start)
    again.step(1)
    assert same(again.model, wanted(plain_updates(tmp_path / "b", 1, RUN), RUN, range(CLIENTS)))


def test_after_a_restart_with_fewer_clients_another_attempt_is_made_unless_the_sum_was_opened(tmp_path, monkeypatch):
    for lost_in, fine in (("train", True), ("query.unmask", False)):
        grid = Sites(tmp_path / lost_in)
        training = training_of(grid, monkeypatch, min_clients=3)

        def swap(kind, client, content, lost_in=lost_in):
            if kind == lost_in and client == 3:
                raise KeyboardInterrupt
            return content

        grid.swap = swap
        with pytest.raises(KeyboardInterrupt):
            training.step(1)
        grid.swap = lambda kind, client, content: content
        grid.box = {}
        away = grid.nodes[10]
        again = training_of(grid, monkeypatch, min_clients=3)
        del grid.nodes[10]
        if fine:
            assert sorted(again.step(1)[1].clients) == [1, 2, 3]
        else:
            with pytest.raises(GradveilError, match=r"Round 1 was opened before the server stopped"):
                again.step(1)
            grid.nodes[10] = away
            last = training_of(grid, monkeypatch, min_clients=3)
            assert sorted(last.step(1)[1].clients) == [0, 1, 2, 3]


def wrong(kind, content, rng):
    """Return an answer of a step with a fault that the server can see."""
    facts = dict(content["facts"])
    if kind == "train":
        choice = rng.integers(4)
        if choice == 0:
            content["masked"] = ArrayRecord({"masked": torch.zeros(int(rng.integers(1, 99)), dtype=torch.int32)})
        elif choice == 1:
            content["masked"] = ArrayRecord({"masked": content["masked"].to_torch_state_dict()["masked"].float()})
        elif choice == 2:
            facts["images"] = 10**9
        else:
            facts["transcript"] = [7, "", "0" * 64][int(rng.integers(3))]
    else:
        key = sorted(facts)[int(rng.integers(len(facts)))]
        value = facts[key]
        if key == "signature":
            facts[key] = rng.bytes(5000)
        elif isinstance(value, bytes):
            facts[key] = [b"", rng.bytes(49), rng.bytes(5000), 3.5][int(rng.integers(4))]
        elif isinstance(value, bool):
            facts[key] = [1, "no", 0.5][int(rng.integers(3))]
        else:
            facts[key] = [value[:-1], [*value, value[0]], "x", [0.5] * len(value)][int(rng.integers(4))]
    content["facts"] = ConfigRecord(facts)
    return content


@pytest.mark.parametrize("kind", STEPS)
def test_broken_answers_in_a_step_are_left_out_by_name(tmp_path, monkeypatch, kind):
    rng = np.random.default_rng(3)
    run = replace(RUN, rounds=6)
    grid = Sites(tmp_path, run)
    grid.change = lambda asked, content: wrong(kind, content, rng) if asked == kind else content
    training = training_of(grid, monkeypatch, run, min_clients=3)
    for number in range(1, 7):
        row, played = training.step(number)
        if kind == "query.unmask":
            assert sorted(played.clients) == [0, 1, 2, 3]
        else:
            assert sorted(played.clients) == [0, 2, 3]
            assert len(row["dropped"]) == 1
            assert "lient 1 " in row["dropped"][0]


def test_a_masked_update_of_other_numbers_is_noticed_in_the_sum(tmp_path, monkeypatch):
    def change(kind, content):
        if kind == "train":
            rng = np.random.default_rng(1)
            junk = rng.integers(-(2**31), 2**31, len(content["masked"].to_torch_state_dict()["masked"]), dtype=np.int64)
            content["masked"] = ArrayRecord({"masked": torch.from_numpy(junk).int()})
        return content

    grid = Sites(tmp_path)
    grid.change = change
    with pytest.raises(MessageError, match="must be within its range, got a larger one"):
        training_of(grid, monkeypatch, min_clients=3).step(1)


def test_a_site_can_require_secure_sums(tmp_path, monkeypatch):
    run = replace(RUN, aggregation="none", sum_bits=0)
    with pytest.raises(ConfigError, match=r"Node \d+ sent nothing\. It agreed to secure aggregation only"):
        training_of(Sites(tmp_path / "a", run, aggregation="secure"), monkeypatch, run)
    training_of(Sites(tmp_path / "b", aggregation="secure"), monkeypatch).step(1)
    guarded = replace(RUN, defence="entangle")
    with pytest.raises(ConfigError, match=r"Node 10 sent nothing\. It agreed to secure aggregation only"):
        training_of(Sites(tmp_path / "c", guarded, aggregation="secure"), monkeypatch, guarded)


@pytest.mark.parametrize(
    ("change", "limits", "message"),
    [
        ({"sum_bits": 0}, {}, "adds up whole numbers over Flower, got sum-bits = 0"),
        ({}, {"max_norm": 3.0}, "max-norm bounds single updates"),
        ({"sampling": "uniform-replace", "sampled": 3}, {}, "clients that count once"),
    ],
)
def test_settings_that_do_not_go_with_secure_sums(tmp_path, monkeypatch, change, limits, message):
    run = replace(RUN, **change)
    with pytest.raises(ConfigError, match=message):
        training_of(Sites(tmp_path, run), monkeypatch, run, **limits)


def test_noise_that_is_shared_among_clients_needs_secure_sums(tmp_path, monkeypatch):
    run = replace(RUN, defence="veil:mu=8,at=sum", rounds=1)
    training = training_of(Sites(tmp_path / "a", run, aggregation="secure"), monkeypatch, run)
    assert sorted(training.step(1)[1].clients) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="at=sum must run under secure aggregation"):
        training_of(Sites(tmp_path / "b", run), monkeypatch, replace(run, aggregation="none", sum_bits=0))


def test_guards_train_in_the_open_and_the_others_in_a_sum(tmp_path, monkeypatch):
    run = replace(RUN, defence="entangle")
    training = training_of(Sites(tmp_path, run), monkeypatch, run)
    assert sorted(training.step(1)[1].clients) == [0, 1, 2, 3]


class TestPeers:
    """Sites that know each other's keys."""

    def peers(self, tmp_path, monkeypatch, change=lambda keys: keys):
        """Return sites after a first run, with a file of their public keys."""
        training_of(Sites(tmp_path / "s"), monkeypatch).step(1)
        keys = {n: (tmp_path / "s" / f"identity-{n}.pub").read_text().strip() for n in range(CLIENTS)}
        path = tmp_path / "peers.toml"
        path.write_text("".join(f'{number} = "{key}"\n' for number, key in change(keys).items()))
        run = replace(RUN, seed=1)
        return Sites(tmp_path / "s", run, peers=str(path)), run

    def test_known_keys_are_accepted(self, tmp_path, monkeypatch):
        grid, run = self.peers(tmp_path, monkeypatch)
        assert sorted(training_of(grid, monkeypatch, run).step(1)[1].clients) == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        "change",
        [
            lambda keys: keys | {1: keys[2]},
            lambda keys: {number: key for number, key in keys.items() if number != 3},
            lambda keys: keys | {0: "xyz"},
        ],
    )
    def test_others_are_refused(self, tmp_path, monkeypatch, change):
        grid, run = self.peers(tmp_path, monkeypatch, change)
        with pytest.raises(MessageError, match="Keys in the secure sum are not signed by the sites that it knows"):
            training_of(grid, monkeypatch, run).step(1)

    def test_a_server_that_puts_its_own_keys_in_between_is_noticed(self, tmp_path, monkeypatch):
        grid, run = self.peers(tmp_path, monkeypatch)

        def swap(kind, client, content):
            if kind == "query.shares" and client != 2:
                values = dict(content["sum"])
                keys = list(values["share-keys"])
                keys[2] = public_bytes(new_secret())
                content["sum"] = ConfigRecord(values | {"share-keys": keys})
            return content

        grid.swap = swap
        with pytest.raises(MessageError, match="Keys in the secure sum are not signed by the sites that it knows"):
            training_of(grid, monkeypatch, run).step(1)


def test_messages_survive_the_transport(tmp_path, monkeypatch):
    grid = Sites(tmp_path)
    training_of(grid, monkeypatch).step(1)
    for sent in grid.wire:
        assert content_bytes(recorddict_from_proto(ProtoRecordDict.FromString(sent))) == sent
