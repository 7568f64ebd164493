"""A site answers each round once, within its own limits, and protects the images that it marked itself."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch

from gradveil.data import load_dataset
from gradveil.engines.flower import flower_training
from tests.engines.test_flower import LocalGrid
from tests.security.sites import IMAGES, RUN, OneSite, code, private_set, start, update_of, with_seed


def moved(amount):
    """Return weights other than those of the start."""
    return {name: tensor + amount for name, tensor in start().items()}


def test_one_round_has_one_answer(tmp_path):
    """0.1 answered one round 200 times, each with new noise, so that the mean had none."""
    updates = {update_of(OneSite(tmp_path).train(1)) for _ in range(10)}
    assert len(updates) == 1
    assert None not in updates
    site = OneSite(tmp_path)
    assert [code(site.train(1, moved(0.1))), code(site.train(1, lr=0.04))] == ["round", "rate"]
    assert code(site.train(2, moved(0.1))) == ""
    assert code(site.train(1)) == "round"


@pytest.mark.parametrize("number", [0, -1, 10, 2**62, math.nan, 1.0, True, "1"])
def test_impossible_rounds_are_refused(tmp_path, number):
    assert code(OneSite(tmp_path).train(number)) == "round"


@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.05, 0.0, 1e4, 0.051, "0.05", True])
def test_a_rate_other_than_the_agreed_one_is_refused(tmp_path, lr):
    assert code(OneSite(tmp_path).train(1, lr=lr)) in ("rate", "message")


@pytest.mark.parametrize("defence", ["gaussian:std=0.1", "laplace", "pogz", "dp-sgd", "none"])
def test_a_run_with_a_huge_rate_is_refused_as_noise_of_a_fixed_size_would_hide_nothing(tmp_path, defence):
    run = replace(RUN, defence=defence, lr=1e4)
    site = OneSite(tmp_path, run)
    assert code(site.ask("query")) == "rate"
    assert update_of(site.train(1)) is None


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"epochs": 11}, "epochs"), ({"batch_size": 1}, "batch"), ({"batch_size": 5000}, "batch"),
        ({"rounds": 1001}, "rounds"), ({"algorithm": "fedsgd", "batch_size": 1}, "batch"),
        ({"defence": "none"}, "defence"), ({"defended": (1,), "clients": 2}, "defence"), ({"model": "mlp"}, "model"),
    ],
)  # fmt: skip
def test_a_run_beyond_the_limits_is_refused(tmp_path, asked, wanted):
    site = OneSite(tmp_path, replace(RUN, **asked), agreed=RUN)
    assert code(site.ask("query")) == wanted
    assert code(site.train(1)) == wanted


def test_a_site_must_name_its_defence(tmp_path):
    site = OneSite(tmp_path)
    del site.node["defence"]
    assert code(site.ask("query")) == "policy"


def test_another_seed_does_not_start_the_count_of_updates_again(tmp_path):
    codes = [code(OneSite(tmp_path, with_seed(seed), max_rounds=9).train(number))
             for seed in range(2) for number in range(1, 10)]  # fmt: skip
    assert codes == [""] * 9 + ["rounds"] * 9


def test_a_replay_draws_no_new_key(tmp_path):
    run = replace(RUN, model="lenet5", defence="fedkl:length=8", clients=2, partition="iid:images=8", rounds=2)
    digits = load_dataset("mnist-5k")
    training = flower_training(LocalGrid(run, tmp_path, repeatable=False), run, digits)
    before = dict(training.model)
    training.step(1)
    kept = fingerprints(tmp_path)
    assert any("state" in name for name in kept)
    for _ in range(3):  # the server forgets, and asks again
        training.model = dict(before)
        training.step(1)
    assert fingerprints(tmp_path) == kept


def fingerprints(folder):
    """Return a digest of every file of the sites but their ledgers."""
    files = [path for path in folder.rglob("*") if path.is_file() and "ledger" not in path.name]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_what_is_sensitive_comes_from_the_site_alone(tmp_path):
    marked = OneSite(tmp_path / "a", replace(RUN, sensitive="none"), sensitive="0/3")
    assert marked.ask("query").config_records["facts"]["sensitive"] == 2
    unmarked = OneSite(tmp_path / "b", replace(RUN, sensitive="1.0"))
    assert unmarked.ask("query").config_records["facts"]["sensitive"] == 0


def test_a_defence_of_marked_images_is_refused_by_a_site_that_marked_none(tmp_path):
    run = replace(RUN, defence="dcs2", sensitive="1.0")
    assert code(OneSite(tmp_path / "a", run).ask("query")) == "unmarked"
    assert code(OneSite(tmp_path / "b", run, sensitive="none").ask("query")) == ""  # it says so itself
    assert code(OneSite(tmp_path / "c", run, sensitive="0/1").ask("query")) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_refused(tmp_path, value):
    model = start() | {"linear.bias": torch.full((4,), value)}
    assert code(OneSite(tmp_path).train(1, model)) == "message"


def test_a_damaged_ledger_stops_the_site(tmp_path):
    OneSite(tmp_path).train(1)
    path = tmp_path / "ledger-0.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert code(OneSite(tmp_path).train(2)) == "state"


def test_an_honest_site_trains(tmp_path):
    site = OneSite(tmp_path, data=private_set())
    assert site.ask("query").config_records["facts"]["images"] == IMAGES
    assert [code(site.train(number)) for number in (1, 2, 5)] == ["", "", ""]
