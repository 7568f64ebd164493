"""Nodes that are killed, slow, restarted or broken are left out by name and taken back; the run goes on with enough."""

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from gradveil.engines.answer_limits import AnswerLimits, read_limits
from gradveil.engines.flower import server_app
from gradveil.errors import ConfigError, MessageError, WorkerError
from tests.conftest import PROBES
from tests.engines.fake_sites import RUN, FakeSites, mean_of, training_with
from tests.engines.test_flower import _a_task, to_run_config  # noqa: F401 - a fixture
from tests.security.test_server_checks_answers import Federation


def test_a_killed_node_is_left_out_by_name_and_taken_back(monkeypatch):
    grid = FakeSites()
    training, _ = training_with(grid, monkeypatch, min_clients=2)
    grid.unavailable = {11}
    before = training.model
    row, played = training.step(1)
    assert sorted(played.clients) == [0, 2]
    assert row["clients"] == 2
    assert row["dropped"] == [
        "Client 1 must answer, got: Node Unavailable. Look at its SuperNode; with an out folder, the same run "
        "continues from its last checkpoint."
    ]
    assert mean_of(training, (0, 2))(before)
    del grid.numbers[11]  # Flower takes it off its list
    assert "its node is not there" in training.step(2)[0]["dropped"][0]
    grid.numbers[77] = 1
    before = training.model
    row, played = training.step(3)
    assert sorted(played.clients) == [0, 1, 2]
    assert "dropped" not in row
    assert mean_of(training, (0, 1, 2))(before)


def test_a_slow_node_is_left_out_after_the_deadline(monkeypatch):
    grid = FakeSites()
    training, clock = training_with(grid, monkeypatch, min_clients=1, round_seconds=30)
    grid.silent = {12}
    row, played = training.step(1)
    assert sorted(played.clients) == [0, 1]
    assert "Client 2 must answer, got: nothing came within 30 seconds." in row["dropped"][0]
    assert 30 <= clock.now <= 31
    grid.silent = set()
    assert sorted(training.step(2)[1].clients) == [0, 1, 2]


def test_without_a_deadline_a_node_that_is_there_is_waited_for_and_named(monkeypatch, caplog):
    grid = FakeSites()
    training, clock = training_with(
        grid, monkeypatch, during={95: lambda: grid.unavailable.add(12) or grid.restart(2, 88)}
    )
    grid.silent = {12}
    with caplog.at_level(logging.INFO, "flwr"):
        assert sorted(training.step(1)[1].clients) == [0, 1, 2]
    awaited = [line for line in caplog.messages if "Waiting for the answer of client 2 (node 12) (train)" in line]
    assert 8 <= len(awaited) <= 16
    assert 95 <= clock.now < 160


@pytest.mark.parametrize("min_clients", [0, 2])
def test_a_node_that_is_killed_and_restarted_at_once_does_not_fail_the_run(monkeypatch, min_clients):
    grid = FakeSites()
    training, clock = training_with(grid, monkeypatch, min_clients=min_clients)
    training.step(1)
    grid.restart(1, 5)
    row, played = training.step(2)
    assert sorted(played.clients) == [0, 1, 2]
    assert "dropped" not in row
    assert 60 <= clock.now < 65  # the ghost had its time to answer
    assert sorted(training.step(3)[1].clients) == [0, 1, 2]
    assert clock.now < 65


def test_a_ghost_that_leaves_the_list_is_replaced_at_once(monkeypatch):
    grid = FakeSites()
    training, clock = training_with(grid, monkeypatch, during={5: lambda: grid.numbers.pop(11)})
    grid.restart(1, 200)
    assert sorted(training.step(1)[1].clients) == [0, 1, 2]
    assert 5 <= clock.now < 8


def test_a_ghost_at_the_start_is_not_waited_for(monkeypatch):
    grid = FakeSites()
    grid.restart(1, 5)
    training, clock = training_with(grid, monkeypatch)
    assert sorted(training.step(1)[1].clients) == [0, 1, 2]
    assert clock.now == 0


def test_a_newer_node_does_not_take_the_number_of_one_that_answers(monkeypatch, caplog):
    grid = FakeSites()
    training, _ = training_with(grid, monkeypatch)
    grid.numbers[300] = 1
    with caplog.at_level(logging.WARNING, "flwr"):
        training.step(1)
    assert "got 1 from nodes 11 and 300." in caplog.text
    training.step(2)
    assert not any(asked == ("train", 300) for asked in grid.asked)


def test_a_node_that_returns_with_other_images_is_refused(monkeypatch, caplog):
    grid = FakeSites()
    training, _ = training_with(grid, monkeypatch, min_clients=2)
    grid.numbers = {10: 0, 12: 2, 50: 1}
    grid.change = lambda number, kind, content: (
        RecordDict({"facts": ConfigRecord({"number": 1, "images": 999, "sensitive": 0})})
        if kind == "query"
        else content
    )
    assert sorted(training.step(1)[1].clients) == [0, 2]
    assert "Node 50 must have the images of client 1, whose number it states" in caplog.text


def test_too_few_clients_end_the_run_with_every_reason(monkeypatch):
    grid = FakeSites()
    training, clock = training_with(grid, monkeypatch, min_clients=2, wait_seconds=50)
    grid.unavailable = {10, 11}
    with pytest.raises(
        MessageError, match=r"needs 2 clients or more \(min-clients\), got 1\. Client [01] .* Client [01] "
    ):
        training.step(1)
    assert 50 <= clock.now < 55  # they had time to come back


def test_a_run_begins_without_a_missing_node_and_takes_it_in_later(monkeypatch):
    grid = FakeSites()
    del grid.numbers[11]
    training, clock = training_with(grid, monkeypatch, min_clients=2, wait_seconds=40)
    assert 40 <= clock.now < 42
    assert sorted(training.step(1)[1].clients) == [0, 2]
    grid.numbers[11] = 1
    before = training.model
    training.step(2)
    training.step(3)
    assert training.sizes == [12, 12, 12]
    del grid, before
    lonely = FakeSites()
    del lonely.numbers[10], lonely.numbers[11]
    with pytest.raises(WorkerError, match="All 3 nodes must be there within 40 seconds, got 1"):
        training_with(lonely, monkeypatch, min_clients=2, wait_seconds=40)


@pytest.mark.parametrize("back", [True, False])
def test_a_round_waits_for_a_guard_then_ends(tmp_path, monkeypatch, back):
    run = replace(RUN, defence="entangle", rounds=2)
    grid = Federation(tmp_path, run)
    away = grid.nodes[10]
    during = {20: lambda: grid.nodes.update({99: away})} if back else {}
    training, clock = training_with(grid, monkeypatch, run, during, min_clients=1, wait_seconds=100)
    guard = training.defence.early_clients(3)
    assert guard == (0,)
    del grid.nodes[10]
    if back:
        assert sorted(training.step(1)[1].clients) == [0, 1, 2]
        assert 20 <= clock.now < 25
    else:
        with pytest.raises(WorkerError, match="Client 0 must answer, got: its node is not there"):
            training.step(1)
        assert 100 <= clock.now < 105


def test_a_client_that_was_left_out_is_not_told_that_its_state_is_lost(tmp_path, monkeypatch):
    run = replace(RUN, defence=f"{PROBES}:EchoState", rounds=3)
    grid = Federation(tmp_path, run)
    training, _ = training_with(grid, monkeypatch, run, min_clients=2)
    away = grid.nodes.pop(11)
    training.step(1)
    kept, state = training.model, training.checkpoint
    grid.nodes[11] = away
    again, _ = training_with(grid, monkeypatch, run, min_clients=2)
    again.resume(kept, state, 1)
    assert again.server_state == {}
    row, played = again.step(2)
    assert sorted(played.clients) == [0, 1, 2], row


def test_an_error_that_ends_a_run_is_logged_without_the_calls_that_led_to_it(monkeypatch, caplog):
    app, grid = server_app(), FakeSites()
    del grid.numbers[11]
    config = {**to_run_config(RUN), "wait-seconds": 0.001}
    monkeypatch.setattr("gradveil.engines.nodes.time", type("T", (), {"monotonic": iter(range(99)).__next__}))
    flower = logging.getLogger("flwr")
    monkeypatch.setattr(flower, "propagate", True)
    with pytest.raises(WorkerError) as caught:
        app(grid, Context(1, 1, {}, RecordDict(), config))
    flower.log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=caught.value)  # as Flower does
    assert "The run ended. WorkerError: All 3 nodes must be there within 0.001 seconds, got 2" in caplog.text
    assert "Traceback" not in caplog.text


def test_limits_are_checked_and_read_from_the_run_config(monkeypatch):
    assert read_limits({"round-seconds": 90, "rounds": 7, "max-norm": ""}) == AnswerLimits(round_seconds=90.0)
    with pytest.raises(ConfigError, match="round_seconds must be at least 0, got -1"):
        AnswerLimits(round_seconds=-1)
    with pytest.raises(ConfigError, match=r"min_clients must be .*3.*, got 4"):
        training_with(FakeSites(), monkeypatch, min_clients=4)


def array(data):
    return Array("float32", (4,), "numpy.ndarray", bytes(data))


def cut(rng, data):
    """Return bytes that end too early, or go on with others."""
    return data[: rng.randrange(len(data))] + (b"" if rng.random() < 0.5 else rng.randbytes(9))


TENSORS = [
    lambda rng, t, name: t | {name: t[name] * rng.choice([float("nan"), float("inf")])},
    lambda rng, t, name: t | {name: t[name].to(rng.choice([torch.float64, torch.int32, torch.float16, torch.bool]))},
    lambda rng, t, name: t | {name: torch.zeros([rng.randrange(7) for _ in range(rng.choice([0, 3, 4]))])},
    lambda rng, t, name: {key: tensor for key, tensor in t.items() if key != name},
    lambda rng, t, name: t | {rng.randbytes(rng.randrange(20)).hex() + "x": torch.zeros(2)},
]
FACTS = [
    lambda rng, f: f | {"images": rng.choice([-1, 13, 10**18, 0.5, "12", [12], True, float("nan")])},
    lambda rng, f: dict(rng.sample(list(f.items()), len(f) - 1)),
    lambda rng, f: f | {"report-names": ["x" * rng.randrange(1, 99)], "report-values": [rng.random()]},
    lambda rng, f: f | {"alarms": rng.choice([2, -1, 1.0, "no", float("inf")])},
]
RECORDS = [
    lambda rng, c, name: c | {"tensors": ArrayRecord({name: array(rng.randbytes(rng.randrange(200)))})},
    lambda rng, c, name: c | {"tensors": ArrayRecord({**c["tensors"], name: array(cut(rng, c["tensors"][name].data))})},
    lambda rng, c, name: {"error": ConfigRecord({"code": rng.choice(["state", "\x1b[2J", "", "x" * 5000])})},
    lambda rng, c, name: dict(rng.sample(list(c.items()), len(c) - 1)),
]


def broken(rng, content):
    """Return an answer with one of many faults, chosen and filled at random."""
    parts = {key: content[key] for key in ("facts", "tensors", "buffers")}
    arrays = content["tensors"].to_torch_state_dict()
    name, fault = rng.choice(list(arrays)), rng.choice([*TENSORS, *FACTS, *RECORDS])
    if fault in TENSORS:
        parts["tensors"] = ArrayRecord(fault(rng, arrays, name))
    elif fault in FACTS:
        parts["facts"] = ConfigRecord(fault(rng, dict(content["facts"])))
    else:
        parts = fault(rng, parts, name)
    return RecordDict(parts)


def test_a_thousand_broken_answers_are_each_left_out_by_name(monkeypatch):
    rng, clients, rounds = random.Random(5), 21, 50
    run = replace(RUN, clients=clients, rounds=rounds)
    grid = FakeSites(clients)
    training, _ = training_with(grid, monkeypatch, run, min_clients=1)
    grid.change = lambda number, kind, content: broken(rng, content) if kind == "train" and number else content
    for number in range(1, rounds + 1):
        before = training.model
        row, played = training.step(number)
        assert sorted(played.clients) == [0]
        assert mean_of(training, (0,))(before)
        assert len(row["dropped"]) == clients - 1
        for client in range(1, clients):
            (reason,) = [reason for reason in row["dropped"] if f"lient {client} " in reason]
            assert len(reason) < 500
            assert reason.isprintable()


def test_a_hundred_rounds_with_random_losses(monkeypatch):
    rng, clients = np.random.default_rng(11), 8
    grid = FakeSites(clients)
    training, _ = training_with(
        grid, monkeypatch, replace(RUN, clients=clients, eval_every=100), min_clients=2, round_seconds=20
    )
    fresh, together = 1000, 0
    for number in range(1, 101):
        grid.silent, grid.unavailable, lost = set(), set(), set[int]()
        for node, client in list(grid.numbers.items()):
            fate = rng.integers(10)
            if fate == 0:  # killed
                grid.unavailable.add(node)
                lost.add(client)
            elif fate == 1:  # slow
                grid.silent.add(node)
                lost.add(client)
            elif fate == 2:  # restarted under another number, between two rounds
                fresh += 1
                del grid.numbers[node]
                grid.numbers[fresh] = client
        left = [client for client in range(clients) if client not in lost]
        if len(left) < 2:
            continue
        before = training.model
        row, played = training.step(number)
        assert sorted(played.clients) == left
        assert len(row.get("dropped", [])) == len(lost)
        assert mean_of(training, left)(before)
        together += not lost
        if (
            max(float(tensor.abs().max()) for tensor in training.model.values()) > 1e3
        ):  # keep float32 exact enough for the comparison
            training.model = {name: tensor * 0 for name, tensor in training.model.items()}
    assert together > 0
