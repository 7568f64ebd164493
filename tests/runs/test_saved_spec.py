"""Saved updates carry their specification: what was trained can be attacked without retyping a setting."""

import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gradveil.cli import app
from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.federated.protocol import Protocol
from gradveil.models.base import parse_normalisation
from gradveil.runs.train import train
from gradveil.runs.update_spec import read_spec

SETTINGS = TrainSettings(
    model="lenet-dlg", clients=2, rounds=2, partition="iid:images=6", batch_size=3, epochs=2, lr=0.2, lr_decay=0.5,
    momentum=0.5, save_rounds=(2,),
)  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"defence": "prune:fraction=0.5", "normalise": "none"},
        {"defence": "veil:mu=3", "model": "patches:filters=4", "momentum": 0.0},
        {"aggregation": "secure", "normalise": "0.5/0.25"},
    ],
)
def test_a_specification_states_the_settings_of_the_training(tmp_path, other):
    settings = replace(SETTINGS, **other)
    train(settings, tmp_path / "run", workers=0)
    folder = tmp_path / "run" / "rounds" / "000002"
    names = ["mean"] if "aggregation" in other else ["0", "1"]
    assert sorted(path.stem for path in folder.glob("*.toml")) == [f"update-{name}" for name in names]
    for name in names:
        spec = read_spec(folder / f"update-{name}.toml")
        assert (spec.model, spec.shape, spec.num_classes, spec.kind) == (settings.model, (1, 28, 28), 10, "change")
        digits = load_dataset("mnist-5k")
        wanted = parse_normalisation(settings.normalise, 1) if settings.normalise != "dataset" else None
        found = parse_normalisation(spec.normalise, 1)
        if settings.normalise == "dataset":
            assert (found.mean, found.std) == (pytest.approx(digits.mean), pytest.approx(digits.std))
        else:
            assert found == wanted
        if "veil" not in settings.defence:  # which chooses its own local training
            assert (spec.lr, spec.num_examples) == (0.1, 12 if name == "mean" else 6)
            assert spec.local_steps() == Protocol.of(settings).local


def test_the_command_in_the_specification_works_as_it_stands(tmp_path, monkeypatch):
    one = replace(SETTINGS, algorithm="fedsgd", partition="iid:images=1", batch_size=1, save_rounds=(1,), rounds=1)
    train(one, tmp_path / "run", workers=0)
    folder = tmp_path / "run" / "rounds" / "000001"
    command = (folder / "update-1.toml").read_text().splitlines()[1].removeprefix("# gradveil ")
    monkeypatch.chdir(folder)
    words = shlex.split(command)
    words[words.index("gs")] = "gs:iterations=2"
    done = CliRunner().invoke(app, words)
    assert done.exception is None
    assert (folder / "attack" / "reconstruction.safetensors").exists()
