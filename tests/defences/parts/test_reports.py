from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.defences import Client, Defence, build_defence
from gradveil.defences.parts.reports import Reports, mean_over_clients
from gradveil.engines.simulation import Simulation
from gradveil.errors import DefenceError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from tests.conftest import PROBES


def test_repeated_numbers_become_a_weighted_mean():
    reports = Reports({"share": "a share"})
    reports.add("share", 1.0, weight=3)
    reports.add("share", 0.0, weight=1)
    assert reports.means() == {"share": 0.75}


def test_a_number_without_weight_is_left_out():
    reports = Reports()
    reports.add("share", 1.0, weight=0)
    assert reports.means() == {}


def test_an_undeclared_name_is_refused_and_the_message_says_where_to_declare_it():
    with pytest.raises(DefenceError, match=r"got 'shar'; declared: share. Add 'shar' .* `reports`"):
        Reports({"share": "a share"}).add("shar", 1.0)


def test_only_clients_that_reported_a_number_count():
    assert mean_over_clients([{"a": 2.0}, {}, {"a": 4.0, "b": 1.0}]) == {"a": 3.0, "b": 1.0}
    assert mean_over_clients([]) == {}


def test_a_client_that_a_user_builds_takes_any_name():
    nothing = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0, dtype=torch.long), torch.zeros(0) > 0)
    client = Client(0, 1, nn.Identity(), {}, nothing, {}, {}, SecretStream(0))
    client.report("anything", 2)
    assert client.reports.means() == {"anything": 2.0}


def test_rows_have_the_mean_over_clients_for_any_number_of_workers(tiny):
    settings = replace(tiny, defence=f"{PROBES}:Tell")
    rows = []
    for workers in (0, 2):
        with Simulation(settings, workers=workers) as simulation:
            rows.append([row["reports"] for row in simulation.run()])
    everyone = range(settings.clients)
    assert rows[0] == [{"tell_id": sum(everyone) / len(everyone), "tell_round": n} for n in (1, 2)]
    assert rows[0] == rows[1]


def test_rows_of_a_defence_that_reports_nothing_have_no_reports(tiny):
    with Simulation(tiny, workers=0) as simulation:
        assert all("reports" not in row for row in simulation.run())


def test_a_chain_passes_the_reports_of_its_members_through(tiny):
    defence = build_defence(f"clip+{PROBES}:Tell")
    assert list(defence.reports) == ["tell_id", "tell_round"]
    with Simulation(replace(tiny, rounds=1, defence=f"clip+{PROBES}:Tell"), workers=0) as simulation:
        assert [sorted(row["reports"]) for row in simulation.run()] == [["tell_id", "tell_round"]]


def test_a_number_that_is_not_finite_is_none_in_the_row(tiny):
    class Infinite(Defence):
        reports = {"size": "infinite"}  # noqa: RUF012 - a test's class

        def on_update(self, update, client):
            client.report("size", float("inf"))
            return update

    with Simulation(replace(tiny, rounds=1), workers=0, defence=Infinite()) as simulation:
        assert [row["reports"] for row in simulation.run()] == [{"size": None}]


def test_reporting_changes_no_bits(tiny):
    models = []
    for defence in ("none", f"{PROBES}:Tell"):
        with Simulation(replace(tiny, defence=defence), workers=0) as simulation:
            list(simulation.run())
            models.append(simulation.model)
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
