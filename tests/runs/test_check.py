"""A check of one's own model: a verdict in three lines, the gate's exit codes, and the privacy card."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradveil as package
from gradveil.errors import ConfigError, DataError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.runs.check import dataset_of

MINE = """
from torch import nn


def factory():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Sigmoid(), nn.Linear(12, 3))
"""
QUICK = ("--attacks", "linear", "--rounds", 1, "--clients", 3, "--targets", 3, "--workers", 0)
HOLDS = "gaussian:std=10"


@pytest.fixture
def scans(tmp_path):
    """A folder with a model's file and data of three classes."""
    rng = np.random.default_rng(0)
    (tmp_path / "mine.py").write_text(MINE)
    pictures = {f"x_{part}": rng.integers(0, 256, (120, 6, 6), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(120) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "scans.npz", **pictures, **labels)
    return tmp_path


def words(folder, *more, out="out"):
    named = ("check", f"{folder}/mine.py:factory", "--dataset", folder / "scans.npz", "--out", folder / out)
    return (*named, *QUICK, *more)


def test_the_gate_fails_undefended_and_passes_under_a_protection_that_holds(gradveil, scans):
    code, out, err = gradveil(*words(scans, "--fail-on", "identified>0.01"))
    assert code == 3, err
    assert "Verdict: fails." in out
    assert "Criterion identified>0.01 is met: 1 under none, linear." in err
    code, out, err = gradveil(*words(scans, "--fail-on", "identified>0.5", "--defence", HOLDS, out="held"))
    assert code == 0, err
    assert "Verdict: passes." in out
    card = json.loads((scans / "held" / "privacy_card.json").read_text())
    assert card["verdict"] == "passes"
    assert card["verdicts"][0]["criterion"] == "identified>0.5"
    assert card["threat_model"]["server"] == "honest but curious"
    assert card["threat_model"]["adaptive"]
    assert card["defences"] == ["none", HOLDS]
    assert card["attacks_run"] == ["linear"]
    assert card["attacks_not_run"]["gs"] == "not chosen"
    assert set(card["epsilon"]) == {"none", HOLDS}
    assert set(card["versions"]) == {"gradveil", "torch", "python"}
    assert card["date"].startswith("20")
    text = (scans / "held" / "privacy_card.md").read_text()
    assert text.startswith("# Privacy card: ")
    assert "Verdict: **passes**" in text
    assert "- Not run: gs: not chosen" in text
    assert (scans / "held" / "report.html").exists()


def test_json_is_one_document_and_has_the_same_exit_code(gradveil, scans):
    code, out, _ = gradveil(*words(scans, "--json"))
    document = json.loads(out)
    assert code == 3
    assert document["verdict"] == "fails"
    assert document["verdicts"][0]["met"]
    assert document["rows"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--fail-on", "identifed>0.01"), "Unknown field of a criterion 'identifed'. Did you mean 'identified'?"),
        (("--fail-on", "identified"), "A criterion must be a field"),
        (("--defence", "nonne"), "Unknown defence 'nonne'"),
    ],
)
def test_bad_usage_starts_nothing(gradveil, scans, more, message):
    code, _, err = gradveil(*words(scans, *more))
    assert code == 2
    assert message in err
    assert not (scans / "out").exists()


def test_a_criterion_that_can_not_be_measured_is_no_pass(gradveil, scans):
    code, out, err = gradveil(*words(scans, "--fail-on", "auc>0.6"))
    assert code == 1
    assert "Verdict: not measured." in out
    assert "no line of the run has auc" in err


def test_three_lines_of_python(scans):
    rng = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(60, 1, 6, 6, generator=rng) * 2 - 1, torch.arange(60) % 3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Sigmoid(), nn.Linear(12, 3))
    result = package.check(
        model, DataLoader(data, 16), normalise="0.5/0.5", attacks="linear", rounds=1, clients=3, targets=3,
        out=scans / "python",
    )  # fmt: skip
    assert result.verdict == "fails"
    assert result.page.exists()
    assert result.card.exists()
    assert {row["kind"] for row in result.rows} == {"privacy", "utility"}
    assert "fails" in repr(result)
    assert "gradveil check: fails" in result._repr_html_()


def test_protocols_become_settings_and_others_are_refused(scans):
    local = LocalSettings(epochs=1, batch_size=4, optimiser="adam")
    with pytest.raises(ConfigError, match="got a protocol with optimiser = 'adam'"):
        package.check(f"{scans}/mine.py:factory", scans / "scans.npz", protocol=Protocol(local, 0.1))


@pytest.mark.parametrize(
    ("data", "normalise", "message"),
    [
        ([], "none", "must give batches"),
        ([torch.zeros(3)], "none", "must give batches"),
        ((torch.zeros(6, 4), torch.zeros(6)), "none", r"images \(N, C, H, W\), got \(6, 4\)"),
        ((torch.full((6, 1, 2, 2), 2.0), torch.zeros(6)), "none", "must be in"),
        ((torch.zeros(3, 1, 2, 2), torch.zeros(3)), "none", "at least 5 images of a class"),
    ],
)
def test_data_that_can_not_be_used(data, normalise, message):
    with pytest.raises(DataError, match=message):
        dataset_of(data, normalise)


def test_normalisation_is_undone():
    images = torch.rand(10, 1, 2, 2)
    dataset = dataset_of([(images * 2 - 1, torch.zeros(10, dtype=torch.long))], "0.5/0.5")
    both = np.concatenate([dataset.train.images, dataset.test.images])
    np.testing.assert_allclose(np.sort(both.flatten()), np.sort(images.numpy().flatten()), atol=1e-6)
    assert (len(dataset.train), len(dataset.test)) == (8, 2)


def test_an_audit_has_a_gate_and_a_card_too(gradveil, scans):
    usual = ("audit", "--model", f"{scans}/mine.py:factory", "--dataset", scans / "scans.npz", *QUICK, "--yes")
    code, _, err = gradveil(*usual, "--fail-on", "identified>0.01,psnr>blind+1", "--out", scans / "a")
    assert code == 3
    assert err.count("Criterion ") == 2
    assert json.loads((scans / "a" / "privacy_card.json").read_text())["verdict"] == "fails"
    code, out, _ = gradveil(*usual, "--out", scans / "b", "--json")
    assert code == 0
    assert json.loads(out)["verdicts"] == []
    assert json.loads((scans / "b" / "privacy_card.json").read_text())["verdict"] == "no criterion"
