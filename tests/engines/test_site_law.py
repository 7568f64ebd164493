"""A site's own law over several runs: the ε of all of them, agreed lists, and a history of every answer."""

import contextlib
import json
from dataclasses import replace

import pytest

from gradveil.data import load_dataset
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.engines.flower import flower_training
from gradveil.engines.site_history import read_history
from gradveil.errors import RefusedError, RunFolderError
from tests.engines.test_flower import LocalGrid, _a_task, settings  # noqa: F401 - fixtures

VEIL = {"defence": "veil:mu=2", "model": "patches:filters=4", "rounds": 2, "clients": 2}


def train(run, folder, **node_config):
    """Train over Flower's messages; return the lines of client 0's history."""
    grid = LocalGrid(run, folder, **node_config)
    list(flower_training(grid, run, load_dataset(run.dataset)).run())
    return read_history(folder / "history-0.jsonl")


def test_epsilon_is_limited_over_all_runs(settings, tmp_path):  # noqa: F811 - a fixture
    run, sites = replace(settings, **VEIL), tmp_path / "sites"
    limit = epsilon_of(8**0.5, 1e-4) + 1e-6  # of two runs with mu = 2 each
    one = train(run, sites, **{"max-epsilon": limit})
    assert [(line.round, line.work) for line in one] == [(1, "train"), (2, "train")]
    assert [line.mu for line in one] == pytest.approx([2 / 2**0.5, 2])
    two = train(replace(run, seed=1), sites, **{"max-epsilon": limit})
    assert [line.total for line in two] == pytest.approx([epsilon_of(mu**0.5, 1e-4) for mu in (2, 4, 6, 8)])
    assert len({line.run for line in two}) == 2
    with pytest.raises(RefusedError, match="more privacy than its limit over all runs"):
        train(replace(run, seed=2), sites, **{"max-epsilon": limit})
    assert read_history(sites / "history-0.jsonl") == two  # nothing was trained or sent


def test_a_round_beyond_the_limit_is_refused_before_it_is_trained(settings, tmp_path):  # noqa: F811
    run, sites = replace(settings, **VEIL, sampled=1), tmp_path / "sites"  # who is sampled can't be foreseen
    limit, refusals = {"max-epsilon": epsilon_of(2, 1e-4) + 1e-6}, list[str]()
    for seed in range(9):
        with contextlib.suppress(RefusedError):
            train(replace(run, seed=seed), sites, **limit)
            continue
        refusals.append("refused")
    assert len(refusals) >= 6  # two sites, each with two rounds to give, spread over nine runs of two
    ledger = json.loads((sites / "ledger-0.json").read_text())
    lines = read_history(sites / "history-0.jsonl")
    assert ledger["updates"] == ledger["answers"] == len(lines) <= 2


@pytest.mark.parametrize("defence", ["none", "prune", "gaussian"])
def test_a_limit_needs_a_guarantee(settings, tmp_path, defence):  # noqa: F811
    with pytest.raises(RefusedError, match="or has no guarantee"):
        train(replace(settings, defence=defence), tmp_path / "sites", **{"max-epsilon": 100.0})
    assert not (tmp_path / "sites" / "history-0.jsonl").exists()


def test_answers_without_a_guarantee_are_noted_as_such(settings, tmp_path):  # noqa: F811
    run = replace(settings, defence="prune", rounds=1, clients=2)
    (line,) = train(run, tmp_path / "sites", defence="veil:mu=2,at=client, prune")
    assert (line.epsilon, line.total, line.work) == (None, None, "train")
    heard = json.loads((tmp_path / "sites" / "broadcasts-0.jsonl").read_text())
    assert (line.model, line.run) == (heard["model"], heard["run"])


def test_a_damaged_history_stops_the_site(settings, tmp_path):  # noqa: F811
    run = replace(settings, defence="prune", rounds=1, clients=2)
    train(run, tmp_path / "sites")
    (tmp_path / "sites" / "history-0.jsonl").unlink()
    with pytest.raises(RunFolderError, match="private state, keys for example, is lost or damaged"):
        train(replace(run, seed=1), tmp_path / "sites")
