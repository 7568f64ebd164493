"""The lines of docs/flower.md for an app that one already has are run as they stand."""

import re
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from tests.docs.test_measured import generated
from tests.engines.flower_apps import OwnGrid, _a_task, asked  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
PART = (ROOT / "docs" / "flower.md").read_text().split("## Protect the app that you already have\n")[1]
BLOCKS = re.findall(r"```python\n(.*?)```", PART.split("\n## ")[0], re.DOTALL)
CONFIG = ConfigRecord({"lr": 0.05, "server-round": 1})


@pytest.fixture(autouse=True)
def _quickstart(monkeypatch, tmp_path):
    """Let the page's lines find the quickstart's task, and write into a new folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "flower-quickstart"))
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def run(block):
    names = {"__name__": "lines"}
    exec(block, names)  # noqa: S102 - our own documentation
    return names


def one_of_fifty(app, **node):
    return OwnGrid(app, 1, {"batch-size": 32, "local-epochs": 1}, **{"num-partitions": 50, **node})


def sent_by(grid, arrays):
    reply = grid.answer(asked(arrays, config=CONFIG))
    assert not reply.has_error(), reply.error
    assert reply.content["metrics"]["num-examples"] == 80
    return reply.content["arrays"].to_torch_state_dict()


def test_there_are_four_blocks():
    protect, train, keys, tap = BLOCKS
    assert "protect(" in protect
    assert "dp-sgd" in train
    assert "shared_arrays" in keys
    assert "Tap(" in tap


def test_the_line_protects_an_app():
    app = run(BLOCKS[0])["app"]
    from quickstart import client_app, task

    app.train()(client_app.train)
    arrays = task.Net().state_dict()
    sent = sent_by(one_of_fifty(app), arrays)
    change = torch.cat([(sent[name] - tensor).flatten() for name, tensor in arrays.items()])
    assert 0.009 < float(change.std()) < 0.013


def test_training_under_dp_sgd_replies_with_weights():
    app = run(BLOCKS[1])["app"]
    from quickstart import task

    arrays = task.Net().state_dict()
    sent = sent_by(one_of_fifty(app), arrays)
    assert list(sent) == list(arrays)
    assert all(not torch.equal(sent[name], tensor) for name, tensor in arrays.items())


def test_keys_stay_in_the_private_folder(tmp_path):
    names = run(BLOCKS[2])
    arrays = names["initial_arrays"].to_torch_state_dict()
    grid = one_of_fifty(names["app"], **{"private-folder": str(tmp_path / "private")})
    assert list(sent_by(grid, arrays)) == list(arrays)
    assert list((tmp_path / "private" / "run-7" / "0" / "private").glob("state-*"))
    scored = grid.answer(asked(arrays, "evaluate"))
    assert 0 <= scored.content["metrics"]["accuracy"] <= 1


def test_the_tap_stores_what_the_server_sees(tmp_path):
    strategy = run(BLOCKS[3])["strategy"]
    from quickstart import client_app, task

    grid = OwnGrid(client_app.app, 2, {"batch-size": 32, "local-epochs": 1}, **{"num-partitions": 50})
    strategy.start(grid, ArrayRecord(task.Net().state_dict()), 1, train_config=ConfigRecord({"lr": 0.05}))
    names = {path.name for path in (tmp_path / "tapped" / "round-1").iterdir()}
    assert names == {"model.safetensors", "10.safetensors", "10.toml", "11.safetensors", "11.toml"}


def test_the_figures_of_the_quickstart_are_the_measured_ones():
    page, wanted, document = generated("flower_quickstart", "flower-quickstart", "flower.md")
    assert [text for text in wanted if text not in page] == []
    runs = [run for runs in document["figures"].values() for run in runs.values()]
    assert all(run["failures"] == 0 for run in runs)
    assert [run["updates_tapped"] for run in runs] == [6, 6, 100, 100]  # nodes times rounds, as the page says
