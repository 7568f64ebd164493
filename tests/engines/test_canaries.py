"""Canaries beside a training: they find its true epsilon and a wrong one, and change nothing in it."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.defences.dp_sgd import DpSgd
from gradveil.defences.parts.gaussian_dp import MOST_EPSILON as MOST
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.defences.pogz import Pogz
from gradveil.engines.canaries import num_players
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.metrics.epsilon_hat import MEASURED
from gradveil.runs.train import train

SEEDS = range(20)


@dataclass(frozen=True)
class TenthOfTheNoise(DpSgd):
    """State the budget of ten times the noise that it adds."""

    def budget(self, releases):
        return replace(DpSgd(), noise=10 * self.noise).budget(releases)


@dataclass(frozen=True)
class TenthOfTheUpdateNoise(Pogz):
    """The same for whole updates."""

    def budget(self, releases):
        return Pogz(noise=10 * self.noise).budget(releases)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("mnist-5k")


@pytest.fixture
def measured(digits):
    """Return a function that plays a training and returns its last row."""

    def play(defence, **changes):
        usual = {
            "model": "logistic",
            "clients": 2,
            "partition": "iid:images=20",
            "rounds": 2,
            "batch_size": 0,
            "momentum": 0.0,
            "canaries": 16,
        }
        settings = TrainSettings(**usual | changes)
        own = build_defence(defence) if isinstance(defence, str) else defence
        with Simulation(settings, workers=0, dataset=digits, defence=own) as simulation:
            return list(simulation.run())[-1]

    return play


def test_dp_sgd_keeps_its_promise_in_19_of_20_seeds(measured):
    """All images are in every step, so the training is the Gaussian mechanism, once per round."""
    truth = epsilon_of(math.sqrt(2) / 0.8, 1e-5)
    rows = [measured("dp-sgd:noise=0.8", seed=seed) for seed in SEEDS]
    assert sum(row["epsilon_hat_low"] <= truth <= row["epsilon_hat_high"] for row in rows) >= 19
    assert all(row["epsilon_hat_high"] < epsilon_of(2 * math.sqrt(2) / 0.8, 1e-5) for row in rows)  # half the noise
    assert all(row["epsilon"] >= truth for row in rows)
    assert not any(row["canaries_exceed"] for row in rows)


def test_pogz_keeps_its_promise_in_19_of_20_seeds(measured):
    """In the first round all layers have the same noise, so this is the Gaussian mechanism on whole updates."""
    truth = epsilon_of(1 / 0.5, 1e-5)
    rows = [measured("pogz:noise=0.5", seed=seed, rounds=1) for seed in SEEDS]
    assert sum(row["epsilon_hat_low"] <= truth <= row["epsilon_hat_high"] for row in rows) >= 19
    assert all(row["epsilon_hat_high"] < epsilon_of(4 / 0.5, 1e-5) for row in rows)  # a quarter of the noise
    assert not any(row["canaries_exceed"] for row in rows)


@pytest.mark.parametrize("wrong", [TenthOfTheNoise(noise=0.1), TenthOfTheUpdateNoise(noise=0.1)])
def test_a_tenth_of_the_noise_is_always_caught(measured, wrong):
    for seed in SEEDS:
        row = measured(wrong, seed=seed)
        assert row["canaries_exceed"] is True
        assert row["epsilon_hat_low"] > row["epsilon"]


@pytest.mark.parametrize("spec", ["veil:mu=2", "veil:mu=2,at=sum"])
def test_veil_keeps_its_promise_at_clients_and_in_sums(measured, spec):
    shared = {"aggregation": "secure"} if "sum" in spec else {}
    for seed in SEEDS[:3]:
        row = measured(spec, seed=seed, clients=4, **shared)
        assert row["canaries_exceed"] is False
        assert row["epsilon_hat"] == pytest.approx(row["epsilon"], rel=0.5)


def test_as_many_clients_play_as_share_the_noise():
    assert num_players(build_defence("veil:at=sum,clients=5"), 16) == 5
    assert num_players(build_defence("veil"), 16) == num_players(build_defence("dp-sgd"), 16) == 1
    assert num_players(build_defence("clip"), 16) == 16


def test_sampling_hides_canaries(measured):
    """A step with a quarter of the images reveals less than one with all of them."""
    whole = measured("dp-sgd:noise=0.3", rounds=3)
    part = measured("dp-sgd:noise=0.3", rounds=3, batch_size=5)
    assert 0 < part["epsilon_hat"] < whole["epsilon_hat"]
    assert part["epsilon_hat_low"] < part["epsilon"]


@pytest.mark.parametrize("defence", ["none", "prune:fraction=0.5", "clip", "dp-sgd:noise=0"])
def test_a_defence_without_noise_has_no_epsilon_but_an_estimate(measured, defence):
    row = measured(defence)
    assert row["epsilon"] is row["canaries_exceed"] is None
    assert row["epsilon_hat"] > (MOST / 2 if defence != "prune:fraction=0.5" else 1000)


@pytest.mark.parametrize("defence", ["gaussian:std=0.05", "gaussian:std=1.0,where=gradient"])
def test_noise_without_a_statement_is_measured(measured, defence):
    """The canary is as long as a real update, so its epsilon is that of the Gaussian mechanism with this norm."""
    weak = measured(defence)
    strong = measured(defence.replace("0.05", "0.1").replace("1.0", "2.0"))
    assert 0 < strong["epsilon_hat"] < weak["epsilon_hat"] < MOST
    assert weak["epsilon"] is None
    assert weak["delta_hat"] == 1e-5


def test_a_defence_whose_server_recovers_updates_is_measured(measured):
    row = measured("ca-fl")
    assert 0 < row["epsilon_hat"] < row["epsilon"]


@pytest.mark.parametrize("defence", ["dp-sgd", "pogz", "prune:feedback=true"])
def test_the_training_has_the_same_bits(digits, defence):
    runs = []
    for canaries in (0, 8):
        settings = TrainSettings(
            model="logistic", clients=2, partition="iid:images=20", rounds=2, defence=defence, canaries=canaries
        )
        with Simulation(settings, workers=0, dataset=digits) as simulation:
            before = torch.random.get_rng_state()
            rows = list(simulation.run())
            assert torch.equal(torch.random.get_rng_state(), before)
            runs.append((rows, simulation.model, simulation.server_state))
    (plain, model, state), (beside, same, again) = runs
    fields = {*MEASURED, "epsilon", "delta"}
    for one, other in zip(plain, beside, strict=True):
        assert {k: v for k, v in one.items() if k not in fields | {"seconds"}} == {
            k: v for k, v in other.items() if k not in fields | {"seconds"}
        }
    assert all(torch.equal(model[name], same[name]) for name in model)
    assert all(torch.equal(state[name], again[name]) for name in {**state, **again})


@pytest.mark.parametrize("defence", ["dp-sgd", "pogz", "prune:feedback=true", "none"])
def test_a_resumed_training_measures_the_same(tmp_path, defence):
    settings = TrainSettings(
        model="logistic", clients=2, partition="iid:images=20", rounds=3, defence=defence, canaries=4
    )
    whole = train(settings, tmp_path / "whole", workers=0).rows[-1]
    train(replace(settings, rounds=2), tmp_path / "parts", workers=0)
    resumed = train(settings, tmp_path / "parts", workers=0, resume=True).rows[-1]
    assert {k: v for k, v in resumed.items() if k != "seconds"} == {k: v for k, v in whole.items() if k != "seconds"}
    assert resumed["canaries"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canaries": -1}, r"canaries must be in \[0, 10000\], got -1. Change --canaries"),
        ({"canaries": 10**9}, r"canaries must be in \[0, 10000\]"),
        ({"canaries": 1}, "canaries must be 0, or 2 or more for an interval, got 1"),
        ({"rounds": 0}, "canaries are played beside the rounds of a training, got 16 with rounds = 0"),
        ({"canaries": 21}, "canaries must be at most 20 here, got 21: a client has 20 images"),
        ({"canaries": 2000, "defence": "none"}, "canaries must be at most 785 here, got 2000"),
        ({"defence": "soteria"}, r"can't be measured under defence 'soteria', .* \(on_gradient\)"),
        ({"defence": "dp-sgd+mixup"}, r"can't be measured under defence 'mixup', .* \(on_batch\)"),
        ({"defence": "precode"}, "can't be measured under defence 'precode'"),
    ],
)
def test_what_cannot_be_measured_is_named_before_work(measured, changes, message):
    defence = changes.get("defence", "dp-sgd")
    with pytest.raises(ConfigError, match=message):
        measured(defence, **{key: value for key, value in changes.items() if key != "defence"})
