from dataclasses import replace

import pytest

from gradveil.engines.simulation import Simulation
from gradveil.errors import DefenceError, WorkerError
from tests.conftest import PROBES


def test_an_error_in_a_worker_keeps_its_class_and_words(tiny):
    with (
        pytest.raises(DefenceError, match="refuse must not be asked"),
        Simulation(replace(tiny, defence=f"{PROBES}:Refuse"), workers=2) as simulation,
    ):
        simulation.step(1)


def test_a_bug_in_a_worker_shows_its_traceback(tiny):
    with (
        pytest.raises(RuntimeError, match=r"probes\.py"),
        Simulation(replace(tiny, defence=f"{PROBES}:Bug"), workers=2) as simulation,
    ):
        simulation.step(1)


def test_a_lost_worker_is_noticed(tiny):
    with (
        pytest.raises(WorkerError, match="exit code -9"),
        Simulation(replace(tiny, defence=f"{PROBES}:Crash"), workers=2) as simulation,
    ):
        simulation.step(1)


def test_more_clients_than_rows_of_shared_memory(tiny):
    settings = replace(tiny, clients=40, rounds=1)
    with Simulation(settings, workers=2) as simulation:
        _, played = simulation.step(1)
    assert sorted(played.clients) == list(range(40))
