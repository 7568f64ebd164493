"""The price of a defence: times of the same rounds, and the privacy budget of the worst client."""

import dataclasses
import re
import time

import pytest

from gradveil.audits import audit, make_audit_settings, utility
from gradveil.audits.plan import Cell
from gradveil.audits.tapping import world_of
from gradveil.audits.utility import TIMED_ROUNDS, price_cell
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.defences.loda import Loda
from gradveil.engines.in_process import InProcess
from gradveil.engines.simulation import Simulation


def price(settings, defence, out=None):
    cell = Cell("utility-00000", "utility", defence, 0)
    (row,) = price_cell(cell, settings, load_dataset(settings.dataset), out=out)
    return row


def training_of(settings, defence):
    return world_of(settings, defence, 0, load_dataset(settings.dataset)).training


@pytest.fixture
def clocked(monkeypatch):
    """Make rounds of simulations take stated times, and return the order in which they were played."""
    played, step = [], Simulation.step

    def clocked_step(simulation, number):
        row, result = step(simulation, number)
        name = simulation.settings.defence
        played.append((name, number))
        took = {"none": 0.5, "prune": 1.5}[name] * (100 if number == 1 else number)  # the first round warms caches
        return row | {"seconds": took}, result

    monkeypatch.setattr(utility.Simulation, "step", clocked_step)
    return played


def test_overhead_is_the_ratio_of_the_same_rounds_taken_in_turns(small, clocked):
    rounds = TIMED_ROUNDS + 2
    row = price(small(rounds=rounds), "prune")
    assert row["overhead"] == 3.0
    assert row["overhead"] == row["round_seconds"] / row["round_seconds_undefended"]
    assert clocked[:4] == [("none", 1), ("prune", 1), ("prune", 2), ("none", 2)]  # the order changes
    assert sum(name == "none" for name, _ in clocked) == TIMED_ROUNDS
    assert [number for name, number in clocked if name == "prune"] == list(range(1, rounds + 1))


def test_other_work_on_the_machine_does_not_count(small, monkeypatch):
    """Rounds are measured in computing time: sleeping, as a process does that waits for a core, takes none."""
    honest = InProcess.train

    def slow(*arguments):
        time.sleep(0.5)
        return honest(*arguments)

    monkeypatch.setattr(InProcess, "train", slow)
    assert price(small(rounds=1), "none")["round_seconds"] < 0.5


def test_none_is_not_trained_twice(small, clocked):
    assert price(small(rounds=2), "none")["overhead"] == 1.0
    assert clocked == [("none", 1), ("none", 2)]


def test_the_row_has_what_the_defence_reported_in_the_last_round(small):
    settings = small(rounds=2, defences="dp-sgd", batch_norm="freeze")
    row = price(settings, "dp-sgd")
    with Simulation(training_of(settings, "dp-sgd"), workers=0) as simulation:
        last = list(simulation.run())[-1]
    assert row["reports"] == last["reports"]
    assert row["reports"].keys() == {"dp_sgd_clipped"}
    assert price(settings, "none")["reports"] is None


def test_the_figures_are_those_of_the_training(small):
    settings = small(rounds=3, defences="prune")
    row = price(settings, "prune")
    with Simulation(training_of(settings, "prune"), workers=0) as simulation:
        last = list(simulation.run())[-1]
    assert (row["accuracy"], row["accuracy_sensitive"]) == (last["accuracy"], last["accuracy_sensitive"])
    assert row["loss"] == last["loss"]
    for key in ("accuracy_balanced", "accuracy_majority"):
        assert 0 < row[key] == last[key] < 1


def test_the_budget_is_that_of_the_worst_client(small):
    settings = small(rounds=2, partition="dirichlet:alpha=1.0", defences="dp-sgd")
    with Simulation(settings.training("dp-sgd", 0), workers=0) as simulation:
        sizes, how = set(simulation.sizes), utility.Protocol.of(simulation.settings).local
    each = [build_defence("dp-sgd").budget(how.releases(size, 2)).epsilon for size in sizes]
    assert len(set(each)) > 1
    assert price(settings, "dp-sgd")["epsilon"] == max(each)


@pytest.mark.parametrize(
    ("defence", "marked"), [("dcs2:steps=1", True), ("dcs2:steps=1+prune", True), ("prune", False)]
)
def test_a_price_says_how_many_images_it_protected(small, defence, marked):
    why = price(small(rounds=1, sensitive="0.2", protocol="fedavg"), defence)["why"]
    counts = re.match(r"([\d,]+) of ([\d,]+) images are marked as sensitive", why)
    assert bool(counts) == marked
    if counts:
        assert int(counts[1].replace(",", "")) == pytest.approx(0.2 * int(counts[2].replace(",", "")), abs=1)
    else:
        assert why == ""


def test_obscured_images_are_reused_but_states_are_not(small, tmp_path, monkeypatch):
    made, honest = [], Loda.obscured

    def counting(self, features, images, begun):
        made.append(len(images))
        return honest(self, features, images, begun)

    monkeypatch.setattr(Loda, "obscured", counting)
    settings, defence = small(rounds=2), "loda:start=noise,steps=1,layers=all+fedkl"
    settings = dataclasses.replace(settings, model="lenet-dlg")
    first = price(settings, defence, tmp_path)
    assert made
    made.clear()
    again = price(settings, defence, tmp_path)
    assert made == []
    assert (again["accuracy"], again["loss"]) == (first["accuracy"], first["loss"])


@pytest.mark.parametrize(("lr", "guessed"), [(1e-9, True), (0.05, False)])
def test_a_price_says_whether_the_training_learned(lr, guessed):
    settings = make_audit_settings(
        {
            "dataset": "mnist-5k",
            "model": "logistic",
            "partition": "iid:images=60",
            "clients": 2,
            "rounds": 2,
            "lr": lr,
            "protocol": "fedavg",
            "targets": 1,
        }
    )
    assert price(settings, "none")["at_chance"] is guessed


def test_one_update_never_costs_more_than_the_training_that_contains_it(small, tmp_path):
    """Both are of the same clients: the same images, batches and sampling."""
    few = {"rounds": 3, "targets": 1, "attacks": "idlg:iterations=1", "metrics": "psnr"}
    rows = audit(small(**few, defences="dp-sgd,pogz,ca-fl,clip+dp-sgd"), tmp_path / "run", workers=0).rows
    training = {row["defence"]: row["epsilon"] for row in rows if row["kind"] == "utility"}
    updates = [row for row in rows if row["kind"] == "privacy" and row["defence"] != "none"]
    assert updates
    for row in updates:
        assert 0 < row["epsilon"] <= training[row["defence"]]
