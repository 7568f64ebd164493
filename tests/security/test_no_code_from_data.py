"""Data never brings code along: folders, specifications and generators' files can't have a Python file imported."""

import json

import pytest
import torch
from safetensors.torch import save_file

import gradveil as package
from gradveil.config import TrainSettings, refuse_code, to_toml
from gradveil.errors import ConfigError
from gradveil.generators.base import load_generator
from gradveil.own import trusting_code
from gradveil.storage import save_tensors

EVIL = """
from pathlib import Path
Path(__file__).with_name("witness").touch()
from gradveil.attacks.gs import Gs as Attack
from gradveil.defences.none import None_ as Nothing
def net(shape=None, num_classes=10):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.fixture
def evil(tmp_path):
    """Return a file that leaves a witness if it is run, and a function that asserts that it was not."""
    path = tmp_path / "evil.py"
    path.write_text(EVIL)

    def harmless():
        return not (tmp_path / "witness").exists()

    return path, harmless


def folder(tmp_path, command, **settings):
    out = tmp_path / "strange"
    out.mkdir()
    known = {"kind": "audit", **settings} if command == "audit" else settings
    (out / "settings.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in known.items()))
    return out


PLACES = [
    ("train", "model", "{}:net"),
    ("train", "defence", "{}:Nothing"),
    ("train", "dataset", "{}:net"),
    ("train", "aux", "{}:net"),
    ("train", "partition", "{}:net"),
    ("train", "defence", "clip+{}:Nothing"),
    ("train", "defence", "loda:extractor={}:net"),
    ("audit", "model", "{}:net"),
    ("audit", "defences", ["none", "{}:Nothing"]),
    ("audit", "attacks", ["{}:Attack"]),
    ("audit", "attacks", ["ggl:generator={}:net"]),
    ("audit", "metrics", ["{}:net"]),
]


@pytest.mark.parametrize(("command", "key", "value"), PLACES)
def test_a_strangers_folder_is_not_run_on_resuming(gradveil, evil, tmp_path, command, key, value):
    path, harmless = evil
    value = value.format(path) if isinstance(value, str) else [text.format(path) for text in value]
    out = folder(tmp_path, command, **{key: value})
    ended = gradveil(command, "--out", out, "--resume", "--workers", 0)
    assert ended.code == 2
    assert "must not name Python files" in ended.last
    assert "--trust-code" in ended.last
    assert harmless()


def test_settings_of_ones_own_do_not_cover_for_the_folder(gradveil, evil, tmp_path):
    """The folder's settings are compared with those given, for which they must not be built."""
    path, harmless = evil
    out = folder(tmp_path, "audit", defences=["none", f"{path}:Nothing"])
    ended = gradveil("audit", "--out", out, "--resume", "--defences", "none", "--rounds", 0, "--workers", 0)
    assert "must not name Python files" in ended.last
    with pytest.raises(ConfigError, match="must not name Python files"):
        package.audit(out=out, resume=True, defences="none", rounds=0, workers=0)
    assert harmless()


@pytest.mark.parametrize("how", ["typed", "config", "trusted"])
def test_what_the_user_names_is_run(gradveil, evil, tmp_path, how):
    path, harmless = evil
    settings = TrainSettings(model=f"{path}:net", dataset=str(tmp_path / "none.npz"))
    out = tmp_path / "mine"
    out.mkdir()
    (out / "settings.toml").write_bytes(to_toml(settings))
    (tmp_path / "c.toml").write_text(f"model = {json.dumps(settings.model)}\n")
    more = {"typed": ["--model", settings.model], "config": ["--config", tmp_path / "c.toml"]}.get(
        how, ["--trust-code"]
    )
    ended = gradveil("train", "--out", out, "--resume", "--workers", 0, *more)
    assert "none.npz must exist" in ended.last  # it went on to read the data
    assert harmless()


def spec(tmp_path, **changes):
    facts = {"model": "mlp", "shape": [1, 8, 8], "num_classes": 10, "kind": "gradient", "num_examples": 1} | changes
    (tmp_path / "spec.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items()))
    return tmp_path / "spec.toml"


@pytest.mark.parametrize(
    ("key", "value"), [("model", "{}:net"), ("defence", "{}:Nothing"), ("public_data", "{}:net"), ("model", "table")]
)
def test_a_specification_is_not_run(gradveil, evil, tmp_path, key, value):
    path, harmless = evil
    save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors")
    given = spec(tmp_path, **{key: value.format(path)})
    if value == "table":
        given.write_text(given.read_text().replace('model = "table"\n', "") + f'[model]\nname = "{path}:net"\n')
    files = ["--model-file", tmp_path / "m.safetensors", "--update", tmp_path / "m.safetensors", "--spec", given]
    ended = gradveil("attack", *files, "--attack", "gs:iterations=1", "--out", tmp_path / "out")
    assert ended.code == 2
    assert "must not name Python files" in ended.last
    assert harmless()
    ended = gradveil("attack", *files, "--attack", "gs:iterations=1", "--out", tmp_path / "out", "--trust-code")
    assert "must not name Python files" not in ended.last
    assert not harmless() or key == "public_data"


def test_a_generators_file_is_not_run(evil, tmp_path):
    path, harmless = evil
    save_tensors(tmp_path / "g.safetensors", {"w": torch.ones(1)}, {"generator": f"{path}:net", "classes": "10"})
    with pytest.raises(ConfigError, match=r"g.safetensors must not name Python files"):
        load_generator(str(tmp_path / "g.safetensors"), (1, 8, 8), 10)
    assert harmless()
    with trusting_code(), pytest.raises(ConfigError, match="must be a subclass"):
        load_generator(str(tmp_path / "g.safetensors"), (1, 8, 8), 10)
    assert not harmless()


def test_a_generators_file_can_not_ask_for_more_memory_than_it_has_numbers(tmp_path):
    facts = {"generator": "mlp-gan:latent=100000,hidden=100000000", "classes": "10"}
    save_tensors(tmp_path / "g.safetensors", {"w": torch.ones(1)}, facts)
    with pytest.raises(ConfigError, match="weights that do not fit"):
        load_generator(str(tmp_path / "g.safetensors"), (1, 8, 8), 10)


def test_a_report_runs_nothing(gradveil, evil, tmp_path):
    path, harmless = evil
    everywhere = dict.fromkeys(("model", "dataset", "aux", "partition", "weights", "normalise"), f"{path}:net")
    audit = {"defences": [f"{path}:Nothing"], "metrics": [f"{path}:net"]}
    for command, more in {"audit": audit, "train": {"defence": f"{path}:Nothing"}}.items():
        out = folder(tmp_path, command, **everywhere | more)
        row = {"kind": "privacy", "defence": f"{path}:Nothing", "attack": f"{path}:Attack", "round": 1, "accuracy": 0.5}
        (out / "rows.jsonl").write_text(json.dumps(row) + "\n")
        assert gradveil("report", out).code == 0
        out.rename(tmp_path / command)
    assert harmless()


def test_trust_ends_with_its_block():
    with pytest.raises(ConfigError), trusting_code(False):
        refuse_code({"a": ["x.py:Y"]}, "file")
    with trusting_code():
        refuse_code({"a": {"b": "x.py:Y"}}, "file")
    with pytest.raises(ConfigError, match=r"got 'x\.py:Y'"):
        refuse_code({"a": {"b": "x.py:Y"}}, "file")
