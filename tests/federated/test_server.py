from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradveil.config import TrainSettings
from gradveil.defences import Defence, build_defence
from gradveil.federated.aggregation import update_weights
from gradveil.federated.server import (
    Sent,
    last_rounds,
    learning_rate,
    play_round,
    sample_clients,
)
from gradveil.types import Update


@given(n=st.integers(1, 30), data=st.data(), seed=st.integers(0, 1000))
def test_sampling_without_replacement_draws_k_distinct_clients(n, data, seed):
    k = data.draw(st.integers(1, n))
    drawn = sample_clients(TrainSettings(clients=n, sampled=k, seed=seed), [5] * n, 3)
    assert len(drawn) == len(set(drawn)) == k
    assert all(0 <= client < n for client in drawn)


def test_sampling_depends_only_on_round_and_seed():
    settings = TrainSettings(clients=50, sampled=5)
    assert sample_clients(settings, [1] * 50, 1) == sample_clients(settings, [1] * 50, 1)
    assert sample_clients(settings, [1] * 50, 1) != sample_clients(settings, [1] * 50, 2)
    assert sample_clients(settings, [1] * 50, 1) != sample_clients(replace(settings, seed=1), [1] * 50, 1)


@pytest.mark.parametrize(("sampling", "expected"), [("uniform-replace", [0.5, 0.5]), ("size-replace", [0.1, 0.9])])
def test_sampling_with_replacement_has_the_stated_frequencies(sampling, expected):
    settings = TrainSettings(clients=2, sampled=4000, sampling=sampling)
    counts = Counter(sample_clients(settings, [10, 90], 1))
    assert [counts[client] / 4000 for client in range(2)] == pytest.approx(expected, abs=0.03)


def test_the_last_round_of_each_client_is_known():
    settings = TrainSettings(clients=9, sampled=2)
    expected = {client: number for number in (1, 2, 3) for client in (8, *sample_clients(settings, [1] * 9, number))}
    assert last_rounds(settings, build_defence("entangle:guards=8"), [1] * 9, 3) == expected
    assert last_rounds(settings, build_defence("none"), [1] * 9, 0) == {}


def test_learning_rate_by_hand():
    settings = TrainSettings(rounds=200, lr=0.1, lr_steps=(60, 120), lr_factor=0.2)
    assert [learning_rate(settings, r) for r in (1, 60, 61, 121)] == pytest.approx([0.1, 0.1, 0.02, 0.004])
    assert learning_rate(TrainSettings(lr=0.01, lr_decay=0.99), 11) == pytest.approx(0.01 * 0.99**10)


class FakeEngine:
    """An engine whose clients each send their number plus one."""

    fewest = 0

    def __init__(self):
        self.calls = []

    def train(self, round_number, clients, model, public, lr):
        self.calls.append((list(clients), sorted(public), lr))
        for client in clients:
            yield Sent(client, Update({"weight": torch.full((1, 1), client + 1.0)}, 10), {"number": float(client)})


class Early(Defence):
    def early_clients(self, num_clients):
        return (2,)

    def public(self, early, server):
        server.state["seen"] = torch.tensor(float(len(early)))
        return {"from": early[2].tensors["weight"]}

    def on_server(self, update, server):
        return update * 10


def test_early_clients_train_first_and_their_result_is_broadcast():
    settings = TrainSettings(clients=4, sampled=2, weighting="uniform", save_rounds=(1,), lr=0.5)
    engine, state = FakeEngine(), {}
    model = {"weight": torch.zeros(1, 1)}
    network = nn.Linear(1, 1, bias=False)
    played = play_round(1, settings, Early(), engine, [10] * 4, network, model, state)
    assert played.reports == {"number": sum(played.clients) / len(played.clients)}
    others = [client for client in sample_clients(settings, [10] * 4, 1) if client != 2]
    assert engine.calls == [([2], [], 0.5), (others, ["from"], 0.5)]
    assert played.clients == (2, *others)
    # on_server multiplied each by ten; the updates that were sent are kept as they were
    mean = sum(client + 1 for client in played.clients) / len(played.clients)
    assert played.model["weight"].item() == pytest.approx(10 * mean)
    assert played.sent[2].tensors["weight"].item() == 3
    assert played.received is model
    assert state["seen"] == 1


def test_updates_are_kept_only_for_chosen_rounds():
    settings = TrainSettings(clients=2, save_rounds=(2,))
    network = nn.Linear(1, 1, bias=False)
    model = {"weight": torch.zeros(1, 1)}
    played = play_round(1, settings, Defence(), FakeEngine(), [1, 1], network, model, {})
    assert not played.sent


def test_an_early_client_keeps_its_weight_whether_drawn_or_not():
    settings = TrainSettings(clients=4, sampled=2, weighting="unbiased")
    weights = update_weights(settings, [10, 30, 20, 40], [1, 0], early=(0,))
    assert weights == pytest.approx({0: 0.1, 1: 0.6})
    sized = update_weights(replace(settings, weighting="size"), [10, 30, 20, 40], [1, 3], early=(0,))
    assert sized == pytest.approx({0: 10 / 80, 1: 30 / 80, 3: 40 / 80})
