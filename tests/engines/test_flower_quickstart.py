"""The quickstart app in examples runs as it stands, through Flower's messages in this process."""

import importlib
import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from gradveil.config import read_settings
from gradveil.storage import load_tensors
from tests.engines.flower_apps import OwnGrid, _a_task, asked  # noqa: F401 - a fixture

APP = Path(__file__).parents[2] / "examples" / "flower-quickstart"
SETTINGS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]


@pytest.fixture
def parts(monkeypatch):
    """Return the client and server app as Flower loads them."""
    monkeypatch.syspath_prepend(str(APP))
    found = [SETTINGS["components"][name].partition(":") for name in ("clientapp", "serverapp")]
    yield [getattr(importlib.import_module(module), name) for module, _, name in found]
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def run(parts, folder, **other):
    """Run the server with two of twenty clients, and return the grid and the accuracy after each round."""
    client, server = parts
    config = {**SETTINGS["config"], "tap": str(folder / "tapped"), "save": str(folder / "accuracy.json"), **other}
    grid = OwnGrid(client, 2, config, **{"num-partitions": 20})
    server(grid, Context(7, 1, {}, RecordDict(), config))
    return grid, json.loads((folder / "accuracy.json").read_text())


def test_it_runs_and_every_update_is_noisy_and_tapped(parts, tmp_path):
    torch.manual_seed(0)
    _, accuracy = run(parts, tmp_path, **{"num-server-rounds": 2, "local-epochs": 2})
    assert list(accuracy) == ["0", "1", "2"]
    rounds = sorted(path.name for path in (tmp_path / "tapped").iterdir())
    assert rounds == ["round-1", "round-2"]
    spec = read_settings(tmp_path / "tapped" / "round-1" / "10.toml")
    assert {key: spec[key] for key in ("num_examples", "epochs", "batch_size", "momentum", "lr")} == {
        "num_examples": 200, "epochs": 2, "batch_size": 32, "momentum": 0.9, "lr": 0.05,
    }  # fmt: skip
    assert spec["model"] == f"{(APP / 'quickstart' / 'task.py').resolve()}:Net"
    change = load_tensors(tmp_path / "tapped" / "round-1" / "10.safetensors")
    entries = torch.cat([tensor.flatten() for tensor in change.values()])
    assert 0.009 < float(entries.std()) < 0.013  # so early, weights move by less than the noise of 0.01


def test_without_the_line_the_update_has_no_noise(parts, tmp_path, monkeypatch):
    client, _ = parts
    inner = sys.modules["quickstart.client_app"].train
    monkeypatch.setitem(client._registered_funcs, "train.default", inner)
    torch.manual_seed(0)
    run(parts, tmp_path, **{"num-server-rounds": 1})
    change = load_tensors(tmp_path / "tapped" / "round-1" / "10.safetensors")
    assert float(torch.cat([tensor.flatten() for tensor in change.values()]).std()) < 0.004


def test_a_node_without_its_number_sends_an_error_and_no_weights(parts, tmp_path):
    grid = OwnGrid(parts[0], 2, SETTINGS["config"], **{"num-partitions": 0})
    net = importlib.import_module("quickstart.task").Net()
    reply = grid.answer(asked(net.state_dict()))
    assert reply.has_error()
    assert "code 'internal'" in reply.error.reason
