"""The Python functions do what the commands do, and take objects and paths where commands take texts."""

import inspect
import json
import pydoc
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import gradveil as package
from gradveil import engines
from gradveil.attacks import Attack
from gradveil.attacks.dlg import Dlg
from gradveil.audits.settings import AuditSettings
from gradveil.config import TrainSettings, make_train_settings, read_settings
from gradveil.data import Dataset, Split
from gradveil.data.partition import Iid, Partition
from gradveil.defences import Chain, Client, Defence
from gradveil.defences.prune import Prune
from gradveil.errors import ConfigError, RunFolderError, UnknownNameError
from gradveil.models import create_model
from gradveil.own import ADOPTED, adopt
from gradveil.registry import build, spec_of
from gradveil.runs.given import as_texts, usable_workers
from gradveil.types import Update

SMALL = {"clients": 2, "partition": Iid(images=10), "rounds": 1, "workers": 0}
TINY = {**SMALL, "model": "logistic", "targets": 1, "attacks": Dlg(iterations=1)}


@dataclass(frozen=True)
class Scaled(Defence):
    """Divide updates."""

    strength: float = 1.0
    labels: tuple[str, ...] = ()

    def on_update(self, update: Update, client: Client) -> Update:
        return update.map(lambda tensor: tensor / self.strength)


def locally():
    """Return a component of a class that has no name in its module, as in a notebook."""

    @dataclass(frozen=True)
    class Session(Scaled):
        """Divide updates, in this session."""

    return Session(strength=2.0)


def test_train_does_what_the_command_does(gradveil, tmp_path):
    result = package.train(**SMALL, model="logistic", defence=Prune(fraction=0.5), out=str(tmp_path / "api"))
    options = ("--clients", 2, "--partition", "iid:images=10", "--rounds", 1, "--workers", 0, "--model", "logistic")
    ended = gradveil("train", *options, "--defence", "prune:fraction=0.5", "--out", tmp_path / "cli", "--json")
    document = json.loads(ended.out)
    assert result.accuracy == document["accuracy"]
    assert (tmp_path / "api/settings.toml").read_bytes() == (tmp_path / "cli/settings.toml").read_bytes()
    assert (tmp_path / "api/model.safetensors").read_bytes() == (tmp_path / "cli/model.safetensors").read_bytes()
    assert repr(result) == f"TrainResult(rounds=1, accuracy={result.accuracy:.2%}, report='{tmp_path}/api/report.html')"
    html = result._repr_html_()
    assert "data:image/png;base64," in html
    assert (tmp_path / "api/report.html").as_uri() in html


def test_audit_takes_objects_and_texts_and_shows_itself(tmp_path):
    chain = Chain((Prune(fraction=0.5), Scaled(strength=2.0)))
    result = package.audit(**TINY, defences=["prune:fraction=0.9", Scaled(strength=3.0), chain], out=tmp_path / "run")
    own = f"{__file__}:Scaled"
    names = list(dict.fromkeys(row["defence"] for row in result.rows))
    assert names == ["none", "prune:fraction=0.9", f"{own}:strength=3.0", f"prune:fraction=0.5+{own}:strength=2.0"]
    assert not result.failed
    assert repr(result) == f"AuditResult(rows={len(result.rows)}, report='{tmp_path}/run/report.html')"
    html = result._repr_html_()
    assert html.count("data:image/png;base64,") == 1 + len(names)
    assert "prune:fraction=0.9" in html
    assert (tmp_path / "run/report.html").as_uri() in html


def test_an_audit_has_verdicts_like_the_command(tmp_path):
    criteria = ["mse<1000", "psnr>blind+1000"]
    result = package.audit(**TINY, defences="none", out=tmp_path / "run", fail_on=criteria)
    assert [verdict.criterion for verdict in result.verdicts] == criteria
    assert [verdict.met for verdict in result.verdicts] == [True, False]
    assert result.verdict == json.loads((tmp_path / "run" / "privacy_card.json").read_text())["verdict"] == "fails"
    assert "fails" in repr(result)
    with pytest.raises(ConfigError, match="Did you mean 'psnr'"):
        package.audit(**TINY, out=tmp_path / "other", fail_on="pnsr>20")
    assert not (tmp_path / "other").exists()


def test_a_class_of_this_session_runs_in_this_process(tmp_path):
    mine = locally()
    result = package.audit(**TINY | {"workers": None}, defences=mine, out=tmp_path / "run")
    assert {row["defence"] for row in result.rows} == {"none", "session:strength=2.0"}
    assert not result.failed
    with pytest.raises(ConfigError, match=r"'session:strength=2.0' is defined in this session.*got workers=2"):
        package.audit(**TINY | {"workers": 2}, defences=[mine])


def test_a_name_of_the_package_can_not_be_taken():
    @dataclass(frozen=True)
    class Prune(Defence):
        """Take a name."""

    with pytest.raises(ConfigError, match=r"'prune', which is one of gradveil's defences. Rename the class"):
        package.train(defence=Prune())
    assert "prune" not in ADOPTED


def test_a_name_of_another_kind_may_be_taken(tmp_path):
    @dataclass(frozen=True)
    class Dlg(Scaled):
        """Bear the name of an attack."""

    result = package.audit(**TINY | {"rounds": 0}, defences=Dlg(strength=2.0), out=tmp_path / "run")
    found = {(row["defence"], row["attack"]) for row in result.rows if row["kind"] == "privacy"}
    assert found == {("none", "dlg:iterations=1"), ("dlg:strength=2.0", "dlg:iterations=1")}
    assert not result.failed
    assert usable_workers({"attacks": ("dlg:iterations=1",), "sensitive": "3:0/5;4:1"}, 2) == 2
    assert usable_workers({"defences": ("none+dlg",)}, None) == 0


def test_a_component_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"^defences must be defences, got the attack Dlg\. See `gradveil list def"):
        package.audit(defences=[Dlg()])
    with pytest.raises(ConfigError, match=r"^attacks must be attacks, got the defence Scaled\."):
        package.audit(attacks=[Scaled()])
    with pytest.raises(ConfigError, match=r"^model must be a model, got the partition Iid\."):
        package.train(model=Iid())


def test_settings_that_are_no_texts_are_refused():
    assert build(Defence, spec_of(Scaled(labels=("a", "b")))).labels == ("a", "b")
    with pytest.raises(ConfigError, match=r"Settings of Scaled must be numbers.*got labels=\('a/b',\)"):
        spec_of(Scaled(labels=("a/b",)))


def test_a_class_in_place_of_an_object_is_refused():
    with pytest.raises(ConfigError, match=r"got the class Scaled. Call it: Scaled\(\)"):
        package.audit(defences=[Scaled])


def net(shape, num_classes):
    """Build one layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), num_classes))


def test_models_may_be_functions_and_networks(tmp_path):
    result = package.train(**SMALL, model=net, out=tmp_path / "function")
    assert read_settings(result.out / "settings.toml")["model"] == f"{__file__}:net"
    network = net((1, 28, 28), 10)
    nn.init.zeros_(network[1].weight)
    package.train(**SMALL | {"rounds": 0}, model=network, out=tmp_path / "network")
    saved = package.storage.load_tensors(tmp_path / "network" / "model.safetensors")
    assert saved["1.weight"].abs().max() == 0
    assert torch.equal(saved["1.bias"], network[1].bias)
    with pytest.raises(ConfigError, match=r"model must be a name, a torch.nn.Module or a function"):
        package.train(model=3)


def test_networks_may_have_names_of_components(tmp_path):
    class Mlp(nn.Module):
        """One layer."""

        def __init__(self):
            super().__init__()
            self.only = nn.Linear(784, 10)

        def forward(self, images):
            return self.only(images.flatten(1))

    def lenet5():
        return Mlp()

    networks = {
        "my-mlp": [Mlp(), Mlp],
        "my-lenet5": [lenet5],
        "my-lambda": [lambda: Mlp()],
        "my-partial": [partial(Mlp)],
    }
    for name, models in networks.items():
        for number, model in enumerate(models):
            result = package.train(**SMALL | {"rounds": 0}, model=model, out=tmp_path / f"{name}-{number}")
            assert read_settings(result.out / "settings.toml")["model"] == name
    linear = nn.Linear(784, 10)
    assert as_texts({"model": linear}) == {"model": "my-linear"}
    assert create_model("mlp", (1, 28, 28), 10, seed=0).__class__ is not Mlp


def test_data_sets_may_be_values(tmp_path):
    rng = np.random.default_rng(0)
    split = Split(rng.integers(0, 255, (40, 1, 6, 6), dtype=np.uint8), np.arange(40) % 4)
    mine = Dataset("my scans", split, split, 4, (0.5,), (0.5,))
    result = package.train(**SMALL, model="logistic", dataset=mine, out=tmp_path / "run")
    assert read_settings(result.out / "settings.toml")["dataset"] == "own-my-scans"
    with pytest.raises(ConfigError, match=r"must be a name, a path, a NamedSet or a gradveil.Dataset, got ndarray"):
        package.train(dataset=split.images)


def test_settings_and_options_together(tmp_path):
    given = TrainSettings(model="logistic", clients=2, rounds=3, partition="iid:images=10")
    result = package.train(settings=given, rounds=1, out=tmp_path / "run", workers=0)
    saved = make_train_settings(read_settings(result.out / "settings.toml"))
    assert (saved.rounds, saved.clients) == (1, 2)
    assert len(package.train(out=tmp_path / "run", resume=True, rounds=2, workers=0).rows) == 2
    with pytest.raises(UnknownNameError, match="Did you mean 'defence'"):
        package.train(defense="none")
    with pytest.raises(ConfigError, match="Add --out"):
        package.audit(resume=True)


def test_settings_and_paths_of_another_type_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"settings must be of the class AuditSettings, got TrainSettings\."):
        package.audit(settings=TrainSettings())
    with pytest.raises(ConfigError, match=r"out must be a path, as text or pathlib.Path, got 3\."):
        package.train(out=3)
    files = {"model_file": "m.safetensors", "update": "u.safetensors", "spec": "s.toml"}
    for name in files:
        known = {"spec": {"model": "mlp", "shape": [1, 2, 2], "num_classes": 2, "kind": "gradient"}}
        with pytest.raises(ConfigError, match=rf"{name} must be a path, as text or pathlib.Path, got 3\."):
            package.attack(**files | known | {name: 3}, out=tmp_path / "run")


def test_an_existing_run_is_continued_by_an_option_or_an_argument(tmp_path):
    package.train(**SMALL | {"rounds": 0}, model="logistic", out=tmp_path)
    with pytest.raises(RunFolderError, match=r"Add --resume \(in Python: resume=True\) to continue it"):
        package.train(**SMALL, model="logistic", out=tmp_path)


def test_without_out_a_new_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = package.train(**SMALL, model="logistic")
    assert result.out.parent.name == "runs"
    assert result.out.name.startswith("train-")
    assert result.report.is_file()


def test_attack_takes_paths_and_a_dictionary(tmp_path):
    trained = package.train(**SMALL, model="logistic", save_rounds=[1], out=tmp_path / "run")
    files = trained.out / "rounds" / "000001"
    spec = {"model": "logistic", "shape": [1, 28, 28], "num_classes": 10, "kind": "change", "lr": 0.05}
    result = package.attack(
        model_file=str(files / "model.safetensors"),
        update=[files / "update-0.safetensors", str(files / "update-1.safetensors")],
        spec={**spec, "num_examples": 10, "normalise": "0.13/0.31"},
        attack=Dlg(iterations=1),
        out=tmp_path / "attacked",
    )
    assert len(result.rows) == 2
    assert all(path.is_file() for path in result.pictures)
    assert result._repr_html_().count("data:image/png;base64,") == 2
    assert "updates=2" in repr(result)
    with pytest.raises(ConfigError, match=r"spec must state .*, got no kind. Add kind"):
        package.attack(
            model_file="m.safetensors",
            update="u.safetensors",
            spec={"model": "mlp", "shape": [1, 2, 2], "num_classes": 2},
        )


def test_score_has_a_summary():
    result = package.score(model="mlp:hidden=4", targets=1, defences=["none", Prune(fraction=0.9)])
    assert [line["defence"] for line in result.summary] == ["none", "prune:fraction=0.9"]
    assert "psnr_cap={'none': " in repr(result)
    assert "prune:fraction=0.9" in result._repr_html_()


@pytest.mark.parametrize("option", [{"rounds": 3}, {"adaptive": False}, {"momentum": 0.5}, {"modle": "mlp"}])
def test_score_refuses_what_it_has_no_use_for(option):
    with pytest.raises(UnknownNameError, match=rf"^A score has no setting '{next(iter(option))}'\."):
        package.score(model="mlp:hidden=4", targets=1, **option)


def test_signatures_say_which_objects_are_taken():
    audit, train = (inspect.signature(function).parameters for function in (package.audit, package.train))
    assert audit["defences"].annotation == str | Defence | Sequence[str | Defence]
    assert train["partition"].annotation == str | Partition
    assert not [name for name, p in {**audit, **train}.items() if str(p.annotation).startswith("tuple")]
    assert inspect.signature(package.attack).parameters["attack"].annotation == str | Attack


def test_the_tripwire_exports_its_own_names_only():
    public = [name for name in vars(package.tripwire) if not name.startswith("_")]
    assert sorted(public) == sorted(engines.tripwire.__all__)
    assert all(getattr(package.tripwire, name).__module__ == "gradveil.engines.tripwire" for name in public)


@pytest.mark.parametrize(("name", "settings"), [("audit", AuditSettings), ("train", TrainSettings)])
def test_help_tells_every_option_with_an_example(name, settings):
    function = getattr(package, name)
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert f"gradveil.{name}(" in text
    for field in fields(settings):
        assert inspect.signature(function).parameters[field.name].default == field.default
        assert f"{field.name} = {field.default!r}: {field.metadata['help']}" in text


@pytest.mark.parametrize("name", ["attack", "score"])
def test_help_has_an_example(name):
    assert f"gradveil.{name}(" in pydoc.render_doc(getattr(package, name), renderer=pydoc.plaintext)


def test_adopting_again_replaces():
    adopt("some-thing", 1)
    assert adopt("some-thing", 2) == "some-thing"
    assert ADOPTED["some-thing"] == 2


def test_a_script_without_a_guard_may_use_workers(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import gradveil

            print("once")
            tiny = {"model": "logistic", "attacks": "dlg:iterations=1", "targets": 1, "rounds": 0}
            result = gradveil.audit(**tiny, workers=1, out="run")
            print(result, len(result.failed), __file__.endswith("script.py"))
        """)
    )
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    assert ended.stdout.splitlines() == ["once", "AuditResult(rows=1, report='run/report.html') 0 True"]
