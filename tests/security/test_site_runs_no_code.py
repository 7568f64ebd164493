"""Nothing that a run config names is imported or opened at a site, and no error tells the server what is there."""

import sys
from dataclasses import replace

import pytest

from gradveil.catalogue import catalogue
from gradveil.engines.flower_site import client_app
from tests.security.sites import RUN, OneSite, code

TRAP = """
from pathlib import Path
Path({mark!r}).touch()
from gradveil.defences import Defence
from gradveil.data.partition import Partition
class Mine(Defence):
    pass
class Deal(Partition):
    pass
def factory(*arguments, **settings):
    raise RuntimeError
"""


@pytest.fixture
def trap(tmp_path):
    """Write a Python file that leaves a mark when it is imported."""
    path = tmp_path / "trap.py"
    path.write_text(TRAP.format(mark=str(tmp_path / "imported")))
    return path


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("defence", "{}:Mine"), ("defence", "prune+{}:Mine"), ("defence", "loda:extractor={}:factory"),
        ("model", "{}:factory"), ("partition", "{}:Deal"), ("dataset", "{}:factory"), ("aux", "{}:factory"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("agreed", ["any", "gaussian:std=0.1"])
def test_no_python_file_of_a_run_is_imported(tmp_path, trap, setting, text, agreed):
    run = replace(RUN, **{setting: text.format(trap)})
    site = OneSite(tmp_path / "private", run, agreed=replace(RUN, defence=agreed, model="any"))
    site.node["model"] = "any"
    answers = [site.ask("query"), site.train(1)]
    assert not (tmp_path / "imported").exists()
    if setting in ("defence", "model", "partition"):
        assert {code(answer) for answer in answers} <= {"file", "defence"}
        assert "" not in {code(answer) for answer in answers}


def test_a_site_may_agree_to_a_file_of_its_own(tmp_path, trap):
    run = replace(RUN, defence=f"{trap}:Mine")
    assert code(OneSite(tmp_path / "private", run).ask("query")) == ""
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize("setting", ["weights", "aux", "dataset"])
def test_paths_of_a_run_are_not_opened(tmp_path, setting):
    secret = tmp_path / "patient-7.npz"
    secret.write_bytes(b"not for the run")
    site = OneSite(tmp_path / "private", replace(RUN, **{setting: str(secret)}), agreed=RUN)
    assert code(site.ask("query")) == ""
    assert code(site.train(1)) == ""


OPENED = []
sys.addaudithook(lambda event, details: OPENED.append(str(details[0])) if event == "open" else None)
MORE = {"weights": ",extractor=mlp,start=noise"}
SETTINGS = [(kind, name, key) for kind in ("defences", "models", "partitions")
            for name, entry in catalogue(kind).entries.items()
            for key, default in entry.settings.items() if isinstance(default, str)]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "setting"), SETTINGS)
def test_no_setting_of_a_component_opens_a_file(tmp_path, kind, name, setting):
    secret = tmp_path / "patient-7"
    secret.write_bytes(b"not for the run")
    text = f"{name}:{setting}={secret}{MORE.get(setting, '')}"
    site = OneSite(
        tmp_path / "private", replace(RUN, **{kind.removesuffix("s"): text}), agreed=replace(RUN, model="any")
    )
    site.node |= {"defence": "any"}
    OPENED.clear()
    site.ask("query")
    assert code(site.train(1))
    assert str(secret) not in OPENED


def test_a_site_may_agree_to_a_defence_with_weights_of_its_own(tmp_path):
    run = replace(RUN, defence=f"loda:extractor=mlp,start=noise,weights={tmp_path / 'own'}")
    (tmp_path / "own").write_bytes(b"no weights")
    site = OneSite(tmp_path / "private", run)
    OPENED.clear()
    assert code(site.ask("query")) != "file"
    assert code(site.train(1)) not in ("file", "")
    assert str(tmp_path / "own") in OPENED


def test_errors_carry_no_paths_and_no_texts(tmp_path):
    folder = tmp_path / "patient-7"
    site = OneSite(folder)
    site.train(1)
    (folder / "ledger-0.json").write_text("{")
    broken = site.ask("query")
    site.node["policy"] = str(folder / "none.toml")
    for answer, wanted in ((broken, "state"), (site.ask("query"), "policy")):
        (record,) = answer.config_records.values()
        assert record == {"code": wanted, "number": 0}
        assert not answer.array_records


def test_an_unforeseen_error_is_one_word(tmp_path):
    site = OneSite(tmp_path)

    def data(context):
        raise KeyError("pixel 0.25 of patient 7")

    site.app = client_app(data)
    assert site.ask("query").config_records["error"] == {"code": "internal", "number": 0}
