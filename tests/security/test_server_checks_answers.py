"""Whatever one client sends, the server names it, and stops or goes on without it; the other clients decide."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from gradveil.config import TrainSettings
from gradveil.engines.flower import AnswerLimits, flower_training
from gradveil.engines.flower_site import client_app
from gradveil.errors import DivergedError, GradveilError, MessageError, TrainingError
from tests.engines.test_flower import Mailbox, agreeing, to_run_config
from tests.engines.test_simulation import same
from tests.security.sites import private_set

BAD = 1
RUN = TrainSettings(
    dataset="mnist-5k", model="logistic", clients=3, rounds=2, lr=0.05, normalise="none", batch_size=0,
)  # fmt: skip


class Federation(Mailbox):
    """Three sites in this process; what one of them sends can be changed on its way."""

    def __init__(self, folder, run=RUN, change=None, **policy):
        self.app: ClientApp = client_app(lambda context: private_set(seed=context.node_config["partition-id"]))
        self.run_config = to_run_config(run)
        common = {**agreeing(run), "private-folder": str(folder), **policy}
        self.nodes = {10 + number: {**common, "partition-id": number} for number in range(run.clients)}
        self.change = change or (lambda kind, content: content)
        self.cache = None

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        return [self._reply(message) for message in messages]

    def _reply(self, message):
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        content = None if self.cache is None else self.cache.get((kind, node))
        if content is None:
            arrived = message_from_proto(message_to_proto(message))
            context = Context(1, node, self.nodes[node], RecordDict(), self.run_config)
            content = message_to_proto(self.app(arrived, context)).SerializeToString()
            if self.cache is not None:
                self.cache[kind, node] = content
        record = message_from_proto(ProtoMessage.FromString(content)).content
        if node == 10 + BAD:
            record = self.change(kind, record)
        reply = Message(record, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = node
        return reply


def training_of(grid, run=RUN, **options):
    return flower_training(grid, run, private_set(seed=9), wait=0, **options)


def facts(content, **changes):
    """Return an answer with other plain values; None takes a value away."""
    values = {**content.config_records["facts"], **{key.replace("_", "-"): value for key, value in changes.items()}}
    content["facts"] = ConfigRecord({key: value for key, value in values.items() if value is not None})
    return content


def tensors(content, change, name="tensors"):
    """Return an answer with other tensors."""
    content[name] = ArrayRecord(change(content.array_records[name].to_torch_state_dict()))
    return content


def declared(shape, data=b"\0" * 16):
    """Return an array whose header declares a shape that its bytes do not fill."""
    text = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    return Array(dtype="float32", shape=tuple(shape), stype="numpy.ndarray", data=header + data)


def with_array(content, array, name="linear.weight"):
    arrays = dict(content.array_records["tensors"])
    content["tensors"] = ArrayRecord({**arrays, name: array})
    return content


UPDATES = {
    "a count of 10^18": lambda c: facts(c, images=10**18),
    "a count of -29": lambda c: facts(c, images=-29),
    "a count that is a text": lambda c: facts(c, images="12"),
    "a count that is a list": lambda c: facts(c, images=[12]),
    "no count": lambda c: facts(c, images=None),
    "no facts": lambda c: RecordDict(dict(c.array_records.items())),
    "no tensors": lambda c: RecordDict({"facts": c.config_records["facts"]}),
    "nothing": lambda c: RecordDict(),
    "NaN": lambda c: tensors(c, lambda t: {k: v * math.nan for k, v in t.items()}),
    "infinity": lambda c: tensors(c, lambda t: {k: v + math.inf for k, v in t.items()}),
    "another name": lambda c: tensors(c, lambda t: {f"x{k}": v for k, v in t.items()}),
    "a tensor more": lambda c: tensors(c, lambda t: t | {"more": torch.zeros(3)}),
    "a tensor less": lambda c: tensors(c, lambda t: dict(list(t.items())[:1])),
    "another shape": lambda c: tensors(c, lambda t: {k: v[..., :1] for k, v in t.items()}),
    "another type": lambda c: tensors(c, lambda t: {k: v.double() for k, v in t.items()}),
    "integers": lambda c: tensors(c, lambda t: {k: v.long() for k, v in t.items()}),
    "a declared shape": lambda c: with_array(c, declared((400_000_000, 4))),
    "a negative shape": lambda c: with_array(c, declared((-1, 4))),
    "no numpy": lambda c: with_array(c, Array(dtype="f", shape=(1,), stype="numpy.ndarray", data=b"PK\x03\x04")),
    "a pickle": lambda c: with_array(c, Array(dtype="f", shape=(1,), stype="pickle", data=b"cos\nsystem\n.")),
    "unknown reports": lambda c: facts(c, report_names=["x"], report_values=[1.0]),
    "NaN alarms": lambda c: facts(c, alarms=math.nan),
    "an unknown error": lambda c: RecordDict({"error": ConfigRecord({"code": "\x1b[2J" * 99})}),
    "an error without code": lambda c: RecordDict({"error": ConfigRecord({})}),
}


@pytest.mark.parametrize("bad", UPDATES.values(), ids=UPDATES.keys())
def test_a_bad_update_names_its_client_or_is_dropped(tmp_path, bad):
    def change(kind, content):
        return bad(content) if kind == "train" else content

    with pytest.raises(TrainingError, match=rf"(?i)client {BAD}\b") as caught:
        training_of(Federation(tmp_path / "a", change=change)).step(1)
    assert "\x1b" not in str(caught.value)
    assert "--lr" not in str(caught.value)

    run = replace(RUN, bad_answers="drop")
    training = training_of(Federation(tmp_path / "b", run, change), run)
    row, played = training.step(1)
    assert played.clients == (0, 2)
    assert len(row["dropped"]) == 1
    assert f"lient {BAD}" in row["dropped"][0]
    assert same(training.model, mean_of_the_others(tmp_path / "c"))


def mean_of_the_others(folder):
    """Return the model after a round in which the updates of clients 0 and 2 are averaged."""
    run = replace(RUN, save_rounds=(1,))
    training = training_of(Federation(folder, run), run)
    _, played = training.step(1)
    weights, updates = {0: 12 / 36, 2: 12 / 36}, {client: played.sent[client].tensors for client in (0, 2)}
    return {
        name: (tensor.double() + sum(updates[c][name].double() * weights[c] for c in (0, 2)) * (1 / (24 / 36))).float()
        for name, tensor in played.received.items()
    }


def test_no_round_without_any_answer(tmp_path):
    run = replace(RUN, bad_answers="drop", clients=2)
    grid = Federation(tmp_path, run)
    training = training_of(grid, run, limits=AnswerLimits(round_seconds=0.001))
    grid.send_and_receive = lambda messages, timeout=None: []
    with pytest.raises(MessageError, match="at least one client, got none: all 2 were dropped"):
        training.step(1)


@pytest.mark.parametrize("images", [10**18, 1_000_001, 0, -29, math.nan, "12", True])
def test_a_stated_size_must_be_possible(tmp_path, images):
    def change(kind, content):
        return facts(content, images=images) if kind == "query" else content

    with pytest.raises(
        GradveilError, match=rf"Node {10 + BAD} must introduce its site\. images must be a whole number"
    ):
        training_of(Federation(tmp_path, change=change))


def test_the_largest_size_is_a_setting_of_the_server(tmp_path):
    with pytest.raises(GradveilError, match="images must be a whole number from 1 to 11"):
        training_of(Federation(tmp_path), limits=AnswerLimits(max_images=11))


def test_an_update_beyond_the_norm_bound_is_named(tmp_path):
    def change(kind, content):
        return tensors(content, lambda t: {k: v * 1e6 for k, v in t.items()}) if kind == "train" else content

    training = training_of(Federation(tmp_path, change=change), limits=AnswerLimits(max_norm=10.0))
    with pytest.raises(MessageError, match=rf"client {BAD} was not used\. The norm of the update must be at most 10"):
        training.step(1)


@pytest.mark.parametrize("in_the_sum", [False, True])
def test_an_update_that_ends_the_run_is_named(tmp_path, monkeypatch, in_the_sum):
    """The update is finite, but the loss of the model is not, or the model itself."""

    def change(kind, content):
        return tensors(content, lambda t: {k: v.sign() * 3e38 for k, v in t.items()}) if kind == "train" else content

    def diverge(self, model, factor):
        raise DivergedError("The model must stay finite.")

    training = training_of(Federation(tmp_path, change=change))
    if in_the_sum:
        monkeypatch.setattr("gradveil.federated.server.Aggregate.apply", diverge)
    with pytest.raises(DivergedError, match=rf"The largest update of round 1 came from client {BAD}, with norm \d"):
        training.step(1)


@pytest.mark.parametrize("shape", [(0, 1_600_000_000), (0, 40_000, 40_000), (0,)])
def test_ca_fl_reserves_nothing_by_a_declared_shape(tmp_path, shape):
    run = replace(RUN, defence="ca-fl")

    def change(kind, content):
        return (
            tensors(content, lambda t: t | {"like.linear.weight": torch.empty(shape)}) if kind == "train" else content
        )

    training = training_of(Federation(tmp_path, run, change), run)
    tracemalloc.start()
    with pytest.raises(
        MessageError, match=rf"client {BAD} was not used\. Tensor 'like\.linear\.weight' must have shape"
    ):
        training.step(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


def test_numbers_are_checked_before_a_defence_reads_them(tmp_path):
    run = replace(RUN, defence="ca-fl")

    def change(kind, content):
        return tensors(content, lambda t: t | {"sensed": t["sensed"] * math.nan}) if kind == "train" else content

    with pytest.raises(MessageError, match=rf"client {BAD} was not used\. Tensor 'sensed' must be finite"):
        training_of(Federation(tmp_path, run, change), run).step(1)


SCORES = {
    "NaN loss": {"loss_sum": [math.nan]},
    "negative loss": {"loss_sum": [-1.0]},
    "more correct than there are": {"correct": [9]},
    "a negative count": {"count": [-6], "correct": [-6]},
    "a count that is a text": {"count": ["6"]},
    "too many scores": {"count": [6, 6]},
    "no scores": {"count": []},
    "classes that do not add up": {"class_count": [6, 6, 6, 6]},
    "classes of another number": {"classes": [3]},
    "a billion classes": {"classes": [10**9]},
    "classes as a fraction": {"classes": [4.0]},
    "no classes as a fraction": {"classes": [0.0], "class_count": [], "class_correct": []},
    "a fraction of correct answers": {"correct": [1.0]},
    "a fraction of images": {"count": [6.0]},
    "no list": {"given": "exact"},
}


@pytest.mark.parametrize("values", SCORES.values(), ids=SCORES.keys())
def test_a_bad_score_names_its_client_or_is_left_out(tmp_path, values):
    def change(kind, content):
        return facts(content, **values) if kind == "evaluate" else content

    run = replace(RUN, model="resnet20", batch_norm="local", batch_size=6)
    dropping = replace(run, bad_answers="drop")
    for place, settings in enumerate((run, dropping)):
        grid = Federation(tmp_path / str(place), settings, change)
        grid.app = client_app(lambda context: coloured(context.node_config["partition-id"]))
        training = flower_training(grid, settings, coloured(9), wait=0)
        if settings is run:
            with pytest.raises(MessageError, match=f"The answer of client {BAD} was not used"):
                training.step(1)
        else:
            row, _ = training.step(1)
            assert 0 <= row["accuracy"] <= 1


def test_an_error_that_no_check_foresaw_names_the_client(tmp_path, monkeypatch):
    run = replace(RUN, model="resnet20", batch_norm="local", batch_size=6)
    grid = Federation(tmp_path, run)
    grid.app = client_app(lambda context: coloured(context.node_config["partition-id"]))
    training = flower_training(grid, run, coloured(9), wait=0)
    monkeypatch.setattr("gradveil.engines.flower_engine.check_score", lambda *_: 1 / 0)
    with pytest.raises(MessageError, match=r"The answer of client 0 was not used.*got ZeroDivisionError"):
        training.step(1)


def coloured(seed):
    """Return the private images in three channels and 16x16 pixels, which a ResNet can take."""
    data = private_set(seed=seed)
    wide = [replace(part, images=np.tile(part.images, (1, 3, 2, 2))) for part in (data.train, data.test)]
    return replace(data, train=wide[0], test=wide[1], mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("extra", [{}, {"partition-id": 7}, {"partition-id": 0, "defence": "dp-sgd"}])
def test_an_extra_node_does_not_block_the_start(tmp_path, extra):
    grid = Federation(tmp_path)
    grid.nodes = {5: {"private-folder": str(tmp_path), **extra}, **grid.nodes}
    training = training_of(grid, replace(RUN, bad_answers="drop"))
    assert training.sizes == [12, 12, 12]
    training.step(1)


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.booleans(), st.binary(max_size=5),
    st.lists(st.integers(-9, 9), max_size=4), st.lists(st.floats(), max_size=4),
    st.lists(st.text(max_size=3), max_size=4),
)  # fmt: skip
KEYS = ("images", "alarms", "report-names", "report-values", "number", "sensitive", "given", "correct", "count", "new")


@st.composite
def mutations(draw):
    """Draw a change of one answer: of a plain value, a record, or the bytes of an array."""
    kind = draw(st.sampled_from(["query", "train", "evaluate"]))
    what = draw(st.sampled_from(["value", "missing", "record", "bytes", "header"]))
    return (
        kind,
        what,
        draw(st.sampled_from(KEYS)),
        draw(VALUES),
        draw(st.binary(max_size=40)),
        draw(st.integers(0, 200)),
    )


def mutated(content, what, key, value, data, place):
    if what == "value":
        content["facts"] = ConfigRecord({**content.config_records["facts"], key: value})
    elif what == "missing":
        content["facts"] = ConfigRecord({k: v for k, v in content.config_records["facts"].items() if k != key})
    elif what == "record":
        return RecordDict({name: record for name, record in content.items() if name != ("facts", "tensors")[place % 2]})
    elif "tensors" in content.array_records:
        array = content.array_records["tensors"]["linear.bias"]
        put = declared((place, len(data))).data if what == "header" else array.data[:place] + data + array.data[place:]
        content = with_array(content, Array(dtype="float32", shape=(4,), stype=array.stype, data=put), "linear.bias")
    return content


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder and the recorded answers of an honest round."""
    return tmp_path_factory.mktemp("recorded"), {}


@given(mutation=mutations(), choice=st.sampled_from(["stop", "drop"]))
@effort(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mutated_answer_gives_a_foreign_error(recorded, mutation, choice):
    folder, cache = recorded
    wanted, *rest = mutation
    run = replace(RUN, bad_answers=choice)
    grid = Federation(folder, run, lambda kind, content: mutated(content, *rest) if kind == wanted else content)
    grid.cache = cache
    try:
        training = training_of(grid, run)
        _, played = training.step(1)
        training.client_rows(1)
    except GradveilError:
        return
    assert all(bool(tensor.isfinite().all()) for tensor in training.model.values())
    assert {0, 2} <= set(played.clients)
