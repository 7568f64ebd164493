"""Sites note digests of what they received, and comparing them finds a victim that got another model."""

import hashlib
import json
import stat

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gradveil.cli import app
from gradveil.data import load_dataset
from gradveil.engines.flower import flower_training
from gradveil.engines.site_broadcasts import Heard, disagreements, note, read_heard
from gradveil.errors import ConfigError
from tests.engines.test_flower import LocalGrid, _a_task, settings  # noqa: F401 - fixtures
from tests.security.sites import RUN, OneSite, code, start

ONE = Heard("run", 1, "train", "aa", "", "shape")


class TwoFaced(LocalGrid):
    """A server that sends one node another model, from the second round on."""

    victim = 98

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            content = message.content
            second = "round" in content and content["round"]["number"] == 2
            if second and message.metadata.message_type == "train" and message.metadata.dst_node_id == self.victim:
                model = content["model"].to_torch_state_dict()
                name = next(iter(model))
                content["model"] = ArrayRecord({**model, name: model[name] + 1e-6})
        return super().send_and_receive(messages, timeout=timeout)


def files(folder):
    return sorted(map(str, folder.glob("broadcasts-*.jsonl")))


@pytest.mark.parametrize("defence", ["none", "entangle"])
def test_an_honest_server_sends_all_sites_the_same(settings, tmp_path, defence):  # noqa: F811
    """Under entangle one client trains before there is anything beside the model."""
    settings = settings.__class__(**{**vars(settings), "defence": defence})
    grid = LocalGrid(settings, tmp_path / "sites")
    rows = list(flower_training(grid, settings, load_dataset(settings.dataset)).run())
    assert len(rows) == 2
    ended = CliRunner().invoke(app, ["compare", *files(tmp_path / "sites")])
    assert ended.exit_code == 0, ended.output
    assert "All 3 sites received the same in 2 broadcasts." in ended.output


def test_a_victim_with_another_model_is_found(settings, tmp_path):  # noqa: F811
    grid = TwoFaced(settings, tmp_path / "sites")
    list(flower_training(grid, settings, load_dataset(settings.dataset)).run())
    ended = CliRunner().invoke(app, ["compare", "--json", *files(tmp_path / "sites")])
    assert ended.exit_code == 3
    (sentence,) = json.loads(ended.output)["differences"]
    assert "Round 2 (train)" in sentence
    assert "the model differs" in sentence
    assert sentence.endswith("broadcasts-2.jsonl.")


def test_the_digest_is_of_the_bytes_that_arrived(tmp_path):
    """The oracle hashes numpy's own bytes, of another model than the site's network begins with."""
    model = {name: torch.full_like(tensor, 0.25) for name, tensor in start().items()}
    assert code(OneSite(tmp_path).train(1, model)) == ""
    oracle = hashlib.sha256()
    for name in sorted(model):
        values = np.full(tuple(model[name].shape), 0.25, np.float32)
        oracle.update(f"tensor {name} {values.shape} torch.float32\n".encode() + values.tobytes())
    (heard,) = read_heard(tmp_path / "broadcasts-0.jsonl")
    assert (heard.round, heard.work, heard.model, heard.public) == (1, "train", oracle.hexdigest(), "")
    assert stat.S_IMODE((tmp_path / "broadcasts-0.jsonl").stat().st_mode) == 0o600


def test_what_is_refused_is_noted_too_and_a_repeated_request_once(tmp_path):
    site, other = OneSite(tmp_path), {name: tensor + 1 for name, tensor in start().items()}
    assert [code(site.train(1)), code(site.train(1)), code(site.train(1, other))] == ["", "", "round"]
    lines = read_heard(tmp_path / "broadcasts-0.jsonl")
    assert [heard.round for heard in lines] == [1, 1]
    assert "the model differs" in disagreements({"this site": lines})[0]


def test_another_normalisation_for_one_site_is_found(tmp_path):
    """It changes gradients as other weights do, and is no tensor of the model."""
    sites = {}
    for name, std in (("a", 0.5), ("b", 0.001)):
        site = OneSite(tmp_path / name)
        content = ConfigRecord({"shape": [1, 8, 8], "num-classes": 4, "mean": [0.5], "std": [std]})
        site.ask(
            "train", RUN, model=ArrayRecord(start()), round=ConfigRecord({"number": 1}), network=content,
            before=ConfigRecord({"trained": 0}), public=ArrayRecord({}), step=ConfigRecord({"lr": RUN.lr}),
        )  # fmt: skip
        sites[name] = read_heard(tmp_path / name / "broadcasts-0.jsonl")
    (sentence,) = disagreements(sites)
    assert "the description of images and classes differs" in sentence


def test_a_site_in_a_run_of_its_own_is_named():
    other = Heard("another run", 1, "train", "aa", "", "shape")
    (sentence,) = disagreements({"a": [ONE], "b": [ONE], "victim": [other]})
    assert sentence.startswith("victim has no round in common")


@given(st.lists(st.sampled_from(["aa", "bb"]), min_size=2, max_size=6))
def test_sites_agree_exactly_if_all_digests_are_equal(digests):
    sites = {str(number): [Heard("run", 1, "train", value)] for number, value in enumerate(digests)}
    assert bool(disagreements(sites)) == (len(set(digests)) > 1)


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"run": 1}', "no JSON", '{"run": "r", "round": "1"}'])
def test_a_damaged_file_is_named(tmp_path, line):
    path = tmp_path / "broadcasts-0.jsonl"
    note(path, ONE)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="broadcasts-0"):
        read_heard(path)


def test_comparing_needs_two_files(tmp_path):
    note(tmp_path / "a.jsonl", ONE)
    ended = CliRunner().invoke(app, ["compare", str(tmp_path / "a.jsonl")])
    assert isinstance(ended.exception, ConfigError)
    with pytest.raises(ConfigError, match="can't be read"):
        read_heard(tmp_path / "missing.jsonl")
