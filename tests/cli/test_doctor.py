"""``gradveil doctor`` says what is there, what is missing, and what is wrong."""

import json
import shutil

import pytest

from gradveil.runs import doctor


def findings(ended):
    return {finding["what"]: finding for finding in json.loads(ended.out)["findings"]}


def test_a_healthy_machine(gradveil, tmp_path):
    ended = gradveil("doctor", "--data-root", tmp_path, "--json")
    assert ended.code == 0
    found = findings(ended)
    assert {"gradveil", "Python", "torch", "flwr", "browser", "C++ compiler", "data root", "mnist-5k"} <= set(found)
    assert found["torch"]["state"] == "ok"
    assert found["mnist"] == {
        "what": "mnist", "state": "missing", "detail": "0 of 4 files",
        "advice": "place its files there by hand: GRADVEIL_OFFLINE is set",
    }  # fmt: skip
    assert "torch" in gradveil("doctor", "--data-root", tmp_path).out


def test_a_package_that_is_missing_or_too_old_is_wrong(gradveil, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["torch>=999", "no-such-package>=1", "flwr>=0; extra == 'x'"])
    ended = gradveil("doctor", "--json")
    assert ended.code == 1
    found = findings(ended)
    assert found["torch"]["state"] == "wrong"
    assert found["torch"]["advice"] == "pip install 'torch>=999'"
    assert found["no-such-package"]["state"] == "wrong"


@pytest.mark.parametrize(("tool", "what"), [("chromium", "browser"), ("g++", "C++ compiler")])
def test_tools_that_are_not_there_are_only_missing(monkeypatch, tmp_path, tool, what):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = {finding.what: finding for finding in doctor.examine(tmp_path)}
    assert found[what].state == "missing"
    assert found[what].advice
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == tool else None)
    found = {finding.what: finding for finding in doctor.examine(tmp_path)}
    assert found[what] == doctor.MachineFact(what, "ok", f"/bin/{tool}")


def test_weights_are_listed(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "x.safetensors").write_bytes(b"")
    found = {finding.what: finding for finding in doctor.examine(tmp_path)}
    assert (found["weights"].state, found["weights"].detail) == ("ok", "x.safetensors")
